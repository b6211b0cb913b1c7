"""The paper's four tables over runs, with intervals and spread, and sentences that compare two settings.

Within a run, intervals are 95% percentile intervals from resampled prompts (exact ones where all prompts agree). Over
several seeds a number is given as mean, standard deviation, smallest and largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from sdmlm.evaluation.metrics import Cell, SelectiveMetrics
from sdmlm.evaluation.selective_table import SelectiveRow, SelectiveTable
from sdmlm.evaluation.tables import CellText, TextRow, TextTable, csv_text, latex_escape
from sdmlm.experiments.layouts import LAYOUTS, Column
from sdmlm.experiments.lines import GROUPS, Line, collect_lines
from sdmlm.experiments.loss_comparison import LossComparison, compare_losses
from sdmlm.experiments.quantities import Quantity
from sdmlm.experiments.runs import Run, dataset_order

BOOTSTRAP = 1000
ALPHAS = (0.8, 0.85, 0.9, 0.95)  # two settings are compared at these, whatever alpha they were run with
_CSV_HEAD = ("table", "dataset", "model", "estimator", "seed", "quantity", "value", "low", "high", "mark")


@dataclass(frozen=True)
class Tables:
    """The paper's tables: `lines` holds those of "selective", "generation", "full" and "calibration" in turn."""

    alpha: float
    lines: tuple[Line, ...]
    comparisons: tuple[LossComparison, ...]
    by_alpha: tuple[LossComparison, ...]  # the same at ALPHAS

    def of(self, table: str) -> list[Line]:
        """The lines of one table."""
        return [line for line in self.lines if line.table == table]

    def title(self, table: str) -> str:
        """The title of a table, with alpha where its numbers depend on it."""
        layout = LAYOUTS[table]
        return layout.title + (f", alpha = {self.alpha:g}" if layout.by_alpha else "")

    def full(self) -> SelectiveTable:
        """The class- and prediction-conditional table; over several seeds accuracies are pooled, shares are means."""
        rows, lines = [], self.of("full")
        whole = {(line.family, line.setting, line.dataset): line for line in lines if line.estimator == "no-reject"}
        for line in lines:
            points = whole[line.family, line.setting, line.dataset].quantities
            cells = [_pooled_cell(line, group, points[f"{group} n"]) for group in GROUPS]
            metrics = SelectiveMetrics((cells[0], cells[1]), (cells[2], cells[3]), cells[4])
            rows.append(SelectiveRow(line.dataset, line.model, line.estimator, metrics))
        return SelectiveTable(rows, self.alpha, ["0", "1"], max(len(line.seeds) for line in lines))

    # Files

    def json(self) -> dict[str, Any]:
        """Everything, by seed and over the seeds."""
        names = dict.fromkeys(line.table for line in self.lines)
        tables = {name: [line.json() for line in self.of(name)] for name in names}
        pairs = {"comparisons": self.comparisons, "by_alpha": self.by_alpha}
        return {"alpha": self.alpha, "tables": tables, **{k: [c.json() for c in v] for k, v in pairs.items()}}

    def csv(self) -> str:
        """One number per line. For numbers over all seeds, `seed` is mean, sd, min, max or pooled; `mark` says why a number
        is missing."""
        return csv_text(_CSV_HEAD, [*self._csv_lines(), *self._csv_comparisons()])

    def _csv_lines(self) -> Iterator[list[Any]]:
        points = self._points()
        for line in self.lines:
            names = [line.table, line.dataset, line.model, line.estimator]
            for name, quantity in line.quantities.items():
                for i, (seed, value) in enumerate(zip(line.seeds, quantity.values, strict=True)):
                    interval = quantity.intervals[i] if quantity.intervals else None
                    known = points.get((line.family, line.setting, line.dataset, seed), {})
                    mark = None if value is not None else _why_missing(name, known)
                    yield [*names, seed, name, value, *(interval or (None, None)), mark]
                plain = quantity.json()
                for kind in ("mean", "sd", "min", "max", "pooled"):
                    if kind in plain:
                        yield [*names, kind, name, plain[kind], None, None, None]

    def _csv_comparisons(self) -> Iterator[list[Any]]:
        several = len({line.family for line in self.lines}) > 1
        own = [(c.family, c.dataset, c.alpha) for c in self.comparisons]  # the runs' alpha may be one of ALPHAS
        for c in (*self.comparisons, *(c for c in self.by_alpha if (c.family, c.dataset, c.alpha) not in own)):
            label = f"{c.family}: " if several else ""
            estimator = f"HR at alpha {c.alpha:g}"
            for i, model in enumerate((c.first, c.second)):
                names = ["comparison", c.dataset, label + model, estimator]
                for seed, share, accuracy in zip(c.seeds, c.shares, c.accuracies, strict=True):
                    rejected = "all rejected" if accuracy[i] is None else None
                    yield [*names, seed, "share", share[i], None, None, None]
                    yield [*names, seed, "accuracy", accuracy[i], None, None, rejected]
            difference = [f"{label}{c.first} minus {c.second}", estimator, "mean", "share", c.mean, *c.interval]
            yield ["comparison", c.dataset, *difference, None]

    def _points(self) -> dict[tuple[str, str, str, int], dict[str, float | None]]:
        """How many points of each group there are, by family, setting, test set and seed."""
        whole = [line for line in self.of("full") if line.estimator == "no-reject"]
        return {
            (line.family, line.setting, line.dataset, seed): {
                group: line.quantities[f"{group} n"].values[i] for group in GROUPS
            }
            for line in whole
            for i, seed in enumerate(line.seeds)
        }

    # For people

    def latex(self) -> str:
        """All four, for booktabs."""
        first, second, last = (self._text(name, brief=False) for name in LAYOUTS)
        return "\n".join([first.latex(), second.latex(), self.full().latex(), last.latex()])

    def markdown(self) -> str:
        """All four for a page, and what the comparisons say."""
        full = "By class and by prediction: accuracy among the accepted (their share), bold below alpha"
        parts = [
            self._markdown("selective"),
            self._markdown("generation"),
            f"**{full} = {self.alpha:g}.** {self.full().marks()}.\n\n{self.full().markdown()}",
            self._markdown("calibration"),
            *(comparison.statement() + "\n" for comparison in self.comparisons),
        ]
        return "\n".join(parts)

    def rich(self) -> list[RichTable]:
        """For a terminal, in the order of the paper."""
        first, second, last = map(self._text, LAYOUTS)
        return [first.rich(), second.rich(), self.full().rich(), last.rich()]

    def _markdown(self, table: str) -> str:
        return f"**{self.title(table)}.** {LAYOUTS[table].caption}\n\n{self._text(table).markdown()}"

    def _text(self, table: str, brief: bool | None = None) -> TextTable:
        layout = LAYOUTS[table]
        brief = layout.brief if brief is None else brief
        names = ("Dataset", "Model") if any(line.dataset for line in self.of(table)) else ("Model",)
        rows = tuple(
            TextRow(
                (line.dataset, line.model)[2 - len(names) :],
                tuple(_cell(line, column, brief) for column in layout.columns),
            )
            for line in self.of(table)
        )
        alpha = rf", $\alpha={self.alpha:g}$" if layout.by_alpha else ""
        heads = " & ".join([*names, *(column.latex for column in layout.columns)])
        return TextTable(
            names,
            tuple(column.head for column in layout.columns),
            rows,
            latex_preamble=(r"% \usepackage{booktabs,graphicx}",),
            latex_heads=(heads + r" \\",),
            latex_caption=rf"{latex_escape(layout.title)}{alpha}. {_latex_number(layout.caption)}",
            title=layout.title,
            caption=layout.caption,
        )


