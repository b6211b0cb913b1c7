"""Selective classification, measured and tabulated as in the papers.

Of the points D that an estimator judges, n are admitted (accepted). Accuracy among the admitted and n/|D| are reported
by true class (y = c), by prediction (y_hat = c) and over all. An estimator that keeps its promise reaches alpha in
every cell; rejecting everything ("R") is better than falling below it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

_INTERVAL = (2.5, 97.5)  # percentiles: 95% intervals
# A table is made smaller where it is wider than the page, never larger.
LATEX_TABLE = r"\begin{table*}\centering\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"
_MANY = 4  # with more classes than this, tables for people show the worst cell in place of all


@dataclass(frozen=True)
class Cell:
    """One group of points: n admitted, n/|D|, their accuracy, and its bootstrap interval (over several seeds: its range).

    accuracy is None where nothing was admitted ("all rejected"); low and high also without a bootstrap. `empty`: there was
    nothing to admit or reject. `rejected`: over several seeds, in how many of them all was rejected.
    """

    n: int
    share: float
    accuracy: float | None
    low: float | None = None
    high: float | None = None
    empty: bool = False
    rejected: int = 0


@dataclass(frozen=True)
class SelectiveMetrics:
    """Cells by true class, by predicted class (C each), and over all points."""

    class_conditional: tuple[Cell, ...]
    prediction_conditional: tuple[Cell, ...]
    marginal: Cell


def selective_metrics(
    labels: ArrayLike, predictions: ArrayLike, accepted: ArrayLike, n_classes: int, bootstrap: int = 0, seed: int = 0
) -> SelectiveMetrics:
    """Accuracy among the accepted and n/|D|, with 95% percentile intervals from `bootstrap` resamples of the points.

    A percentile interval knows only what was seen: where all or none of the accepted are right it would be a single point,
    and the exact interval stands in its place (`exact_bounds`).

    >>> metrics = selective_metrics([0, 0, 1, 1], [0, 1, 1, 1], [True, True, True, False], n_classes=2)
    >>> metrics.class_conditional[0].accuracy, metrics.prediction_conditional[0].accuracy, metrics.marginal.share
    (0.5, 1.0, 0.75)
    """
    y, y_hat = _classes(labels, "labels", n_classes), _classes(predictions, "predictions", n_classes)
    admitted = np.asarray(accepted, dtype=bool)
    if not y.shape == y_hat.shape == admitted.shape:
        raise ValueError("labels, predictions and accepted differ in length: give one of each for every point.")
    if bootstrap < 0:
        raise ValueError(f"bootstrap is {bootstrap!r} but must be zero (no intervals) or a number of resamples.")
    total, correct = len(y), (y == y_hat)[admitted]

    def cells(groups: NDArray[np.int64], n_groups: int) -> tuple[Cell, ...]:
        """One cell per group; `groups` (n,) are those of all points."""
        sizes = np.bincount(groups, minlength=n_groups)
        counts = np.bincount(2 * groups[admitted] + correct, minlength=2 * n_groups)  # wrong, right of each group
        wrong, right = counts[0::2], counts[1::2]
        bounds = _intervals(counts, total, bootstrap, seed)
        return tuple(
            Cell(int(n), float(n / total), float(r / n) if n else None, low, high, bool(size == 0))
            for n, r, (low, high), size in zip(wrong + right, right, bounds, sizes, strict=True)
        )

    return SelectiveMetrics(cells(y, n_classes), cells(y_hat, n_classes), cells(np.zeros_like(y), 1)[0])


def _intervals(counts: NDArray[np.int64], total: int, bootstrap: int, seed: int) -> list[list[float | None]]:
    """Percentile intervals of the accuracy of each group.

    To draw |D| points with replacement is to draw how many of them fall into each kind (wrong or right in a group, or
    rejected), which is one multinomial draw. Resamples in which nothing of a group is admitted say nothing about it.
    """
    if not bootstrap:
        return [[None, None]] * (len(counts) // 2)
    kinds = np.append(counts, total - counts.sum()) / total
    drawn = np.random.default_rng(seed).multinomial(total, kinds, size=bootstrap)[:, :-1]
    right, n = drawn[:, 1::2], drawn[:, 0::2] + drawn[:, 1::2]
    out: list[list[float | None]] = []
    for g, some in enumerate((n > 0).T):
        wrong, hits = counts[2 * g : 2 * g + 2].tolist()
        if not wrong + hits or not some.any():  # the second: few resamples, and none with such a point
            out.append([None, None])
        elif wrong and hits:
            out.append(np.percentile(right[some, g] / n[some, g], _INTERVAL).tolist())
        else:
            out.append(list(exact_bounds(hits, wrong + hits)))
    return out


def exact_bounds(hits: int, n: int) -> tuple[float, float]:
    """The 95% interval of Clopper and Pearson for a share of n > 0 points that all are hits, or none of which is one.

    >>> exact_bounds(2, 2)
    (0.15811388300841897, 1.0)
    """
    least = 0.025 ** (1 / n)
    return (least, 1.0) if hits else (0.0, 1 - least)


def _classes(values: ArrayLike, name: str, n_classes: int) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape} but must hold one class per point, for at least one point.")
    if array.dtype.kind not in "iub" or array.min() < 0 or array.max() >= n_classes:
        raise ValueError(f"{name} must hold whole numbers in 0..{n_classes - 1}: leave other points out.")
    return array.astype(np.int64)


@dataclass(frozen=True)
class Row:
    """What one estimator does on one dataset."""

    dataset: str
    model: str
    estimator: str
    metrics: SelectiveMetrics


@dataclass(frozen=True)
class Table:
    """The table of the papers: Dataset, Model, Estimator, then Acc. and n/|D| for each y, each y_hat, and over all.

    `csv` and `json` keep every cell with its interval. `latex`, `markdown` and `rich` round to two decimals, mark what is below
    alpha before rounding, and with more than four classes show the worst y and y_hat in place of all.
    """

    rows: Sequence[Row]
    alpha: float
    class_names: Sequence[str]
    seeds: int = 1  # of the line with the most; over several, accuracies are pooled and shares are means

    def json(self) -> dict[str, Any]:
        """Everything as plain values; None (null) where nothing was admitted."""

        def named(cells: Sequence[Cell]) -> list[dict[str, Any]]:
            return [{"class": name, **_numbers(cell)} for name, cell in zip(self.class_names, cells, strict=True)]

        rows = [
            {
                "dataset": row.dataset,
                "model": row.model,
                "estimator": row.estimator,
                "class_conditional": named(row.metrics.class_conditional),
                "prediction_conditional": named(row.metrics.prediction_conditional),
                "marginal": _numbers(row.metrics.marginal),
            }
            for row in self.rows
        ]
        return {"alpha": self.alpha, "class_names": list(self.class_names), "rows": rows}

    def csv(self) -> str:
        """One line per row with a header; accuracy is empty where nothing was admitted (n = 0)."""
        fields = ("accuracy", "share", "n", "low", "high")
        groups = [f"{symbol}={name}" for symbol in ("y", "y_hat") for name in self.class_names] + ["marginal"]
        names = [f"{group} {field}" for group in groups for field in fields]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["dataset", "model", "estimator", *names])
        for row in self.rows:
            cells = [*row.metrics.class_conditional, *row.metrics.prediction_conditional, row.metrics.marginal]
            values = [getattr(cell, field) for cell in cells for field in fields]
            writer.writerow([row.dataset, row.model, row.estimator, *values])
        return out.getvalue()

    def latex(self) -> str:
        """A booktabs table* as in the papers; the packages it needs are named in its first line."""
        columns = self._columns("$y$", r"$\hat{y}$", latex_escape)
        width = len(columns) // 2
        spans = [(width, "Class-conditional"), (width, "Prediction-conditional"), (1, "Marginal")]
        heads = " & ".join(rf"\multicolumn{{{2 * n}}}{{c}}{{{title}}}" for n, title in spans)
        lines = [
            r"% \usepackage{booktabs,graphicx,xcolor}",
            r"\providecolor{belowalpha}{RGB}{255,204,204}\providecolor{reachesalpha}{RGB}{204,236,204}",
            LATEX_TABLE,
            rf"\begin{{tabular}}{{lll{'cc' * len(columns)}}}\toprule",
            rf"& & & {heads} \\",
            "& & & " + " & ".join(rf"\multicolumn{{2}}{{c}}{{{column}}}" for column in columns) + r" \\",
            " ".join(rf"\cmidrule(r){{{4 + 2 * i}-{5 + 2 * i}}}" for i in range(len(columns))),
            r"Dataset & Model & Estimator" + r" & \textsc{Acc.} & $n/|D|$" * len(columns) + r" \\",
        ]
        before = None
        for row in self.rows:
            if row.dataset != before:
                lines.append(r"\midrule")
            before = row.dataset
            cells = [latex_escape(name) for name in (row.dataset, row.model, row.estimator)]
            for prefix, cell in self._shown(row.metrics):
                color = "belowalpha" if self._below(cell) else "reachesalpha"
                shown, share = f"{latex_escape(prefix)}{_accuracy(cell)}", rounded(cell.share).replace("<", "$<$")
                cells += [shown if cell.empty else rf"\colorbox{{{color}}}{{{shown}}}", share]
            lines.append(" & ".join(cells) + r" \\")
        caption = (
            rf"Accuracy among the admitted, and their share, at $\alpha={self.alpha:g}$. {self.marks()}. To reject all is "
            rf"preferred over falling \colorbox{{belowalpha}}{{below}} $\alpha$ (highlighted before rounding)."
        )
        return "\n".join([*lines, r"\bottomrule\end{tabular}}", rf"\caption{{{caption}}}", r"\end{table*}", ""])

    def markdown(self) -> str:
        """For a page: accuracy and n/|D| in a cell, bold where the accuracy is below alpha."""
        columns = ["Dataset", "Model", "Estimator", *self._columns("y", "ŷ")]
        lines = [columns, ["---"] * 3 + ["---:"] * (len(columns) - 3)]
        for row in self.rows:
            cells = [row.dataset, row.model, row.estimator]
            for prefix, cell in self._shown(row.metrics):
                accuracy = f"**{_accuracy(cell)}**" if self._below(cell) else _accuracy(cell)
                cells.append(f"{prefix}{accuracy} ({rounded(cell.share)})".replace("<", "&lt;"))
            lines.append(cells)
        return markdown_rows(lines)

    def rich(self) -> RichTable:
        """For a terminal: red below alpha, green from alpha on. Names share a column, to fit into 80 characters."""
        caption = f"Acc. among the admitted, then n/|D|. Red: below alpha = {self.alpha:g}. {self.marks()}."
        table = RichTable(caption=caption, box=box.SIMPLE_HEAD, padding=0)
        table.add_column("Estimator", no_wrap=True)
        for column in self._columns("y", "ŷ"):
            table.add_column(Text(column))
        before = None
        for row in self.rows:
            if before is None or row.dataset != before.dataset:
                table.add_section()
                table.add_row(Text(row.dataset, "bold"))
            if before is None or (row.dataset, row.model) != (before.dataset, before.model):
                table.add_row(Text(f" {row.model}"))
            before = row
            cells = [Text(f"  {row.estimator}")]
            for prefix, cell in self._shown(row.metrics):
                style = "dim" if cell.accuracy is None else "red" if self._below(cell) else "green"
                cells.append(Text.assemble(prefix, (f"{_accuracy(cell):>4}", style), f" {rounded(cell.share):<5}"))
            table.add_row(*cells)
        return table

    def marks(self) -> str:
        """What R and - in a cell mean, as far as the table has them, and what became of several seeds."""
        cells = [cell for row in self.rows for _, cell in self._shown(row.metrics)]
        several = " (0.97R2: in 2 seeds)" if any(cell.rejected for cell in cells) else ""
        empty = "; -: no such points" if any(cell.empty for cell in cells) else ""
        pooled = (
            ". Over several seeds: accuracy among the admitted of all of them, mean share" if self.seeds > 1 else ""
        )
        return f"R: all rejected{several}{empty}{pooled}"

    def _columns(self, y: str, y_hat: str, escape: Callable[[str], str] = str) -> list[str]:
        if len(self.class_names) > _MANY:
            return [f"worst {y}", f"worst {y_hat}", "all"]
        return [f"{symbol}={escape(name)}" for symbol in (y, y_hat) for name in self.class_names] + ["all"]

    def _shown(self, metrics: SelectiveMetrics) -> list[tuple[str, Cell]]:
        """(what to write before the cell, cell), one per column."""
        shown = []
        for cells in (metrics.class_conditional, metrics.prediction_conditional):
            if len(cells) <= _MANY:
                shown += [("", cell) for cell in cells]
            else:  # the lowest accuracy; all rejected only where every cell is
                worst = min(range(len(cells)), key=lambda c: 2.0 if (a := cells[c].accuracy) is None else a)
                shown.append(("" if cells[worst].accuracy is None else f"{self.class_names[worst]}: ", cells[worst]))
        return [*shown, ("", metrics.marginal)]

    def _below(self, cell: Cell) -> bool:
        return cell.accuracy is not None and cell.accuracy < self.alpha


def _numbers(cell: Cell) -> dict[str, Any]:
    return {name: getattr(cell, name) for name in ("n", "share", "accuracy", "low", "high")}


def _accuracy(cell: Cell) -> str:
    if cell.accuracy is None:
        return "-" if cell.empty else "R"
    return f"{cell.accuracy:.2f}" + (f"R{cell.rejected}" if cell.rejected else "")


def rounded(share: float) -> str:
    """Two decimals, and "<0.01" where they would hide that there is something."""
    return "<0.01" if share > 0 and f"{share:.2f}" == "0.00" else f"{share:.2f}"


def markdown_rows(lines: Sequence[Sequence[str]]) -> str:
    """The lines of a Markdown table."""
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def latex_escape(text: str) -> str:
    """Text that LaTeX prints as it stands."""
    names = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater"}
    return re.sub(r"[\\~^<>&%$#_{}]", lambda m: rf"\text{names[m[0]]}{{}}" if m[0] in names else "\\" + m[0], text)
