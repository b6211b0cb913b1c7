"""SDM layers during fine-tuning: which documents they are fitted over, fitting them, and the loss bases they give."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning.config import SDMConfig
from sdmlm.finetuning.held_out import evaluated_rows
from sdmlm.finetuning.negatives import NegativePolicy
from sdmlm.language_model.forward import inner_lm


def position_limit(model: Any, max_length: int | None) -> int | None:
    """The longest document in tokens: what was asked for, within the positions that the model has."""
    positions = getattr(inner_lm(model).config.get_text_config(), "max_position_embeddings", None)
    if positions is None or max_length is None:
        return max_length or positions
    if max_length > positions:
        raise ValueError(f"max_length is {max_length} but the model has only {positions} positions: lower it.")
    return max_length


def positives(args: SDMConfig, n: int, epoch: int) -> list[bool]:
    """Which of n rows are represented by their positive in an epoch (from 1).

    Epoch 0 is the choice over the calibration rows, which is made once.
    """
    policy = NegativePolicy(args.gamma_plus, 0.0, 0.0, seed=args.seed)
    return [policy.draw(row, epoch).positive for row in range(n)]


def check_halves(positive: Sequence[bool], name: str) -> None:
    """Refuse documents that cannot be halved with both classes in each half."""
    for kind, count in (("positive", sum(positive)), ("negative", len(positive) - sum(positive))):
        if count < 2:
            raise ValueError(
                f"The {name} rows are too few for two halves of an SDM layer: {len(positive)} rows gave {count} {kind} "
                "documents, and each half needs both kinds. Give more rows; hundreds are a start."
            )


def check_draws(args: SDMConfig, n_train: int, calibration: Sequence[Any]) -> None:
    """Refuse rows that leave some SDM layer of the run without both classes in both halves.

    `calibration`: the prompts of the calibration rows.
    """
    drawn, evaluated = positives(args, len(calibration), 0), evaluated_rows(calibration, args)
    name = "calibration" if len(evaluated) == len(drawn) else "calibration (without those held out for the certificate)"
    check_halves([drawn[i] for i in evaluated], name)
    if args.loss == "sdm":
        # Every epoch splits its own documents. With a thousand rows no draw can fail in practice: check one epoch only.
        for epoch in range(1, 1 + (math.ceil(args.num_train_epochs) if n_train < 1000 else 1)):
            check_halves(positives(args, n_train, epoch), "train")


def fit_and_broadcast(
    accelerator: Accelerator,
    args: SDMConfig,
    seeds: Sequence[int],
    h: Tensor,
    labels: Sequence[int],
    documents: Mapping[int | str, str] | None = None,
    progress: bool = False,
) -> SDMEstimator:
    """An SDM layer over summaries h (N, 2H), fitted by the main process and sent to the others."""
    estimator: SDMEstimator | None = None
    if accelerator.is_main_process:
        seed = int(np.random.default_rng([args.seed, *seeds]).integers(2**31))
        estimator = SDMEstimator.published(
            **args.estimator_parameters(), seed=seed, device=args.device, progress=progress
        )
        estimator.fit(h, labels, documents=documents)
    estimator = from_main_process(accelerator, estimator, args.device)
    estimator.device = args.device
    return estimator


def from_main_process(accelerator: Accelerator, value: Any, device: torch.device) -> Any:
    """The main process's value, on every process; what was on its accelerator comes to `device`."""
    if accelerator.num_processes == 1:
        return value
    payload: list[Any] = [None]
    if accelerator.is_main_process:
        file = io.BytesIO()
        torch.save(value, file)
        payload = [file.getvalue()]
    broadcast_object_list(payload)
    if accelerator.is_main_process:
        return value

    def where(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else torch.serialization.default_restore_location(storage, str(device))

    return torch.load(io.BytesIO(payload[0]), map_location=where, weights_only=False)


@torch.no_grad()
def loss_bases(layer: SDMEstimator, h: Tensor, labels: Tensor, own_entry: Tensor) -> Tensor:
    """The base of each document's next-token loss, b = 2 + SDM(z')_y (Eq. 1 of the paper), (N,) on the CPU.

    `own_entry` is the index of each document's row in the support of the layer, -1 for none; this entry is ignored for the
    document. y = `labels` is the reward of the document.
    """
    with torch.autocast(h.device.type, enabled=False):  # training calls this inside the LM's forward pass
        output = layer.output(h, own_entry)
    return 2 + output[torch.arange(len(labels)), labels]