def _cell(line: Line, column: Column, brief: bool) -> CellText:
    shown = line.quantities[column.quantity].text(column.digits, column.none, brief)
    return CellText(Text(f" {shown}"), shown.replace("<", "&lt;"), (_latex_number(shown),))


def _latex_number(text: str) -> str:
    return latex_escape(text).replace("±", r"$\pm$").replace("∞", r"$\infty$").replace(r"\textless{}", "$<$")


def _why_missing(quantity: str, points: Mapping[str, float | None]) -> str:
    """Why a number of one seed is missing; `points` is the number of points in each group."""
    if not quantity.endswith("accuracy"):
        return "infinite"  # a threshold
    return "all rejected" if points.get(quantity.split()[0] if " " in quantity else "all") else "no points"


def _pooled_cell(line: Line, group: str, points: Quantity) -> Cell:
    """One seed with its interval, or several with their range; `points` is the number of points that each seed has.

    The accuracy is pooled: in a mean over seeds, a seed that accepts one answer would count as much as one that accepts a
    hundred.
    """
    accuracy, share, n = (line.quantities[f"{group} {what}"] for what in ("accuracy", "share", "n"))
    low, high = accuracy.intervals[0] or (None, None)
    if len(line.seeds) > 1 and accuracy.known:
        low, high = min(accuracy.known), max(accuracy.known)
    rejected = sum(value is None and bool(some) for value, some in zip(accuracy.values, points.values, strict=True))
    return Cell(
        n=round(n.mean or 0),
        share=share.mean or 0.0,
        accuracy=accuracy.pooled,
        low=low,
        high=high,
        empty=not points.mean,
        rejected=rejected if accuracy.known else 0,  # if all seeds reject everything, R is shown without a number
    )


def tables(runs: Sequence[Run], bootstrap: int = BOOTSTRAP, seed: int = 0) -> Tables:
    """The paper's tables over runs. Runs of one family and setting that differ only in the seed share a line."""
    if not runs:
        raise ValueError("There are no runs to make tables of.")
    alphas = sorted({run.alpha for run in runs})
    if len(alphas) > 1:
        raise ValueError(f"The runs have alpha {' and '.join(f'{a:g}' for a in alphas)}: tables need one alpha.")
    by_alpha = [c for alpha in ALPHAS for c in compare_losses(runs, alpha, bootstrap=bootstrap, seed=seed)]
    by_alpha.sort(key=lambda c: (c.family, dataset_order(c.dataset)))
    comparisons = compare_losses(runs, bootstrap=bootstrap, seed=seed)
    return Tables(alphas[0], tuple(collect_lines(runs, bootstrap, seed)), tuple(comparisons), tuple(by_alpha))
