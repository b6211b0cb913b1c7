"""`sdmlm score`: the decisions of a saved estimator, row by row."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import math
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common

if TYPE_CHECKING:
    from sdmlm.estimator.embedding_files import Embeddings
    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.estimator.region import HighReliabilityRegion
    from sdmlm.estimator.scores import Scores

EXAMPLES = """\
  sdmlm score runs/estimator test.npz
  sdmlm score runs/estimator test.npz --alpha 0.9 --output decisions.csv --report score.html
  sdmlm score runs/estimator new.jsonl --json | jq '.rows[] | select(.accepted)'"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "accept or reject embeddings with a saved estimator"
    parser = common.add_command(subparsers, "score", help, EXAMPLES)
    parser.add_argument("estimator", metavar="DIR", help="folder of a saved estimator")
    parser.add_argument("embeddings", metavar="EMBEDDINGS", help=common.EMBEDDINGS_HELP + "; labels are optional")
    parser.add_argument("--alpha", type=float, metavar="A", help="another alpha than the one it was saved with")
    parser.add_argument("--certificate", metavar="FILE.json", help="accept by the certificate that sdmlm certify saved")
    parser.add_argument("--output", metavar="FILE", help="write one line per row: .jsonl or .csv")
    parser.add_argument("--report", metavar="FILE.html", help="write an HTML report on these rows")
    parser.add_argument("--json", action="store_true", help="print summary and rows as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Score, write, summarise."""
    from sdmlm.estimator.embedding_files import read_embeddings
    from sdmlm.storage.artifacts import write_text_atomically

    common.check_output_file(args.output, ".jsonl", ".csv")
    common.check_output_file(args.report, ".html")
    estimator, names = common.load_estimator(args.estimator)
    if args.alpha is not None:
        estimator.recalibrate(args.alpha)
    data = read_embeddings(args.embeddings, names)
    if data.y is not None:
        common.labels_of(data, args.embeddings)
    scores = common.score_rows(estimator, data.X)
    if (known := estimator.share_fitted(data.X[:1000])) > 0.25:
        common.warn(
            f"{known:.0%} of the first points were used for fitting, so their accuracy says little about new points."
        )
    region = estimator.region_
    if args.certificate is not None:
        scores, region = _certified(scores, estimator, args.certificate)
    rows = decision_rows(estimator, data, scores, names)
    if args.output:
        write = _csv if args.output.endswith(".csv") else _jsonl
        write_text_atomically(args.output, write(rows))
    if args.report:
        from sdmlm.report import write_report

        title = f"SDM decisions on {args.embeddings}"
        write_report(args.report, estimator, data, scores, title=title, class_names=names, region=region)
    result = {**region.to_dict(names), "summary": summary(estimator, data, scores, names)}
    if args.json:
        common.print_json({**result, "output": args.output, "report": args.report, "rows": rows})
    else:
        _show(args, estimator, data, scores, names, result)


def _certified(scores: Scores, estimator: SDMEstimator, path: str) -> tuple[Scores, HighReliabilityRegion]:
    """The scores with the decisions of the certificate in the file, and the region that is shown with them."""
    from sdmlm.estimator.acceptance import CertifiedRule
    from sdmlm.estimator.certify import Certificate
    from sdmlm.estimator.region import HighReliabilityRegion

    rule = CertifiedRule.load(path) if estimator.rule == "certified" else Certificate.load(path)
    if rule.estimator != estimator.digest():
        raise ValueError(f"{path} was made for another estimator, or before this one changed: certify again.")
    if rule.alpha != estimator.alpha_:
        raise ValueError(f"{path} is for alpha {rule.alpha:g}: give --alpha {rule.alpha:g} with it.")
    inside = rule.accepts(scores)
    region = estimator.region_ if isinstance(rule, CertifiedRule) else rule.region
    if (isinstance(rule, CertifiedRule) and not rule.certified) or region is None:
        common.warn(f"{path} certifies nothing, so nothing is accepted.")
        region = region or HighReliabilityRegion(rule.alpha, math.inf, (math.inf,) * scores.p.shape[1])
    return dataclasses.replace(scores, accepted=inside, accepted_lower=scores.accepted_lower & inside), region


def decision_rows(estimator: SDMEstimator, data: Embeddings, scores: Scores, names: list[str]) -> list[dict[str, Any]]:
    """One flat dictionary per row, with names for classes and ids for documents; outputs by class come last."""
    from sdmlm.estimator.explain import decisions

    ids = estimator.support_ids_
    decided = decisions(scores.q, scores.accepted).tolist()
    rows = []
    for i, row in enumerate(scores.rows()):
        c, nearest = row["prediction"], row["nearest"]
        entry: dict[str, Any] = {"id": data.ids[i]}
        if data.y is not None:
            entry["label"] = names[data.y[i]]
        entry |= {"prediction": names[c], "decision": decided[i]}
        entry |= {name: row[name] for name in ("accepted", "accepted_lower", "out_of_distribution", "highest_alpha")}
        entry |= {"probability": row["p"][c], "probability_lower": row["p_lower"][c]}
        entry["probability_upper"] = row["p_upper"][c]
        entry |= {name: row[name] for name in ("q", "d", "d_lower", "d_upper", "d_nearest")}
        entry |= {name: row[name] for name in ("q_prime", "q_prime_lower", "q_prime_upper")}
        entry["nearest"] = ids[nearest] if nearest >= 0 else None
        entry |= {"p": dict(zip(names, row["p"], strict=True)), "z": dict(zip(names, row["z"], strict=True))}
        rows.append(entry)
    return rows


def _jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(common.to_json(row) + "\n" for row in rows)


def _csv(rows: list[dict[str, Any]]) -> str:
    """The rows without the outputs by class; empty where there is no value."""
    out = io.StringIO()
    columns = [name for name in rows[0] if name not in ("p", "z")]
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def summary(estimator: SDMEstimator, data: Embeddings, scores: Scores, names: list[str]) -> dict[str, Any]:
    """Counts, and accuracies among the accepted if there are labels."""
    accepted, strange = int(scores.accepted.sum()), int(scores.out_of_distribution.sum())
    counts: dict[str, Any] = {
        "points": len(scores),
        "accepted": accepted,
        "accepted_lower": int(scores.accepted_lower.sum()),
        "rejected": len(scores) - accepted - strange,
        "out_of_distribution": strange,
    }
    if data.y is not None:
        table = metrics_table(estimator, data, scores, names, "scored").json()
        counts["accuracy"] = float((scores.prediction == data.y).mean())
        counts["metrics"] = table["rows"]
    return counts


def metrics_table(estimator: SDMEstimator, data: Embeddings, scores: Scores, names: list[str], dataset: str) -> Any:
    """The papers' table for these points: no rejection, the HR region, and the HR region by the lower estimate."""
    import numpy as np

    from sdmlm.evaluation.metrics import selective_metrics
    from sdmlm.evaluation.selective_table import SelectiveRow, SelectiveTable

    kinds = {"no-reject": np.ones(len(scores), bool), "SDM HR": scores.in_region, "SDM HR lower": scores.accepted_lower}
    if estimator.rule == "certified":
        kinds["SDM certified"] = scores.accepted
    rows = [
        SelectiveRow(
            dataset, "SDM", name, selective_metrics(data.labels(dataset), scores.prediction, inside, len(names))
        )
        for name, inside in kinds.items()
    ]
    return SelectiveTable(rows, estimator.alpha_, names)


def _show(
    args: argparse.Namespace,
    estimator: SDMEstimator,
    data: Embeddings,
    scores: Scores,
    names: list[str],
    result: dict[str, Any],
) -> None:
    from pathlib import Path

    out, counts = common.console(args), result["summary"]
    title = f"{len(scores)} rows at alpha {result['alpha']:g}"
    table = common.rich_table(title, ("decision", "rows", "share"), left=["decision"])
    for name in ("accepted", "rejected", "out_of_distribution"):
        table.add_row(name.replace("_", " "), str(counts[name]), common.percent(counts[name], len(scores)))
    out.print(table)
    lower = int((scores.accepted & scores.accepted_lower).sum())
    out.print(f"{lower} of the accepted rows lie in the region by the lower estimate, too (HR lower).")
    if data.y is not None:
        out.print(metrics_table(estimator, data, scores, names, Path(args.embeddings).stem).rich())
    written = [name for name in (args.output, args.report) if name]
    if written:
        out.print(f"Written: {', '.join(written)}.", markup=False)
