"""`sdmlm fit`: fit an estimator on an embedding file, and save it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.storage.output_paths import check_artifact_folder

if TYPE_CHECKING:
    from sdmlm.estimator.embedding_files import Embeddings
    from sdmlm.estimator.estimator import SDMEstimator

THREADS = """\
threads: on the CPU, few points (points squared x columns below 2 billion) are fitted with one thread, which is then fastest,
  and far faster beside another job. More points use all cores, or as many as OMP_NUM_THREADS says."""
EXAMPLES = """\
  sdmlm fit train.npz --output runs/estimator
  sdmlm fit train.parquet --output runs/estimator --report runs/fit.html
  sdmlm fit train.jsonl --output runs/small --exemplar-dim 128 --learning-rate 1e-3 --epochs 50 --rounds 3 --json"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "fit an estimator on labelled embeddings and save it"
    parser = common.add_command(subparsers, "fit", help, EXAMPLES)
    parser.add_argument("embeddings", metavar="EMBEDDINGS", help=common.EMBEDDINGS_HELP)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to save into")
    parser.add_argument("--calibration", metavar="FILE", help="fixed calibration split, for --combine best or all")
    parser.add_argument("--force", action="store_true", help="replace an estimator already saved in DIR")
    parser.add_argument("--report", metavar="FILE.html", help="write an HTML report on the calibration points")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    common.add_estimator_options(parser)
    parser.epilog = f"{THREADS}\n\n{parser.epilog}"
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Fit, save, report, summarise."""
    from sdmlm.estimator.embedding_files import read_embeddings
    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.estimator.persistence import KIND

    check_artifact_folder(args.output, KIND, args.force)
    common.check_output_file(args.report, ".html")
    data = read_embeddings(args.embeddings)
    estimator = SDMEstimator(alpha=args.alpha, **common.estimator_parameters(args))
    y = common.labels_to_fit(data, args.embeddings)
    documents, calibration = data.documents(), None
    if args.calibration is not None:
        held = read_embeddings(args.calibration, data.class_names)
        calibration = _calibration(held, args.calibration, data)
        documents.update(zip(calibration[2], held.texts or [], strict=False))
    estimator.fit(data.X, y, data.ids, calibration, documents, data.class_names)
    estimator.save_pretrained(args.output)
    if args.report:
        from sdmlm.report import write_report

        title = f"SDM estimator fitted on {args.embeddings}"
        write_report(args.report, estimator, title=title, class_names=data.class_names)
    result = summary(estimator, data.class_names)
    if args.json:
        common.print_json({"output": args.output, "report": args.report, **result})
    else:
        _show(args, result)


def _calibration(held: Embeddings, path: str, data: Embeddings) -> tuple[Any, Any, list[int | str]]:
    """(X, y, ids) of the calibration split; the ids get a prefix if both files use the same ones."""
    ids: list[int | str] = list(held.ids)
    if set(ids) & set(data.ids):
        ids = [f"calibration:{i}" for i in ids]
    return held.X, common.labels_of(held, path), ids


def summary(estimator: SDMEstimator, names: list[str]) -> dict[str, Any]:
    """The results of the fit, over the calibration points."""
    from sdmlm.estimator.calibration_summary import highest_alpha_with_region, summarize_calibration

    certificate = estimator.certificate_ if estimator.rule == "certified" else None
    return {
        **summarize_calibration(estimator).to_dict(names),
        "highest_alpha": highest_alpha_with_region(estimator),
        "rounds": estimator.rounds if estimator.combine == "best" else len(estimator.layers_),
        "support": len(estimator.support_ids_),
        "settings": estimator.settings(),
        "certificate": None if certificate is None else {**certificate.to_dict(), "says": certificate.sentence(names)},
    }


def _show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    from rich.text import Text

    out, ca = common.console(args), result["calibration"]
    if result["certificate"] is not None:
        out.print(result["certificate"]["says"], markup=False)
    columns = ("class", "points", "loss", "accuracy", "psi", "in region", "right there")
    caption = (
        "One line per true class. loss: SDM loss. accuracy: predictions that are right. psi: least output for the class in the "
        "high-reliability region. in region: share in that region. right there: right predictions among these."
    )
    table = common.rich_table("Calibration points", columns, ["class"], caption)
    for name, row in ca["classes"].items():
        accuracy = "-" if row["accuracy_accepted"] is None else f"{row['accuracy_accepted']:.1%}"
        accepted = common.percent(row["accepted"], row["points"])
        numbers = f"{row['loss']:.4f}", f"{row['accuracy']:.1%}", common.number(row["psi"])
        table.add_row(Text(name), str(row["points"]), *numbers, accepted, accuracy)
    out.print(table)
    share = common.percent(ca["accepted"], ca["points"])
    out.print(f"alpha {result['alpha']:g}: q'min {common.number(result['q_min'])}, balanced loss {result['loss']:.4f}")
    out.print(f"{ca['accepted']} of {ca['points']} calibration points ({share}) lie in the high-reliability region.")
    out.print(
        "Settings: " + ", ".join(f"{name} {value}" for name, value in result["settings"].items()) + ".", markup=False
    )
    if result["certificate"] is None and not ca["accepted"]:
        common.warn(f"{common.nothing_accepted(result)}, a higher learning rate or more data.")
    out.print(f"Saved to {args.output}." + (f" Report: {args.report}." if args.report else ""), markup=False)
