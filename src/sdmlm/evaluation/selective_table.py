"""The table of the papers: accuracy among the accepted and their share, by class, by prediction and over all points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from sdmlm.evaluation.metrics import Cell, SelectiveMetrics
from sdmlm.evaluation.tables import CellText, RenderedTable, TextRow, TextTable, csv_text, latex_escape, rounded

MANY_CLASSES = 4  # with more classes than this, a printed table shows the worst class in place of every class
_FIELDS = ("n", "share", "accuracy", "low", "high")
_COLORS = r"\providecolor{belowalpha}{RGB}{255,204,204}\providecolor{reachesalpha}{RGB}{204,236,204}"


@dataclass(frozen=True)
class SelectiveRow:
    """What one estimator does on one data set."""

    dataset: str
    model: str
    estimator: str
    metrics: SelectiveMetrics


@dataclass(frozen=True)
class SelectiveTable(RenderedTable):
    """Dataset, Model, Estimator, then accuracy and n/|D| for each y, for each y_hat, and over all points.

    `csv` and `json` keep every cell with its interval. `latex`, `markdown` and `rich` round to two decimals, mark what
    is below alpha before rounding (bold in Markdown, red in a terminal), and with more than four classes show the worst y and
    the worst y_hat only.
    """

    rows: Sequence[SelectiveRow]
    alpha: float
    class_names: Sequence[str]
    seeds: int = 1  # the largest number of seeds of a row; over several, accuracies are pooled and shares are means

    def json(self) -> dict[str, Any]:
        """Everything as plain values; None (null) where nothing was accepted."""

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
        """One line per row with a header; accuracy is empty where nothing was accepted (n = 0)."""
        fields = ("accuracy", "share", "n", "low", "high")
        groups = [f"{symbol}={name}" for symbol in ("y", "y_hat") for name in self.class_names] + ["marginal"]
        head = ["dataset", "model", "estimator", *(f"{group} {field}" for group in groups for field in fields)]
        rows = []
        for row in self.rows:
            cells = [*row.metrics.class_conditional, *row.metrics.prediction_conditional, row.metrics.marginal]
            values = [getattr(cell, field) for cell in cells for field in fields]
            rows.append([row.dataset, row.model, row.estimator, *values])
        return csv_text(head, rows)

    def marks(self) -> str:
        """What R and - in a cell mean, where the table has them, and how several seeds were combined."""
        cells = [cell for row in self.rows for _, cell in self._shown(row.metrics)]
        several = " (0.97R2: in 2 seeds)" if any(cell.rejected for cell in cells) else ""
        empty = "; -: no such points" if any(cell.empty for cell in cells) else ""
        pooled = (
            ". Over several seeds: accuracy among the accepted of all of them, mean share" if self.seeds > 1 else ""
        )
        return f"R: all rejected{several}{empty}{pooled}"

    def _text(self) -> TextTable:
        heads = tuple(self._columns("y", "ŷ"))
        rows = tuple(
            TextRow(
                (row.dataset, row.model, row.estimator),
                tuple(self._cell(prefix, cell) for prefix, cell in self._shown(row.metrics)),
            )
            for row in self.rows
        )
        return TextTable(
            names=("Dataset", "Model", "Estimator"),
            heads=heads,
            rows=rows,
            latex_preamble=(r"% \usepackage{booktabs,graphicx,xcolor}", _COLORS),
            latex_heads=self._latex_heads(),
            latex_caption=(
                rf"Accuracy among the accepted, and their share, at $\alpha={self.alpha:g}$. {self.marks()}. To reject "
                rf"all is preferred over falling \colorbox{{belowalpha}}{{below}} $\alpha$ (highlighted before rounding)."
            ),
            caption=(
                "Each cell: accuracy among the accepted points, then their share of all points (n/|D|). y: by true "
                f"class; ŷ: by predicted class. Red: below alpha = {self.alpha:g}. {self.marks()}."
            ),
            numbers_right=False,
        )

    def _latex_heads(self) -> tuple[str, ...]:
        columns = self._columns("$y$", r"$\hat{y}$", latex_escape)
        width = len(columns) // 2
        spans = [(width, "Class-conditional"), (width, "Prediction-conditional"), (1, "Marginal")]
        heads = " & ".join(rf"\multicolumn{{{2 * n}}}{{c}}{{{title}}}" for n, title in spans)
        return (
            rf"& & & {heads} \\",
            "& & & " + " & ".join(rf"\multicolumn{{2}}{{c}}{{{column}}}" for column in columns) + r" \\",
            " ".join(rf"\cmidrule(r){{{4 + 2 * i}-{5 + 2 * i}}}" for i in range(len(columns))),
            r"Dataset & Model & Estimator" + r" & \textsc{Acc.} & $n/|D|$" * len(columns) + r" \\",
        )

    def _cell(self, prefix: str, cell: Cell) -> CellText:
        """A cell with what stands before it (the name of the worst class)."""
        below = cell.accuracy is not None and cell.accuracy < self.alpha
        accuracy, share = _accuracy(cell), rounded(cell.share)
        style = "dim" if cell.accuracy is None else "red" if below else "green"
        shown = f"{latex_escape(prefix)}{accuracy}"
        color = "belowalpha" if below else "reachesalpha"
        return CellText(
            Text.assemble(prefix, (f"{accuracy:>4}", style), f" {share:<5}"),
            f"{prefix}{f'**{accuracy}**' if below else accuracy} ({share})".replace("<", "&lt;"),
            (shown if cell.empty else rf"\colorbox{{{color}}}{{{shown}}}", share.replace("<", "$<$")),
        )

    def _columns(self, y: str, y_hat: str, escape: Callable[[str], str] = str) -> list[str]:
        if len(self.class_names) > MANY_CLASSES:
            return [f"worst {y}", f"worst {y_hat}", "all"]
        return [f"{symbol}={escape(name)}" for symbol in (y, y_hat) for name in self.class_names] + ["all"]

    def _shown(self, metrics: SelectiveMetrics) -> list[tuple[str, Cell]]:
        """(text before the cell, cell), one per column."""
        shown = []
        for cells in (metrics.class_conditional, metrics.prediction_conditional):
            if len(cells) <= MANY_CLASSES:
                shown += [("", cell) for cell in cells]
            else:
                worst = cells.index(worst_cell(cells))
                shown.append(("" if cells[worst].accuracy is None else f"{self.class_names[worst]}: ", cells[worst]))
        return [*shown, ("", metrics.marginal)]


def worst_cell(cells: Sequence[Cell]) -> Cell:
    """The cell with the lowest accuracy; one without accepted points only where every cell is so."""
    return min(cells, key=lambda cell: 2.0 if cell.accuracy is None else cell.accuracy)


def _numbers(cell: Cell) -> dict[str, Any]:
    return {name: getattr(cell, name) for name in _FIELDS}


def _accuracy(cell: Cell) -> str:
    if cell.accuracy is None:
        return "-" if cell.empty else "R"
    return f"{cell.accuracy:.2f}" + (f"R{cell.rejected}" if cell.rejected else "")
