"""The dry run: everything that is known about a training run before it begins, without loading weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sdmlm.finetuning.held_out import held_out_rows, rows_for_certificate
from sdmlm.finetuning.layers import check_draws, positives
from sdmlm.finetuning.loss import CHUNK_NUMEL
from sdmlm.finetuning.processes import is_main_process
from sdmlm.finetuning.run import TrainingRun
from sdmlm.language_model.encoding import IGNORED, Encoded, Encoder
from sdmlm.language_model.rows import PreferenceRow, first_rows
from sdmlm.storage.progress import track

Pair = tuple[Encoded, Encoded]  # the positive and the negative document of a row


@dataclass(frozen=True)
class DryRun:
    """The results of a dry run. `pairs` has None for a training row that is too long."""

    summary: dict[str, Any]
    pairs: list[Pair | None]
    positive: list[bool]  # which training rows the first epoch represents by their positive


def dry_run(run: TrainingRun) -> DryRun:
    """Lengths, classes, memory and steps of a run."""
    pairs, lengths = _encode_all(run)
    positive = {
        "train": positives(run.config, run.data["train"]["used"], epoch=1),
        "calibration": positives(run.config, run.data["calibration"]["used"], epoch=0),
    }
    summary = {
        "model": run.settings.model,
        "data": run.data,
        "lengths": lengths,
        "documents": {name: {"positive": sum(p), "negative": len(p) - sum(p)} for name, p in positive.items()},
        "memory": _memory(run, pairs),
        "steps": run.steps(),
        "certificate": _certificate(run),
    }
    return DryRun(summary, pairs, positive["train"])


def check_trainable(run: TrainingRun, checked: DryRun) -> None:
    """Raise the error with which training would refuse these rows, if it would."""
    if checked.summary["lengths"]["refused"]:
        run.encoded()
    check_draws(run.config, run.data["train"]["used"], [row["prompt"] for row in run.calibration])


def _encode_all(run: TrainingRun) -> tuple[list[Pair | None], dict[str, Any]]:
    """The documents of every training row, and the lengths over all rows."""
    encoder, unbounded = run.encoder, replace(run.encoder, max_length=None)
    limit, train = encoder.max_length, run.train
    lengths, over, refused = [], 0, 0
    pairs: list[Pair | None] = []
    for row in track([*train, *run.calibration], "Encoding", is_main_process()):
        pair = _pair(unbounded, row)
        longest = max(len(document.input_ids) for document in pair)
        lengths.append(longest)
        fitting: Pair | None = pair
        if limit is not None and longest > limit:
            over += 1
            try:
                fitting = _pair(encoder, row)
            except ValueError:
                fitting, refused = None, refused + 1
        pairs.append(fitting)
    ordered = sorted(lengths)
    measured = {
        "longest": ordered[-1],
        "median": ordered[len(ordered) // 2],
        "limit": limit,
        "over": over,
        "refused": refused,
    }
    return pairs[: len(train)], measured


def _pair(encoder: Encoder, row: PreferenceRow) -> Pair:
    return encoder.encode(row["prompt"], row["chosen"], True), encoder.encode(row["prompt"], row["rejected"], False)


def _certificate(run: TrainingRun) -> dict[str, int] | None:
    """How many calibration rows will be held out for the certificate, and the least that can certify anything."""
    config = run.config
    if config.documents != "own":
        return None
    distinct = len(first_rows(row["prompt"] for row in run.calibration))
    return {"held_out": held_out_rows(distinct, config), "least": rows_for_certificate(config)}


def _memory(run: TrainingRun, pairs: list[Pair | None]) -> dict[str, int]:
    """Bytes on one device without sharding; activations, which depend on the attention used, are not counted."""
    parameters = list(run.skeleton.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    vocabulary = run.skeleton.config.get_text_config().vocab_size
    counted = sorted((sum(label != IGNORED for label in pair[0].labels) for pair in pairs if pair), reverse=True)
    tokens = min(max(1, CHUNK_NUMEL // vocabulary), sum(counted[: run.config.per_device_train_batch_size]))
    total = sum(p.numel() for p in parameters)
    sizes = {
        "weights": 4 * total,  # float32, whatever autocast computes in
        "gradients": 4 * trainable,
        "optimizer": 8 * trainable,  # AdamW's two moments
        "logits": 4 * tokens * vocabulary,
    }
    return {"parameters": total, "trainable": trainable, **sizes, "total": sum(sizes.values())}
