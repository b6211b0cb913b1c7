"""One line per estimator: accuracy, what it accepts, and how well its score ranks right above wrong predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from sdmlm.evaluation.metrics import calibration_measures, score_measures
from sdmlm.evaluation.tables import CellText, RenderedTable, TextRow, TextTable, csv_text

_HEADS = {  # columns of a printed table: name -> (head, head in LaTeX)
    "accuracy": ("acc.", r"\textsc{Acc.}"),
    "coverage": ("cov.", r"\textsc{Cov.}"),
    "accuracy_accepted": ("acc. accepted", r"\textsc{Acc.} accepted"),
    "auroc": ("AUROC", "AUROC"),
    "aurc": ("AURC", "AURC"),
    "prr": ("PRR", "PRR"),
}
MAIN = ("accuracy", "coverage", "accuracy_accepted", "auroc", "aurc")
_SAYS = {
    "accuracy": "acc.: accuracy over all points.",
    "coverage": "cov.: share of points accepted.",
    "accuracy_accepted": "acc. accepted: accuracy among them (-: nothing is accepted).",
    "auroc": "AUROC: chance that a right prediction scores above a wrong one (higher is better; -: all are right or all wrong).",
    "aurc": "AURC: mean error rate over all shares accepted (lower is better).",
    "prr": "PRR: 1 where the score orders as the truth does, 0 where it says nothing.",
}


@dataclass(frozen=True)
class ScoredPoints:
    """What one estimator says of one data set: a score, a decision, and whether the prediction is right, per point.

    `probabilities`: those of the classes (N, C) and the labels (N,), where the estimator gives any.
    """

    dataset: str
    model: str
    estimator: str
    scores: NDArray[np.float64]
    accepted: NDArray[np.bool_]
    correct: NDArray[np.bool_]
    probabilities: tuple[NDArray[np.float64], NDArray[np.int64]] | None = None

    @cached_property
    def measures(self) -> dict[str, float | None]:
        """All measures by name; None where one is undefined."""
        accepted = self.correct[self.accepted]
        values = {
            "accuracy": float(self.correct.mean()),
            "coverage": float(self.accepted.mean()),
            "accuracy_accepted": float(accepted.mean()) if len(accepted) else math.nan,
            **score_measures(self.scores, self.correct),
            **({} if self.probabilities is None else calibration_measures(*self.probabilities)),
        }
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


@dataclass(frozen=True)
class ScoreTable(RenderedTable):
    """All estimators on the same points, one line each. `csv` and `json` have every measure, the others the main ones."""

    rows: Sequence[ScoredPoints]
    alpha: float
    columns: Sequence[str] = MAIN  # those that are printed

    @property
    def caption(self) -> str:
        """What the columns mean."""
        return " ".join(_SAYS[name] for name in self.columns)

    def json(self) -> list[dict[str, Any]]:
        """Plain values; None (null) where a measure is undefined."""
        names = dict.fromkeys(name for row in self.rows for name in row.measures)
        return [
            {
                "dataset": row.dataset,
                "model": row.model,
                "estimator": row.estimator,
                **{name: row.measures.get(name) for name in names},
            }
            for row in self.rows
        ]

    def csv(self) -> str:
        """One line per row with a header; empty where a measure is undefined."""
        rows = self.json()
        return csv_text(list(rows[0]), [list(row.values()) for row in rows])

    def cells(self, row: ScoredPoints) -> list[str]:
        """The main measures of a row as text."""
        return ["-" if (value := row.measures[name]) is None else f"{value:.3f}" for name in self.columns]

    @property
    def heads(self) -> list[str]:
        return [_HEADS[name][0] for name in self.columns]

    def _text(self) -> TextTable:
        models = any(row.model for row in self.rows)  # an empty column would only take room
        names = ("Dataset", "Model", "Estimator") if models else ("Dataset", "Estimator")
        rows = tuple(
            TextRow(
                (row.dataset, row.model, row.estimator) if models else (row.dataset, row.estimator),
                tuple(CellText(Text(f" {cell}"), cell, (cell,)) for cell in self.cells(row)),
            )
            for row in self.rows
        )
        heads = " & ".join([*names, *(_HEADS[name][1] for name in self.columns)])
        return TextTable(
            names,
            tuple(self.heads),
            rows,
            latex_preamble=(r"% \usepackage{booktabs,graphicx}",),
            latex_heads=(heads + r" \\",),
            latex_caption=rf"All estimators on the same points, $\alpha={self.alpha:g}$. {self.caption}",
            title=f"All estimators on the same points, alpha = {self.alpha:g}",
            caption=self.caption,
        )
