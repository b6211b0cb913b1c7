"""The SDM layer that goes with a model: fitted over D_ca with generated negatives, saved as `sdm/` beside the weights.

Spec section 7: gamma_gen = gamma_diversity = 1, for every model alike, fine-tuned with SDM layers or not at all.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from sdmlm import __version__
from sdmlm.estimator.activation import sdm_losses
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning.config import SDMConfig
from sdmlm.finetuning.negatives import HardNegatives, NegativePolicy, generate_negatives
from sdmlm.language_model.encoding import Encoder, check_rows, completion_text
from sdmlm.language_model.forward import allow_inside, inner_lm, read_documents
from sdmlm.language_model.sdm_folder import LM_FILE, fingerprint, write_sdm_folder
from sdmlm.rewards import Reward, check_reward, load_reward, reward_name

Rows = Sequence[Mapping[str, Any]]


def position_limit(model: Any, max_length: int | None) -> int | None:
    """The longest document in tokens: what was asked for, within the positions the model has."""
    positions = getattr(inner_lm(model).config.get_text_config(), "max_position_embeddings", None)
    if positions is None or max_length is None:
        return max_length or positions
    if max_length > positions:
        raise ValueError(f"max_length is {max_length} but the model has only {positions} positions: lower it.")
    return max_length


def completion_room(encoder: Encoder, rows: Rows) -> int:
    """Tokens that a generation may take: the longest completion of the rows and 8 more."""
    texts = [completion_text(row[name]) for row in rows for name in ("chosen", "rejected")]
    return max(len(encoder.continuation(text)) for text in texts) + encoder.suffix_length + 8


def check_halves(positive: Sequence[bool], name: str) -> None:
    """Refuse documents that cannot be halved with both classes in each half."""
    for kind, count in (("positive", sum(positive)), ("negative", len(positive) - sum(positive))):
        if count < 2:
            raise ValueError(
                f"The {name} rows are too few for two halves of an SDM layer: {len(positive)} rows gave {count} {kind} "
                "documents, and each half needs both kinds. Give more rows; hundreds are a start."
            )


def positives(args: SDMConfig, n: int, epoch: int) -> list[bool]:
    """Which of n rows stand with their positive in an epoch (from 1; the choice over D_ca is epoch 0, made once)."""
    policy = NegativePolicy(args.gamma_plus, 0.0, 0.0, seed=args.seed)
    return [policy.draw(i, epoch).positive for i in range(n)]


def check_draws(args: SDMConfig, n_train: int, n_calibration: int) -> None:
    """Refuse row counts that leave some SDM layer of the run without both classes in both halves."""
    check_halves(positives(args, n_calibration, 0), "calibration")
    if args.loss == "sdm":
        # Every epoch halves its own documents; with many rows chance cannot fail, so the first will do.
        for epoch in range(1, 1 + (math.ceil(args.num_train_epochs) if n_train < 1000 else 1)):
            check_halves(positives(args, n_train, epoch), "train")


def fit_once(
    accelerator: Accelerator,
    args: SDMConfig,
    seeds: Sequence[int],
    h: Tensor,
    labels: Sequence[int],
    documents: Mapping[int | str, str] | None = None,
    progress: bool = False,
) -> SDMEstimator:
    """An SDM layer, fitted by the first process and sent to the others, there on their own device."""
    sent: list[Any] = [None]
    estimator: SDMEstimator | None = None
    if accelerator.is_main_process:
        seed = int(np.random.default_rng([args.seed, *seeds]).integers(2**31))
        estimator = SDMEstimator(**args.estimator_parameters(), seed=seed, device=args.device, progress=progress)
        estimator.fit(h, labels, documents=documents)
        if accelerator.num_processes > 1:
            file = io.BytesIO()
            torch.save(estimator, file)
            sent = [file.getvalue()]
    if accelerator.num_processes > 1:
        broadcast_object_list(sent)
    if estimator is None:
        device = args.device if args.device.type != "cpu" else torch.device("cpu")  # torch.load refuses "cpu:0"
        estimator = torch.load(io.BytesIO(sent[0]), map_location=device, weights_only=False)
        estimator.device = device
    return estimator


def fit_final_layer(
    model: Any,
    encoder: Encoder,
    rows: Rows,
    args: SDMConfig,
    reward: Reward | str | None = None,
    accelerator: Accelerator | None = None,
    progress: bool = True,
) -> SDMEstimator:
    """Fit the SDM layer for use over calibration rows; also the entry point for a model that was not fine-tuned.

    One document per prompt: its positive with probability gamma_plus, otherwise the model's own greedy completion if
    r = 0, otherwise the static negative.
    """
    check_rows(rows, encoder.tags)
    r = load_reward(reward)
    check_reward(r, rows)
    allow_inside(model)
    accelerator = accelerator or Accelerator(cpu=args.device.type == "cpu")
    policy = NegativePolicy(args.gamma_plus, 1.0, 1.0, seed=args.seed, first_epoch=0)
    check_halves([policy.draw(i, epoch=0).positive for i in range(len(rows))], "calibration")
    room = args.max_new_tokens or completion_room(encoder, rows)
    store = HardNegatives(policy, r, room, tokens_per_batch=args.tokens_per_batch)
    generated = generate_negatives(accelerator, store, model, encoder, rows, epoch=0, step=0, progress=progress)
    if not any(body is not None for body in generated):
        warnings.warn(
            "No generation over the calibration rows was wrong, so the final SDM layer has only static negatives: its "
            "verdicts on wrong generations rest on those.",
            stacklevel=2,
        )
    documents = store.documents(rows, range(len(rows)), epoch=0)
    encoded = [encoder.encode(rows[d.row]["prompt"], d.completion, d.positive, row=d.row) for d in documents]
    h, _ = read_documents(
        model,
        encoded,
        encoder.pad_id,
        args.tokens_per_batch,
        accelerator.process_index,
        accelerator.num_processes,
        progress=progress,
    )
    labels = [int(d.positive) for d in documents]
    texts: dict[int | str, str] = {
        d.row: encoder.decode(e.input_ids[: e.verified_at + 1]) for d, e in zip(documents, encoded, strict=True)
    }
    return fit_once(accelerator, args, [4], h, labels, texts, progress)


def layer_metrics(estimator: SDMEstimator) -> dict[str, float]:
    """The calibration summary of an SDM layer: the columns of the paper's last table."""
    layer, region = estimator.layers_[0], estimator.region_
    ca = layer.calibration
    out = {"sdm_loss": estimator.loss_, "q_min": region.q_min}
    right = (ca.predictions == ca.labels).double()
    losses = sdm_losses(ca.z, ca.q, ca.d, ca.labels)
    for c, psi in enumerate(region.psi):
        own = ca.labels == c
        out |= {
            f"psi_{c}": psi,
            f"mean_q_{c}": float(ca.q[own].double().mean()),
            f"sdm_loss_{c}": float(losses[own].mean()),
            f"sdm_accuracy_{c}": float(right[own].mean()),
        }
    out["admitted"] = float(region.contains(ca.q_prime, ca.p, ca.predictions).double().mean())
    return out


