"""Shared by several commands: options, reading and checking input, printing results."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm.finetuning.processes import is_main_process
from sdmlm.storage.output_paths import check_output_file as check_output_file
from sdmlm.storage.plain_json import plain_json
from sdmlm.storage.text_files import visible

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.table import Table

    from sdmlm.estimator.embedding_files import Embeddings
    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.estimator.scores import Scores

_SCORE_BLOCK = 20_000  # rows scored between two steps of the progress bar

EMBEDDINGS_HELP = "embedding file: .npz (X, y, ids, texts), .parquet or .jsonl (embedding, label, id, text)"

THREADS = """\
threads: a model of less than 10 million parameters runs on the CPU with one thread, which is fastest for matrices that small,
  and far faster beside another job. OMP_NUM_THREADS=N chooses another number."""


# Options


def add_command(subparsers: Any, name: str, help: str, examples: str) -> argparse.ArgumentParser:
    """A subcommand with its examples below the options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_estimator_options(parser: argparse.ArgumentParser) -> None:
    """Options that are parameters of SDMEstimator; what is left out is chosen automatically."""
    group = parser.add_argument_group("estimator (all settings are automatic; --published takes those of the papers)")
    group.add_argument("--published", action="store_true", help="the settings of the papers, and their HR region")
    group.add_argument(
        "--alpha", type=float, default=0.95, metavar="A", help="accuracy that accepted points are to have (0.95)"
    )
    group.add_argument(
        "--promise",
        choices=("overall", "predicted", "class"),
        help="alpha holds for all accepted points, each predicted class, or each true class too (overall)",
    )
    group.add_argument("--delta", type=float, metavar="P", help="probability that the promise does not hold (0.05)")
    group.add_argument(
        "--epsilon",
        type=float,
        metavar="P",
        help="share of known points that may be rejected, so that shifted points are rejected too (0.05)",
    )
    group.add_argument(
        "--rule", choices=("certified", "region", "region lower"), help="rule by which points are accepted (certified)"
    )
    group.add_argument("--combine", choices=("average", "best", "all"), help="how several layers decide (average)")
    group.add_argument(
        "--distance", choices=("whitened", "exemplar"), help="vectors in which Distance is measured (whitened)"
    )
    group.add_argument("--rounds", type=int, metavar="J", help="partitions to average (4), or rounds to choose from")
    group.add_argument("--learning-rate", type=float, metavar="LR", help="train layers with Adam at this learning rate")
    group.add_argument("--epochs", type=int, metavar="N", help="with Adam: epochs (200)")
    group.add_argument("--exemplar-dim", type=int, metavar="M", help="with Adam: width of the exemplar vectors (1000)")
    group.add_argument("--batch-size", type=int, metavar="N", help="with Adam: points per step (50)")
    group.add_argument("--center", choices=("global", "feature"), help="how columns are standardised (feature)")
    group.add_argument("--max-q", type=int, metavar="N", help="cap on q (none)")
    group.add_argument("--index", choices=("exact", "faiss"), help="search of the support (exact)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same result (0)")
    group.add_argument("--device", metavar="D", help="torch device, e.g. cpu or cuda (a GPU where there is one)")


