"""`sdmlm explain`: why rows were accepted or rejected, with the most similar known documents."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.storage.text_files import visible

if TYPE_CHECKING:
    from rich.console import Console

    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.estimator.explain import Exemplar, Explanation

EXAMPLES = """\
  sdmlm explain runs/estimator test.npz
  sdmlm explain runs/estimator test.npz --rows 0,3,7-9 -k 3
  sdmlm explain runs/estimator test.npz --rows 12 --json | jq '.[0].exemplars'
  sdmlm explain runs/estimator --label-errors"""
_DEFAULT_ROWS = 5
_DEFAULT_LABEL_ERRORS = 20
_TEXT_WIDTH = 60


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "explain decisions: a sentence, the nearest training documents, similar calibration points"
    parser = common.add_command(subparsers, "explain", help, EXAMPLES)
    parser.add_argument("estimator", metavar="DIR", help="folder of a saved estimator")
    embeddings = common.EMBEDDINGS_HELP + "; labels are optional"
    parser.add_argument("embeddings", metavar="EMBEDDINGS", nargs="?", help=embeddings)
    parser.add_argument(
        "--label-errors",
        action="store_true",
        help="list fitted points whose label may be wrong, instead of explaining EMBEDDINGS",
    )
    parser.add_argument("--rows", metavar="ROWS", help=f"rows from 0, e.g. 0,3,7-9 (the first {_DEFAULT_ROWS})")
    parser.add_argument(
        "-k", type=int, metavar="K", help="how many documents to show per row (5), or how many label errors (20)"
    )
    parser.add_argument("--json", action="store_true", help="print the explanations as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Explain the rows asked for, or list suspected label errors."""
    from sdmlm.estimator.embedding_files import read_embeddings

    if args.k is not None and args.k < 1:
        raise ValueError(f"-k is {args.k} but must be at least 1.")
    if args.label_errors and (args.embeddings is not None or args.rows is not None):
        raise ValueError("--label-errors is about the fitted points: leave out EMBEDDINGS and --rows.")
    if not args.label_errors and args.embeddings is None:
        raise ValueError("EMBEDDINGS is missing: name a file with rows to explain, or give --label-errors.")
    estimator, names = common.load_estimator(args.estimator)
    if args.label_errors:
        _label_errors(args, estimator, names)
        return
    data = read_embeddings(args.embeddings, names)
    rows = parse_rows(args.rows, len(data))
    explanations = estimator.explain(data.X[rows], args.k or 5)
    if args.json:
        entries = []
        for i, e in zip(rows, explanations, strict=True):
            entries.append({"row": i, "id": data.ids[i], **dataclasses.asdict(e)})
            _name_classes(entries[-1], names)
        common.print_json(entries)
        return
    out = common.console(args)
    for i, e in zip(rows, explanations, strict=True):
        text = data.texts[i] if data.texts else None
        show(out, f"Row {i} (id {data.ids[i]})", text, e, names)


def _label_errors(args: argparse.Namespace, estimator: SDMEstimator, names: Sequence[str]) -> None:
    errors = estimator.label_errors(args.k or _DEFAULT_LABEL_ERRORS)
    if args.json:
        rows = []
        for error in errors:
            values = dataclasses.asdict(error)
            named = {"id": values.pop("id"), "label": names[values.pop("label")]}
            rows.append({**named, "suggested": names[values.pop("prediction")], **values})
        common.print_json(rows)
        return
    from rich.text import Text

    out = common.console(args)
    if not errors:
        out.print("No label is suspected to be wrong.")
        return
    texts = any(error.text for error in errors)
    columns = ("id", "label", "suggested", "confidence", "q", "d", *(["text"] if texts else []))
    caption = (
        "Points that layers which were not fitted on them predict confidently as another class (suggested). q: similar points "
        "in a row that support it. d: nearness to known points, 1 is nearest."
    )
    table = common.rich_table("Suspected label errors", columns, ("id", "label", "suggested", "text"), caption)
    for error in errors:
        cells = [visible(str(error.id)), names[error.label], names[error.prediction], f"{error.confidence:.2f}"]
        cells += [f"{error.q:.4g}", f"{error.d:.2f}", *([_one_line(error.text or "")] if texts else [])]
        table.add_row(*map(Text, cells))
    out.print(table)


def parse_rows(text: str | None, n: int) -> list[int]:
    """ "0,3,7-9" as indices, each within the file."""
    if text is None:
        return list(range(min(n, _DEFAULT_ROWS)))
    rows: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--rows has {part.strip()!r}: give rows and ranges such as 0,3,7-9.")
        start, end = int(first), int(last or first)
        if end < start or end >= n:
            raise ValueError(f"--rows has {part.strip()!r} but the rows of the file are 0..{n - 1}.")
        rows.extend(range(start, end + 1))
    return rows


def _class_name(c: int, names: Sequence[str]) -> str:
    """The name of a class; a label that was added to the support may be none of the classes."""
    return names[c] if 0 <= c < len(names) else f"outside the classes ({c})"


def _name_classes(entry: dict[str, Any], names: Sequence[str]) -> None:
    """Replace class indices by names everywhere in an explanation, given as a dictionary."""
    entry["prediction"] = _class_name(entry["prediction"], names)
    for document in (*entry["exemplars"], *entry["peers"]["nearest"]):
        document["label"] = _class_name(document["label"], names)
        document["prediction"] = _class_name(document["prediction"], names)


def show(out: Console, title: str, text: str | None, e: Explanation, names: Sequence[str]) -> None:
    """Print one explanation."""
    from rich.text import Text

    out.print(Text(f"{title}: {e.decision}", style="bold"))
    if text:
        out.print(Text(_one_line(text), style="italic"))
    out.print(Text(e.reason))
    out.print(_documents("Nearest training documents", e.exemplars, names))
    if e.peers.count:
        title = f"Nearest of {e.peers.count} calibration points with this prediction and decision"
        out.print(_documents(f"{title} ({e.peers.accuracy:.1%} right)", e.peers.nearest, names))
    else:
        out.print("No calibration point has this prediction and decision.")
    out.print()


def _documents(title: str, documents: Sequence[Exemplar], names: Sequence[str]) -> Any:
    from rich.text import Text

    texts = any(x.text for x in documents)
    columns = ("id", "label", "predicted", "distance", *(["text"] if texts else []))
    table = common.rich_table(title, columns, left=("id", "label", "predicted", "text"))
    for x in documents:
        cells = [visible(str(x.id)), _class_name(x.label, names), _class_name(x.prediction, names), f"{x.distance:.4g}"]
        table.add_row(*map(Text, cells + ([_one_line(x.text or "")] if texts else [])))
    return table


def _one_line(text: str) -> str:
    line = visible(" ".join(text.split()))
    return line if len(line) <= _TEXT_WIDTH else line[: _TEXT_WIDTH - 1] + "…"
