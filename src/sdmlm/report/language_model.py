"""The HTML report about one SDM language model: its results on test sets, its SDM layer, its training and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

from sdmlm.evaluation.lm_evaluation import Evaluation
from sdmlm.experiments.runs import Run
from sdmlm.report import estimator as estimator_report
from sdmlm.report import page, plots
from sdmlm.report.replication import paper_table, training_curves

if TYPE_CHECKING:
    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.generation.search_calibration import SearchCalibration
    from sdmlm.generation.search_certificate import SearchCertificate
    from sdmlm.language_model.answer_rule import AnswerCertificate


def write_report(
    path: str | Path,
    name: str,
    estimator: SDMEstimator,
    metadata: Mapping[str, Any],
    record: Mapping[str, Any] | None,
    evaluations: Mapping[str, Evaluation],
    searches: Sequence[SearchCalibration],
    feedback: int,
    certificate: AnswerCertificate | None = None,
    certified_searches: Sequence[SearchCertificate] = (),
) -> None:
    """Write the report. `metadata` is sdm/lm.json, `record` is training.json if there is one; evaluations by test set.

    `certificate` is the one that applies, if any: the report begins with it.
    """
    tags = metadata["tags"]
    run = Run(
        "",
        name,
        name,
        int((metadata["training"] or {}).get("seed", 0)),
        dict(evaluations),
        list(record["log_history"]) if record else [],
    )
    with matplotlib.rc_context(plots.STYLE):
        more = [
            ("Over training", _training(run)),
            ("Search", _certified(certified_searches) + _searches(searches)),
            ("How it was made", _made(metadata, record, feedback)),
        ]
        first = [("Verified answers, and what is promised", _promise(certificate))] if certificate is not None else []
        first += [("On test sets: the LM's own answers", _tests(run))] if evaluations else []
    title = f"SDM language model: {name}"
    sections = [section for section in more if section is not None and section[1]]
    names = [tags["no"], tags["yes"]]
    estimator_report.write_report(path, estimator, title=title, class_names=names, more=sections, first=first)


def _promise(certificate: AnswerCertificate) -> str:
    """What became of the held-out answers under the certificate: a picture, and the promise in words."""
    n, verified, right = certificate.prompts, certificate.accepted, certificate.accepted_right
    parts = [
        ("verified, right", plots.BLUE, None, [right / n]),
        ("verified, wrong", plots.ORANGE, "//", [(verified - right) / n]),
        ("not verified: a person should look", "none", None, [1 - verified / n]),
    ]
    drawn = plots.shares(
        ["held-out answers"], parts, f"{n} answers of the LM to prompts that were held out", inches=6.2
    )
    caption = f"{verified} of {n} answers are verified, {right} of these are right. Not verified does not mean wrong."
    picture = page.figure("verified", drawn, "Verified answers to held-out prompts", caption)
    return f"{picture}<p class='lead'>{page.text(certificate.sentence())}</p>"


def _tests(run: Run) -> str:
    from sdmlm.experiments.tables import tables

    paper_tables = tables([run])
    full = page.comparison("By class and by prediction", paper_tables.full())
    return paper_table(paper_tables, "selective", {}) + paper_table(paper_tables, "generation", {}) + full


def _training(run: Run) -> str:
    curves = training_curves([run])
    if curves is None:
        return ""
    caption = (
        "By evaluation over the calibration rows. Accepted share, SDM loss and q'min are those of the SDM layer that the "
        "evaluation fits (fine-tuning with cross-entropy has none); a gap in q'min is where it is infinite."
    )
    return page.figure("train", curves, "Training curves", caption)


def _certified(searches: Sequence[SearchCertificate]) -> str:
    """What is promised about searches, in words."""
    return "".join(f"<p>{page.text(search.sentence())}</p>" for search in searches)


def _searches(searches: Sequence[SearchCalibration]) -> str:
    if not searches:
        return ""
    rows = []
    for c in searches:
        accepted = int(c.accepted.sum())
        rows.append(
            [
                f"{c.policy.kind}, budget {c.policy.budget}, temperature {c.policy.temperature:g}",
                f"{c.alpha:g}",
                page.number(c.region().q_min),
                page.share(accepted, len(c)),
                page.share(c.accepted_right, accepted) if accepted else "-",
                f"{sum(c.tries) / len(c):.2f}",
            ]
        )
    heads = ["policy", "alpha", "q'min", "accepted", "right among the accepted", "tries per prompt"]
    return page.table("Searches that were calibrated as a whole, over calibration prompts", heads, rows)


def _made(metadata: Mapping[str, Any], record: Mapping[str, Any] | None, feedback: int) -> str:
    rows = [[key, json.dumps(value, ensure_ascii=False)] for key, value in (metadata["training"] or {}).items()]
    rows += [[key, json.dumps(metadata[key], ensure_ascii=False)] for key in ("tags", "max_length", "max_new_tokens")]
    rows += [["documents added by feedback", str(feedback)], ["written by sdmlm", str(metadata["sdmlm_version"])]]
    out = page.table("The SDM layer's settings", ["setting", "value"], rows)
    if record:
        parts = dict(record["data"])
        if again := metadata.get("calibrated"):  # by `sdmlm calibrate`, after the run
            parts["calibration"] = {**again, "used": again["rows"]}
        data = [[part, str(p["source"]), str(p["used"]), p["sha256"][:12]] for part, p in parts.items()]
        out += page.table("Rows", ["part", "source", "rows", "SHA-256"], data)
        settings = [[key, json.dumps(value, ensure_ascii=False)] for key, value in record["settings"].items()]
        out += page.table("Settings of the run", ["setting", "value"], settings)
    return out
