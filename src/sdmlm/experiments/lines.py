"""Collect the numbers of runs into the lines of the paper's four tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sdmlm.evaluation.lm_evaluation import Evaluation
from sdmlm.evaluation.metrics import Cell, selective_metrics
from sdmlm.experiments.layouts import LAYOUTS
from sdmlm.experiments.quantities import Quantity, proportion
from sdmlm.experiments.runs import Run, dataset_order, setting_order

GROUPS = ("y=0", "y=1", "y_hat=0", "y_hat=1", "all")  # of the full table
_TABLES = ("selective", "generation", "full", "calibration")  # in the paper's order


@dataclass(frozen=True)
class Line:
    """One line of a table: one setting over its seeds; on one test set and by one estimator where that applies."""

    table: str
    family: str
    setting: str
    model: str
    dataset: str
    estimator: str
    seeds: tuple[int, ...]
    quantities: dict[str, Quantity]

    def json(self) -> dict[str, Any]:
        """Plain values."""
        names = ("family", "setting", "model", "dataset", "estimator")
        plain: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name)}
        quantities = {name: quantity.json() for name, quantity in self.quantities.items()}
        return {**plain, "seeds": list(self.seeds), "quantities": quantities}


def collect_lines(runs: Sequence[Run], bootstrap: int, seed: int) -> list[Line]:
    """All lines, table by table; runs of one family and setting that differ only in the seed share a line."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.family, setting_order(run.setting), run.seed)):
        groups.setdefault((run.family, run.setting), []).append(run)
    several = len({family for family, _ in groups}) > 1
    lines = [
        line
        for (family, _), group in groups.items()
        for line in _setting_lines(group, f"{family}: {group[0].label}" if several else group[0].label, bootstrap, seed)
    ]
    # The sort is stable: within a table and test set, settings keep their order.
    return sorted(lines, key=lambda line: (_TABLES.index(line.table), dataset_order(line.dataset)))


def _setting_lines(group: list[Run], model: str, bootstrap: int, seed: int) -> Iterator[Line]:
    """All lines of one setting."""
    first = group[0]

    def line(table: str, dataset: str, estimator: str, runs: list[Run], quantities: dict[str, Quantity]) -> Line:
        seeds = tuple(run.seed for run in runs)
        return Line(table, first.family, first.setting, model, dataset, estimator, seeds, quantities)

    for dataset in sorted({name for run in group for name in run.evaluations}, key=dataset_order):
        runs = [run for run in group if dataset in run.evaluations]
        evaluations = [run.evaluations[dataset] for run in runs]
        for estimator in evaluations[0].estimators():
            full = _full_quantities(evaluations, estimator, bootstrap, seed)
            yield line("full", dataset, estimator, runs, full)
            if estimator == "HR":
                share = _share(evaluations, "accepted", bootstrap, seed)
                yield line("selective", dataset, "", runs, {"accuracy": full["all accuracy"], "share": share})
        generation = {
            "sentence": _share(evaluations, "answer_right", bootstrap, seed),
            "exact_match": _share(evaluations, "exact_match", bootstrap, seed),
        }
        yield line("generation", dataset, "", runs, generation)
    names = [column.quantity for column in LAYOUTS["calibration"].columns]
    calibration = {name: Quantity(tuple(_finite(run.calibration[name]) for run in group)) for name in names}
    yield line("calibration", "", "", group, calibration)


def _full_quantities(evaluations: list[Evaluation], estimator: str, bootstrap: int, seed: int) -> dict[str, Quantity]:
    """Accuracy, share and count of every group of the full table."""
    metrics = [selective_metrics(e.y, e.prediction, e.estimators()[estimator], 2, bootstrap, seed) for e in evaluations]
    cells = [[*m.class_conditional, *m.prediction_conditional, m.marginal] for m in metrics]
    full = {}
    for i, name in enumerate(GROUPS):
        column = [by_seed[i] for by_seed in cells]
        full[f"{name} accuracy"] = Quantity(
            tuple(c.accuracy for c in column), tuple(map(_interval, column)), tuple(c.n for c in column)
        )
        full[f"{name} share"] = Quantity(tuple(c.share for c in column))
        full[f"{name} n"] = Quantity(tuple(float(c.n) for c in column))
    return full


def _share(evaluations: list[Evaluation], name: str, bootstrap: int, seed: int) -> Quantity:
    """The share of prompts for which an array of the evaluation is true."""
    pairs = [proportion(getattr(e, name), bootstrap, seed) for e in evaluations]
    return Quantity(tuple(value for value, _ in pairs), tuple(interval for _, interval in pairs))


def _interval(cell: Cell) -> tuple[float, float] | None:
    return None if cell.low is None or cell.high is None else (cell.low, cell.high)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
