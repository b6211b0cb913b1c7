"""`sdmlm train --dry-run`: encodes and checks everything, shows three documents with their mask, and trains nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.cli.commands import calibrate
from sdmlm.cli.commands.plan import Plan, announce
from sdmlm.finetuning.processes import is_main_process

if TYPE_CHECKING:
    from rich.text import Text

    from sdmlm.language_model.encoding import Encoded, Encoder
    from sdmlm.language_model.rows import PreferenceRow


def rehearse(args: argparse.Namespace, plan: Plan) -> None:
    """Lengths, classes, memory, steps, and three documents as the loss sees them; fails where training would."""
    from sdmlm.finetuning.final_layer import check_draws, positives

    encoded, lengths = _encode_all(plan)
    positive = {
        "train": positives(plan.config, len(plan.train), epoch=1),
        "calibration": positives(plan.config, len(plan.calibration), epoch=0),
    }
    facts = {
        "model": plan.settings["model"],
        "data": plan.data,
        "lengths": lengths,
        "documents": {name: {"positive": sum(p), "negative": len(p) - sum(p)} for name, p in positive.items()},
        "memory": _memory(plan, encoded),
        "steps": _steps(plan),
    }
    if is_main_process():
        out = common.console(args)
        announce(plan)
        _show_examples(out, plan, encoded, positive["train"])
        _show_facts(out, facts)
        if args.json:
            common.print_json(facts)
    if lengths["refused"]:
        # Nothing would be trained: say so as training would.
        for source in plan.sources:
            calibrate.check_lengths(plan.encoder, source.rows, source.source)
    check_draws(plan.config, len(plan.train), len(plan.calibration))
    if is_main_process():
        common.console(args).print("Dry run: nothing was trained or written.")


def _encode_all(plan: Plan) -> tuple[list[tuple[Encoded, Encoded] | None], dict[str, Any]]:
    """(positive, negative) of every training row, None for a row that is refused; and how long documents are."""
    from dataclasses import replace

    from sdmlm.storage.progress import track

    encoder, unbounded = plan.encoder, replace(plan.encoder, max_length=None)
    limit = encoder.max_length
    lengths, over, refused = [], 0, 0
    encoded: list[tuple[Encoded, Encoded] | None] = []
    for row in track([*plan.train, *plan.calibration], "Encoding", is_main_process()):
        pair = _pair(unbounded, row)
        longest = max(len(e.input_ids) for e in pair)
        lengths.append(longest)
        kept: tuple[Encoded, Encoded] | None = pair
        if limit is not None and longest > limit:
            over += 1
            try:
                kept = _pair(encoder, row)
            except ValueError:
                kept, refused = None, refused + 1
        encoded.append(kept)
    ordered = sorted(lengths)
    facts = {
        "longest": ordered[-1],
        "median": ordered[len(ordered) // 2],
        "limit": limit,
        "over": over,
        "refused": refused,
    }
    return encoded[: len(plan.train)], facts


def _pair(encoder: Encoder, row: PreferenceRow) -> tuple[Encoded, Encoded]:
    return encoder.encode(row["prompt"], row["chosen"], True), encoder.encode(row["prompt"], row["rejected"], False)


def _memory(plan: Plan, encoded: list[tuple[Encoded, Encoded] | None]) -> dict[str, int]:
    """Bytes on one device without sharding; activations, which depend on the attention used, come on top."""
    from sdmlm.finetuning.loss import CHUNK_NUMEL
    from sdmlm.language_model.encoding import IGNORED

    parameters = list(plan.skeleton.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    vocabulary = plan.skeleton.config.get_text_config().vocab_size
    counted = sorted((sum(label != IGNORED for label in pair[0].labels) for pair in encoded if pair), reverse=True)
    tokens = min(max(1, CHUNK_NUMEL // vocabulary), sum(counted[: plan.config.per_device_train_batch_size]))
    total = sum(p.numel() for p in parameters)
    sizes = {
        "weights": 4 * total,  # float32, whatever autocast computes in
        "gradients": 4 * trainable,
        "optimizer": 8 * trainable,  # AdamW's two moments
        "logits": 4 * tokens * vocabulary,
    }
    return {"parameters": total, "trainable": trainable, **sizes, "total": sum(sizes.values())}


def _steps(plan: Plan) -> dict[str, int]:
    """As SDMTrainer counts them."""
    config, n = plan.config, len(plan.train)
    documents = config.train_batch_size * config.world_size
    batches = n // documents if config.dataloader_drop_last else -(-n // documents)
    epoch = max(1, -(-batches // config.gradient_accumulation_steps))
    total = config.max_steps if config.max_steps > 0 else -(-epoch * config.num_train_epochs // 1)
    chance = (1 - config.gamma_plus) * config.gamma_gen * config.gamma_diversity * config.hard_negatives
    return {
        "batch": documents * config.gradient_accumulation_steps,
        "per_epoch": epoch,
        "total": int(total),
        "generations_per_epoch": round(n * chance),
    }


def _show_examples(out: Any, plan: Plan, encoded: list[tuple[Encoded, Encoded] | None], positive: list[bool]) -> None:
    from rich.text import Text

    whole = [i for i, pair in enumerate(encoded) if pair]
    if not whole:
        return
    longest = max((len(pair[0].input_ids), i) for i, pair in enumerate(encoded) if pair)[1]
    out.print(Text.assemble(
        "Three documents. ", ("Dim", "dim"), " is masked, ",
        (f"{_COUNTED[0]}underlined{_COUNTED[1]}", _COUNTED_STYLE), " counts in the loss, ", (_MARK, "reverse"),
        " is where the SDM layer reads.",
    ))  # fmt: skip
    for i, verified in ((whole[0], True), (whole[0], False), (longest, positive[longest])):
        pair = encoded[i]
        assert pair is not None
        document = pair[0 if verified else 1]
        kind = "positive" if verified else "negative"
        out.rule(Text(f"training row {i}, {kind}, {len(document.input_ids)} tokens"), align="left", characters="-")
        out.print(example_text(plan.encoder, document), soft_wrap=True)


_COUNTED, _COUNTED_STYLE, _MARK = ("[[", "]]"), "bold underline green", "<-h"


def example_text(encoder: Encoder, document: Encoded) -> Text:
    """A document with its mask: brackets and underlining, so that neither colour nor a terminal is needed."""
    from rich.text import Text

    from sdmlm.language_model.encoding import IGNORED

    ids, at = document.input_ids, document.verified_at + 1
    masked = next(i for i, label in enumerate(document.labels) if label != IGNORED)
    first, second, third = (_legible(encoder.decode(ids[a:b])) for a, b in ((0, masked), (masked, at), (at, len(ids))))
    if len(first) > 600:
        first = f"{first[:300]} [... {len(first) - 600} characters ...] {first[-300:]}"
    return Text.assemble(
        (first, "dim"), _COUNTED[0], (second, _COUNTED_STYLE), (_MARK, "reverse"), (third, _COUNTED_STYLE), _COUNTED[1]
    )


def _legible(text: str) -> str:
    """Without characters that a terminal would act on."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def _show_facts(out: Any, facts: dict[str, Any]) -> None:
    lengths, memory, steps = facts["lengths"], facts["memory"], facts["steps"]
    table = common.rich_table("Rows", ("rows", "source", "used", "positive", "negative"), left=["rows", "source"])
    for name, documents in facts["documents"].items():
        row = facts["data"][name]
        table.add_row(name, row["source"], str(row["used"]), str(documents["positive"]), str(documents["negative"]))
    out.print(table)
    limit = "no limit" if lengths["limit"] is None else f"limit {lengths['limit']}"
    out.print(f"Lengths: longest {lengths['longest']} tokens, median {lengths['median']}, {limit}; "
              f"{lengths['over']} rows over it, {lengths['refused']} of them refused.")  # fmt: skip
    parts = ", ".join(f"{name} {_size(memory[name])}" for name in ("weights", "gradients", "optimizer"))
    out.print(f"Memory: {memory['parameters']:,} parameters, {memory['trainable']:,} trained; {parts}, largest chunk of "
              f"logits {_size(memory['logits'])}: {_size(memory['total'])} and the activations, without sharding.")  # fmt: skip
    out.print(f"Steps: {steps['per_epoch']} an epoch with batches of {steps['batch']}, {steps['total']} in all; about "
              f"{steps['generations_per_epoch']} generations an epoch from the second on.")  # fmt: skip


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
