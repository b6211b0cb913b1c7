"""`sdmlm compare`: the SDM estimator and all baselines on the same points."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common

if TYPE_CHECKING:
    from sdmlm.estimator.embedding_files import Embeddings

EXAMPLES = """\
  sdmlm compare all.npz --output runs/compare
  sdmlm compare train.npz --test test.npz shifted.npz --name smollm2-135m --output runs/compare
  sdmlm compare train.npz --test test.npz --output runs/compare --alpha 0.9 --learning-rate 1e-3 --json"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "compare the SDM estimator with other methods on the same points"
    parser = common.add_command(subparsers, "compare", help, EXAMPLES)
    parser.add_argument("embeddings", metavar="EMBEDDINGS", help=common.EMBEDDINGS_HELP + "; to fit on")
    parser.add_argument(
        "--test", action="extend", nargs="+", default=[], metavar="FILE", help="test files (default: hold out a fifth)"
    )
    parser.add_argument("--name", default="", help="name of the model that made the embeddings, for the table")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder for tables.csv/json/tex/md and report.html"
    )
    parser.add_argument("--bootstrap", type=int, default=1000, metavar="N", help="resamples for intervals (1000)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    common.add_estimator_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Compare, write, show."""
    from sdmlm.estimator.embedding_files import read_embeddings
    from sdmlm.evaluation.comparison import compare, write_comparison
    from sdmlm.report import write_report

    report = Path(args.output) / "report.html"
    common.check_output_file(str(report))
    data = read_embeddings(args.embeddings)
    common.labels_to_fit(data, args.embeddings)
    if args.test:
        tests = {}
        for path in args.test:
            name = Path(path).stem if [Path(p).stem for p in args.test].count(Path(path).stem) == 1 else path
            tests[name] = read_embeddings(path, data.class_names)
            common.labels_of(tests[name], path)
    else:
        data, tests = _hold_out(data, args.embeddings, args.seed)
    parameters = common.estimator_parameters(args)
    files_of_data = [data, *tests.values()]
    if any(f.logits is not None for f in files_of_data) and any(f.logits is None for f in files_of_data):
        common.warn("some files have the LM's logits and some do not, so its own rows are left out.")
    compared = compare(data, tests, args.alpha, args.name, args.bootstrap, parameters.pop("seed"), True, **parameters)
    written = [*write_comparison(args.output, compared), report]
    first = next(iter(tests))
    write_report(
        report,
        compared.estimator,
        tests[first],
        tables=[("All estimators on the same points", compared.table)],
        compared=compared.scores,
        title=f"SDM and its rivals on {first}, fitted on {args.embeddings}",
        class_names=data.class_names,
    )
    if args.json:
        common.print_json({"output": args.output, **compared.table.json(), "scores": compared.scores.json()})
    else:
        out = common.console(args)
        out.print(compared.table.rich())
        out.print(compared.scores.rich())
        out.print(f"Written to {args.output}: {', '.join(path.name for path in written)}.", markup=False)


def take(data: Embeddings, rows: Iterable[int]) -> Embeddings:
    """Some rows of a file."""
    some = list(rows)
    return dataclasses.replace(
        data,
        X=data.X[some],
        y=None if data.y is None else data.y[some],
        ids=[data.ids[i] for i in some],
        texts=None if data.texts is None else [data.texts[i] for i in some],
        logits=None if data.logits is None else data.logits[some],
    )


def _hold_out(data: Embeddings, path: str, seed: int) -> tuple[Embeddings, dict[str, Embeddings]]:
    """A random fifth of each class for the test, the rest to fit on."""
    import numpy as np

    y, rng = data.labels(path), np.random.default_rng(seed)
    members = [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    test = np.sort(np.concatenate([rows[: len(rows) // 5] for rows in members]))
    if not len(test):
        raise ValueError(f"{path} has fewer than 5 points of each class, too few to hold some out: give --test.")
    rest = np.setdiff1d(np.arange(len(data)), test)
    return take(data, rest), {f"{Path(path).stem} (a fifth held out)": take(data, test)}
