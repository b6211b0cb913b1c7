"""`sdmlm train --dry-run`: encode and check everything, show three documents with their mask, train nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.finetuning.processes import is_main_process

if TYPE_CHECKING:
    from rich.text import Text

    from sdmlm.finetuning.dry_run import DryRun
    from sdmlm.finetuning.run import TrainingRun
    from sdmlm.language_model.encoding import Encoded, Encoder


def show(args: argparse.Namespace, run: TrainingRun) -> None:
    """Print lengths, classes, memory, steps, and three documents with their mask; fails where training would."""
    from sdmlm.finetuning.dry_run import check_trainable, dry_run
    from sdmlm.finetuning.run import warn_about

    checked, out = dry_run(run), common.console(args)
    if is_main_process():
        warn_about(run)
        _show_examples(out, run.encoder, checked)
        _show_summary(out, checked.summary)
        if args.json:
            common.print_json(checked.summary)
    check_trainable(run, checked)
    if is_main_process():
        out.print("Dry run: nothing was trained or written.")


def _show_examples(out: Any, encoder: Encoder, checked: DryRun) -> None:
    from rich.text import Text

    encoded, positive = checked.pairs, checked.positive
    whole = [i for i, pair in enumerate(encoded) if pair]
    if not whole:
        return
    longest = max((len(pair[0].input_ids), i) for i, pair in enumerate(encoded) if pair)[1]
    out.print(Text.assemble(
        "Three documents. ", ("Dim", "dim"), " text is masked, ",
        (f"{_COUNTED[0]}underlined{_COUNTED[1]}", _COUNTED_STYLE), " text counts in the loss, ", (_MARK, "reverse"),
        " is where the SDM layer reads.",
    ))  # fmt: skip
    for i, verified in ((whole[0], True), (whole[0], False), (longest, positive[longest])):
        pair = encoded[i]
        assert pair is not None
        document = pair[0 if verified else 1]
        kind = "positive" if verified else "negative"
        out.rule(Text(f"training row {i}, {kind}, {len(document.input_ids)} tokens"), align="left", characters="-")
        out.print(example_text(encoder, document), soft_wrap=True)


_COUNTED, _COUNTED_STYLE, _MARK = ("[[", "]]"), "bold underline green", "<-h"


def example_text(encoder: Encoder, document: Encoded) -> Text:
    """A document with its mask, shown by brackets as well as by style, for output without colour."""
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
    """The text with control characters as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def _show_summary(out: Any, summary: dict[str, Any]) -> None:
    lengths, memory, steps = summary["lengths"], summary["memory"], summary["steps"]
    columns, left = ("rows", "source", "used", "positive", "negative"), ("rows", "source")
    caption = "positive, negative: documents with the right and with the wrong answer, as drawn for the first epoch."
    table = common.rich_table("Rows", columns, left, caption)
    for name, documents in summary["documents"].items():
        row = summary["data"][name]
        table.add_row(name, row["source"], str(row["used"]), str(documents["positive"]), str(documents["negative"]))
    out.print(table)
    limit = "no limit" if lengths["limit"] is None else f"limit {lengths['limit']}"
    out.print(f"Lengths: longest {lengths['longest']} tokens, median {lengths['median']}, {limit}; "
              f"{lengths['over']} rows over it, {lengths['refused']} of them refused.")  # fmt: skip
    parts = ", ".join(f"{name} {_size(memory[name])}" for name in ("weights", "gradients", "optimizer"))
    out.print(f"Memory: {memory['parameters']:,} parameters, {memory['trainable']:,} trained; {parts}, largest chunk of "
              f"logits {_size(memory['logits'])}: {_size(memory['total'])} and the activations, without sharding.")  # fmt: skip
    out.print(f"Steps: {steps['per_epoch']} per epoch with batches of {steps['batch']}, {steps['total']} in total; about "
              f"{steps['generations_per_epoch']} generations per epoch from the second on.")  # fmt: skip
    _show_certificate(out, summary["certificate"])


def _show_certificate(out: Any, certificate: dict[str, int] | None) -> None:
    if certificate is None:
        return
    held_out, least = certificate["held_out"], certificate["least"]
    if not least:
        common.warn("Nothing can be certified at alpha 1: choose a lower --alpha.")
        return
    out.print(
        f"Certificate: {held_out} calibration rows are held out for it; at least about {least} are needed, and more are better."
    )
    if held_out < least:
        common.warn(
            f"With so few calibration rows hardly anything can be certified at this alpha: give at least {2 * least}, or choose "
            "a lower --alpha."
        )


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
