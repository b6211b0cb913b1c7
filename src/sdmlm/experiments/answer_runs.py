"""The comparison of scores for each run of `sdmlm replicate`: stored next to its evaluations, and one table over all seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from sdmlm.evaluation.score_table import ScoredPoints
from sdmlm.evaluation.tables import csv_text
from sdmlm.storage.artifacts import write_text_atomically

if TYPE_CHECKING:
    from sdmlm.experiments.answer_comparison import AnswerComparison
    from sdmlm.experiments.runs import Run

FILE = "answers.json"  # in the folder of a run
TEST = "test"  # the set of answers that scores are compared on
MEASURES = {
    "auroc": "AUROC",
    "aurc": "AURC",
    "prr": "PRR",
    "coverage_at_0.95": "cov. at 0.95",
    "coverage": "accepted",
    "accuracy_accepted": "of these right",
}
CAPTION = (
    "Which score tells the language model's right answers from its wrong ones? Means over the seeds, with the standard deviation in "
    "brackets. Every score gets the same certificate from the same held-out answers; accepted is the share that it accepts, and the "
    "last column the share of right answers among those. A certificate promises nothing about inputs of another kind. AUROC, PRR: higher is "
    "better. AURC: lower is better."
)


@dataclass(frozen=True)
class StoredComparison:
    """The scores, decisions and labels of one run's answers, by set and score."""

    points: tuple[ScoredPoints, ...]
    alpha: float
    samples: int  # further answers per prompt that self-consistency needed


def write_comparison(folder: Path, comparison: AnswerComparison, layer_sha256: str) -> None:
    """Store the comparison of a run; `layer_sha256` identifies the SDM layer that it was made with."""
    points = [
        {
            "dataset": one.dataset,
            "estimator": one.estimator,
            "scores": one.scores.tolist(),
            "accepted": one.accepted.tolist(),
            "correct": one.correct.tolist(),
        }
        for one in comparison.table.rows
    ]
    head = {"format_version": 1, "sdm_sha256": layer_sha256, "alpha": comparison.table.alpha}
    content = {**head, "samples": comparison.samples, "points": points}
    write_text_atomically(folder / FILE, json.dumps(content, allow_nan=False) + "\n")


def read_comparison(folder: Path, layer_sha256: str | None) -> StoredComparison | None:
    """What `write_comparison` kept; None where there is none, or where another SDM layer made it (None: any)."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if layer_sha256 is not None and content["sdm_sha256"] != layer_sha256:
            return None
        points = tuple(
            ScoredPoints(
                one["dataset"],
                "",
                one["estimator"],
                np.array(one["scores"], dtype=np.float64),
                np.array(one["accepted"], dtype=bool),
                np.array(one["correct"], dtype=bool),
            )
            for one in content["points"]
        )
        return StoredComparison(points, float(content["alpha"]), int(content["samples"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: remove it, and the comparison will be made again.") from error


def comparison_rows(runs: Sequence[Run]) -> list[list[str]]:
    """One line per model, set and score: each measure as its mean over the seeds, with the standard deviation."""
    values: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for run, one in _points(runs):
        measured = values.setdefault(
            (f"{run.family}: {run.label}", one.dataset, one.estimator), {m: [] for m in MEASURES}
        )
        for measure in MEASURES:
            if (value := one.measures[measure]) is not None:
                measured[measure].append(value)
    return [[*key, *(_mean(measured[measure]) for measure in MEASURES)] for key, measured in values.items()]


def comparison_csv(runs: Sequence[Run]) -> str:
    """Every number by seed."""
    names = list(MEASURES)
    lines = [
        [run.family, run.label, run.seed, one.dataset, one.estimator, *(one.measures[name] for name in names)]
        for run, one in _points(runs)
    ]
    return csv_text(["family", "model", "seed", "dataset", "score", *names], lines)


def _points(runs: Sequence[Run]) -> list[tuple[Run, ScoredPoints]]:
    return [(run, one) for run in runs if run.answers is not None for one in run.answers.points]


def _mean(values: Sequence[Any]) -> str:
    if not values:
        return "-"
    return f"{fmean(values):.3f}" + (f" ({stdev(values):.3f})" if len(values) > 1 else "")