def estimator_parameters(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_estimator_options` as parameters of SDMEstimator, except alpha."""
    from sdmlm.estimator.estimator import PUBLISHED

    names = (
        "promise", "delta", "epsilon", "rule", "combine", "distance", "rounds", "learning_rate", "epochs", "exemplar_dim",
        "batch_size", "center", "max_q", "index", "seed",
    )  # fmt: skip
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return {**(PUBLISHED if args.published else {}), **given, "device": checked_device(args.device)}


def checked_device(device: str | None) -> str | None:
    """The device, if torch can use it here."""
    if device is not None:
        import torch

        try:
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ValueError(f"The device {device!r} cannot be used here: try --device cpu.") from error
    return device


# In


def labels_of(data: Embeddings, path: str, n_classes: int | None = None) -> NDArray[np.int64]:
    """The labels of a file; refused if some are not among the classes."""
    y = data.labels(path)
    n_classes = len(data.class_names) if n_classes is None else n_classes
    wrong = ((y < 0) | (y >= n_classes)).nonzero()[0]
    if len(wrong):
        names = ", ".join(data.class_names[:10]) + (", ..." if len(data.class_names) > 10 else "")
        raise ValueError(f"{path} has {len(wrong)} labels outside the classes ({names}), the first in row {wrong[0]}.")
    return y


def labels_to_fit(data: Embeddings, path: str) -> NDArray[np.int64]:
    """The labels of a file to fit on; refused if they are all of one class."""
    y = labels_of(data, path)
    if len(set(y.tolist())) == 1:
        raise ValueError(f"{path} holds only one class ({data.class_names[int(y[0])]}): at least two are needed.")
    return y


def nothing_accepted(calibration_summary: dict[str, Any]) -> str:
    """The start of a warning that the region is empty, with the first thing to try."""
    highest = calibration_summary["highest_alpha"]
    lower = f"a lower --alpha (up to {highest:g} there is a region)" if highest else "another --exemplar-dim"
    return f"nothing will be accepted at this alpha: try {lower}"


def load_estimator(folder: str) -> tuple[SDMEstimator, list[str]]:
    """A saved estimator and the names of its classes (their numbers if it was saved without names)."""
    from sdmlm.estimator.estimator import SDMEstimator

    estimator = SDMEstimator.from_pretrained(folder)
    return estimator, estimator.class_names_ or [str(c) for c in estimator.classes_]


def score_rows(estimator: SDMEstimator, X: NDArray[np.float32]) -> Scores:
    """estimator.score under a progress bar, some thousands of rows at a time."""
    from sdmlm.estimator.scores import Scores
    from sdmlm.storage.progress import track

    starts = range(0, max(1, len(X)), _SCORE_BLOCK)
    parts = [estimator.score(X[start : start + _SCORE_BLOCK]) for start in track(starts, "Scoring")]
    return Scores.concatenate(parts)


# Out


def console(args: argparse.Namespace) -> Console:
    """The console for text: stdout, or stderr if JSON is printed on stdout."""
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        """Prints control characters as visible escapes; rich's own colours are styles, not characters."""

        def render(self, renderable: Any, options: Any = None) -> Any:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

    return SafeConsole(stderr=bool(getattr(args, "json", False)), highlight=False)


def rich_table(title: str, columns: Sequence[str], left: Sequence[str], caption: str | None = None) -> Table:
    """An empty table; the columns in `left` hold words, the others numbers. `caption` says what the columns mean."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        min_width=60 if caption else None,
    )
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(to_json(value))


def to_json(value: Any) -> str:
    """Standard JSON: null for NaN and infinities, plain numbers for NumPy's."""
    text = json.dumps(plain_json(value), ensure_ascii=False, allow_nan=False)
    # Hidden characters become JSON escapes: the same value, but it cannot control a terminal.
    return "".join(c if visible(c) == c else json.dumps(c)[1:-1] for c in text) if visible(text) != text else text


def percent(part: int, whole: int) -> str:
    """part of whole as a percentage, "-" if whole is 0."""
    return f"{part / whole:.1%}" if whole else "-"


def number(value: float | None) -> str:
    """The number with four digits, or "none"."""
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "none"


def warn(message: str) -> None:
    """Print a message on stderr."""
    print(f"sdmlm: {visible(message)}", file=sys.stderr)


@contextlib.contextmanager
def main_process_errors() -> Iterator[None]:
    """Under `accelerate launch` only the main process reports errors; our own warnings are shown as one sentence."""

    def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
        if category is not UserWarning or not Path(filename).is_relative_to(Path(__file__).parents[1]):
            plain(message, category, filename, *rest)
        elif is_main_process():
            warn(str(message))

    with warnings.catch_warnings():
        plain, warnings.showwarning = warnings.showwarning, show  # type: ignore[assignment]
        try:
            yield
        except (ValueError, OSError) as error:
            if is_main_process():
                raise
            raise SystemExit(2) from error
