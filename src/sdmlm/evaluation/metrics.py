"""Selective classification, measured and tabulated as in the papers.

Of the points D that an estimator judges, n are admitted (accepted). Accuracy among the admitted and n/|D| are reported
by true class (y = c), by prediction (y_hat = c) and over all. An estimator that keeps its promise reaches alpha in
every cell; rejecting everything ("R") is better than falling below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_INTERVAL = (2.5, 97.5)  # percentiles: 95% intervals


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
