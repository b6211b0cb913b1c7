"""The SDM layer that goes with a model: fitted over D_ca with generated negatives, saved as `sdm/` beside the weights.

Spec section 7: gamma_gen = gamma_diversity = 1, for every model alike, fine-tuned with SDM layers or not at all.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from sdmlm import __version__
from sdmlm.artifacts import write_text_atomically
from sdmlm.config import SDMConfig
from sdmlm.encoding import Encoder
from sdmlm.estimator import SDMEstimator
from sdmlm.forward import allow_inside, inner_lm, read_documents
from sdmlm.negatives import HardNegatives, NegativePolicy
from sdmlm.rewards import Reward, load_reward

SDM_FOLDER = "sdm"
LM_FILE = "lm.json"
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
    texts = [row[name] for row in rows for name in ("chosen", "rejected")]
    longest = max(len(encoder.encode_for_judging("", text)) for text in texts) if texts else 0
    return longest + encoder.suffix_length + 8


def fit_final_layer(
    model: Any,
    encoder: Encoder,
    rows: Rows,
    args: SDMConfig,
    reward: Reward | str | None = None,
    accelerator: Accelerator | None = None,
    fsdp: bool = False,
) -> SDMEstimator:
    """Fit the SDM layer for use over calibration rows; also the entry point for a model that was not fine-tuned.

    One document per prompt: its positive with probability gamma_plus, otherwise the model's own greedy completion if
    r = 0, otherwise the static negative.
    """
    allow_inside(model)
    accelerator = accelerator or Accelerator(cpu=args.device.type == "cpu")
    rank, world = accelerator.process_index, accelerator.num_processes
    policy = NegativePolicy(args.gamma_plus, 1.0, 1.0, seed=args.seed, first_epoch=0)
    room = args.max_new_tokens or completion_room(encoder, rows)
    store = HardNegatives(policy, load_reward(reward), room, tokens_per_batch=args.tokens_per_batch)
    numbers = range(len(rows))
    shared = world > 1 and not fsdp
    store.prepare(model, encoder, rows, numbers[rank::world] if shared else numbers, epoch=0, step=0)
    if shared:
        store.load_state_dict({"attempts": gather_object(store.state_dict()["attempts"])})
    documents = store.documents(rows, numbers, epoch=0)
    if not any(d.source == "generated" for d in documents):
        warnings.warn(
            "No generation over the calibration rows was wrong, so the final SDM layer has only static negatives: its "
            "verdicts on wrong generations rest on those.",
            stacklevel=2,
        )
    encoded = [encoder.encode(rows[d.row]["prompt"], d.completion, d.positive, row=d.row) for d in documents]
    h, _ = read_documents(model, encoded, encoder.pad_id, args.tokens_per_batch, rank, world)
    labels = [int(d.positive) for d in documents]
    texts: dict[int | str, str] = {
        d.row: encoder.decode(e.input_ids[: e.verified_at + 1]) for d, e in zip(documents, encoded, strict=True)
    }
    found: list[Any] = [None]
    if accelerator.is_main_process:
        seed = int(np.random.default_rng([args.seed, 4]).integers(2**31))
        estimator = SDMEstimator(**args.estimator_parameters(), seed=seed, device=args.device)
        found = [estimator.fit(h, labels, documents=texts)]
    if world > 1:
        broadcast_object_list(found)
    return found[0]  # type: ignore[no-any-return]


def save_final_layer(folder: Path, estimator: SDMEstimator, model: Any, encoder: Encoder, args: SDMConfig) -> None:
    """`sdm/`: the estimator, and how documents are put to the model it was fitted over."""
    estimator.save_pretrained(folder)
    tags = encoder.tags
    facts = {
        "format_version": 1,
        "sdmlm_version": __version__,
        "fingerprint": fingerprint(model),
        "tags": {name: getattr(tags, name) for name in ("open", "close", "yes", "no", "separator")},
        "max_length": encoder.max_length,
        "truncate_prompt": encoder.truncate_prompt,
        "max_new_tokens": args.max_new_tokens,
        "training": {
            name: getattr(args, name)
            for name in (
                "loss", "hard_negatives", "gamma_plus", "gamma_gen", "gamma_diversity", "learning_rate", "num_train_epochs",
                "seed", "alpha",
            )
        },
    }  # fmt: skip
    write_text_atomically(folder / LM_FILE, json.dumps(facts, indent=2) + "\n")


@torch.no_grad()
def fingerprint(model: Any) -> str:
    """A hash over a sample of every weight: says whether an SDM layer was fitted over these weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(inner_lm(model).state_dict().items()):
        flat = tensor.detach().flatten()
        some = flat[:: max(1, len(flat) // 64)].float().cpu().contiguous()
        digest.update(name.encode() + str(tuple(tensor.shape)).encode() + some.numpy().tobytes())
    return digest.hexdigest()