TRAINING_FACTS = (
    "loss", "hard_negatives", "gamma_plus", "gamma_gen", "gamma_diversity", "learning_rate", "num_train_epochs", "seed",
    "alpha",
)  # fmt: skip


def save_final_layer(
    folder: Path,
    estimator: SDMEstimator,
    weights: Mapping[str, Tensor],
    encoder: Encoder,
    args: SDMConfig,
    reward: Reward,
    fine_tuned: bool = True,
    data: Mapping[str, Any] | None = None,
) -> None:
    """`sdm/`: the estimator, and how documents are put to the model it was fitted over.

    `fine_tuned`: whether `args` is how the model was trained; otherwise what the layer before said of that is kept, if it was
    fitted over these weights. `data`: the rows of the layer, where they are not those of the training run.
    """
    tags, same = encoder.tags, fingerprint(weights)
    training = {name: getattr(args, name) for name in TRAINING_FACTS} if fine_tuned else _training_before(folder, same)
    facts = {
        "format_version": 1,
        "sdmlm_version": __version__,
        "fingerprint": same,
        "tags": {name: getattr(tags, name) for name in ("open", "close", "yes", "no", "separator")},
        "max_length": encoder.max_length,
        "truncate_prompt": encoder.truncate_prompt,
        "max_new_tokens": args.max_new_tokens,
        "reward": reward_name(reward),
        # As the final layer's documents were read: h must be read likewise when it is asked.
        "dtype": next(str(t.dtype).removeprefix("torch.") for t in weights.values() if t.is_floating_point()),
        "autocast": ("bfloat16" if args.bf16 else "float16" if args.fp16 else None) if fine_tuned else None,
        "training": training,
        "calibrated": None if data is None else dict(data),
    }
    write_sdm_folder(folder, estimator, facts)


def _training_before(folder: Path, fingerprint: str) -> dict[str, Any] | None:
    try:
        facts = json.loads((folder / LM_FILE).read_text(encoding="utf-8"))
        return dict(facts["training"]) if facts["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
