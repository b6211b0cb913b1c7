"""Measures of selective classification as in the papers, and the usual measures of a score.

Of the points D that an estimator judges, n are accepted. Accuracy among the accepted and n/|D| are reported
by true class (y = c), by prediction (y_hat = c) and over all. An estimator that keeps its promise reaches alpha in
every cell; rejecting everything ("R") is better than falling below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import trapezoid

_INTERVAL = (2.5, 97.5)  # percentiles: 95% intervals


@dataclass(frozen=True)
class Cell:
    """One group of points: n accepted, n/|D|, their accuracy, and its bootstrap interval (over several seeds: its range).

    accuracy is None where nothing was accepted ("all rejected"). low and high are None there too, and without a bootstrap.
    `empty`: the group has no points. `rejected`: over several seeds, in how many of them all was rejected.
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

    Where all or none of the accepted are right, a percentile interval would be a single point; there the exact interval is
    given instead (`exact_bounds`).

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

    Drawing |D| points with replacement is a multinomial draw of how many fall into each kind (wrong or right in a group, or
    rejected). Resamples in which no point of a group is accepted are left out for that group.
    """
    if not bootstrap:
        return [[None, None]] * (len(counts) // 2)
    kinds = np.append(counts, total - counts.sum()) / total
    drawn = np.random.default_rng(seed).multinomial(total, kinds, size=bootstrap)[:, :-1]
    right, n = drawn[:, 1::2], drawn[:, 0::2] + drawn[:, 1::2]
    out: list[list[float | None]] = []
    for g, some in enumerate((n > 0).T):
        wrong, hits = counts[2 * g : 2 * g + 2].tolist()
        if not wrong + hits or not some.any():  # with few resamples, there may be none that admits such a point
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


# Measures of a score: how well does it rank right above wrong predictions? Inputs are plain arrays: `scores`, one per
# point, higher means more trustworthy, and `correct`, whether the prediction is right. NaN where a measure is undefined.


def auroc(scores: ArrayLike, correct: ArrayLike) -> float:
    """Area under the ROC curve: the chance that a right prediction scores above a wrong one (a tie counts half).

    >>> auroc([0.9, 0.8, 0.7, 0.1], [True, False, True, False])
    0.75
    """
    s, right = _scored(scores, correct)
    if right.all() or not right.any():
        return float("nan")
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(right, s))


def risk_coverage(scores: ArrayLike, correct: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(coverage, risk) when the k points with the highest scores are accepted, for k = 1..n.

    Coverage is k/n and risk the share of errors among the accepted. Within points of equal score the errors are spread
    evenly, which is their mean over all orders, so the curve does not depend on the order of the points.

    >>> risk_coverage([3, 2, 1], [True, False, True])[1].round(2).tolist()
    [0.0, 0.5, 0.33]
    """
    s, right = _scored(scores, correct)
    ends, errors = _error_counts(s, right)
    n = np.arange(1, len(s) + 1)
    return n / len(s), np.interp(n, np.append(0, ends), np.append(0, errors)) / n


def aurc(scores: ArrayLike, correct: ArrayLike) -> float:
    """Area under the risk-coverage curve (Geifman et al. 2019): the mean of the risk over k = 1..n; lower is better.

    >>> round(aurc([3, 2, 1], [True, False, True]), 4)
    0.2778
    """
    return float(risk_coverage(scores, correct)[1].mean())


def excess_aurc(scores: ArrayLike, correct: ArrayLike) -> float:
    """AURC minus the AURC of a score that puts every right prediction above every wrong one; lower is better.

    >>> excess_aurc([3, 2, 1], [True, True, False])
    0.0
    """
    return aurc(scores, correct) - aurc(np.asarray(correct, dtype=float), correct)


def auarc(scores: ArrayLike, correct: ArrayLike) -> float:
    """Area under the accuracy-rejection curve (Nadeem et al. 2009): the mean accuracy among the k best, k = 1..n.

    Over the same k it is 1 - AURC; both are reported because the literature is divided. Higher is better.
    """
    return 1.0 - aurc(scores, correct)


def prediction_rejection_ratio(scores: ArrayLike, correct: ArrayLike) -> float:
    """PRR (Malinin and Gales 2021): 1 for the ideal order, 0 for a random one, negative for a worse one.

    Rejected points are taken to be answered rightly by somebody else. The curve of the remaining errors, as a share of
    all points, against coverage encloses an area; PRR = (random - score) / (random - ideal), by the trapezoidal rule.

    >>> prediction_rejection_ratio([3, 2, 1], [True, True, False])
    1.0
    """
    s, right = _scored(scores, correct)
    if right.all() or not right.any():
        return float("nan")

    def area(order: NDArray[np.float64]) -> float:
        ends, errors = _error_counts(order, right)
        return float(trapezoid(np.append(0, errors), np.append(0, ends)))

    chance = len(s) * float((~right).sum()) / 2
    return (chance - area(s)) / (chance - area(right.astype(float)))


def coverage_at_accuracy(scores: ArrayLike, correct: ArrayLike, accuracy: float) -> float:
    """The largest share of points that a threshold on the score can accept with at least this accuracy among them.

    Points of equal score are accepted together. The labels of the same points are used: this measures the score, and
    promises nothing about new points.

    >>> coverage_at_accuracy([4, 3, 2, 1], [True, True, False, True], accuracy=0.75)
    1.0
    """
    threshold = threshold_at_accuracy(scores, correct, accuracy)
    return float((np.asarray(scores, dtype=np.float64) >= threshold).mean())


def threshold_at_accuracy(scores: ArrayLike, correct: ArrayLike, accuracy: float) -> float:
    """The lowest score t for which the points that score at least t have this accuracy; infinite if there is none."""
    s, right = _scored(scores, correct)
    ends, errors = _error_counts(s, right)
    # The tolerance: 19 of 20 must count as 0.95, although 0.95 * 20 is not exactly 19 in floating point.
    reached = ends[ends - errors >= (accuracy - 1e-9) * ends]
    return float(np.sort(s)[::-1][reached.max() - 1]) if len(reached) else float("inf")


def score_measures(scores: ArrayLike, correct: ArrayLike) -> dict[str, float]:
    """All measures of a score by name, as `sdmlm compare` reports them."""
    coverage = {f"coverage_at_{a:g}": coverage_at_accuracy(scores, correct, a) for a in (0.9, 0.95, 0.99)}
    return {
        "auroc": auroc(scores, correct),
        "aurc": aurc(scores, correct),
        "excess_aurc": excess_aurc(scores, correct),
        "auarc": auarc(scores, correct),
        "prr": prediction_rejection_ratio(scores, correct),
        **coverage,
    }


def _scored(scores: ArrayLike, correct: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    s, right = np.asarray(scores, dtype=np.float64), np.asarray(correct, dtype=bool)
    if s.ndim != 1 or s.shape != right.shape or len(s) == 0:
        raise ValueError(
            f"scores has shape {s.shape} and correct {right.shape}: give one of each per point, for at least one point."
        )
    if np.isnan(s).any():
        raise ValueError("scores has NaN values: remove or repair those points.")
    return s, right


def _error_counts(s: NDArray[np.float64], right: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(points, errors) among the accepted for every threshold, from strict to loose; equal scores go together."""
    order = np.argsort(-s, kind="stable")
    last = np.flatnonzero(np.append(s[order][1:] != s[order][:-1], True))
    return (last + 1).astype(np.int64), np.cumsum(~right[order], dtype=np.int64)[last]


# Measures of probabilities: `p` (N, C) and labels y


def expected_calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = 15) -> float:
    """ECE (Guo et al. 2017): |accuracy - mean confidence| in bins of equal width over [0, 1], weighted by their points.

    >>> round(expected_calibration_error([0.9, 0.9], [True, False]), 3)
    0.4
    """
    conf, right = _scored(confidence, correct)
    if conf.min() < 0 or conf.max() > 1:
        raise ValueError("confidence has values outside 0..1: give probabilities.")
    where = np.minimum((conf * bins).astype(int), bins - 1)
    gaps = np.bincount(where, weights=right - conf, minlength=bins)
    return float(np.abs(gaps).sum() / len(conf))


def class_wise_calibration_error(p: ArrayLike, y: ArrayLike, bins: int = 15) -> float:
    """Class-wise ECE (Kull et al. 2019): the mean over the classes c of the ECE of p_c against y = c."""
    probabilities, labels = _probabilities(p, y)
    columns = range(probabilities.shape[1])
    return float(np.mean([expected_calibration_error(probabilities[:, c], labels == c, bins) for c in columns]))


def brier_score(p: ArrayLike, y: ArrayLike) -> float:
    """Brier (1950): the mean over the points of sum_c (p_c - [y = c])^2, from 0 (best) to 2.

    >>> round(brier_score([[0.8, 0.2]], [0]), 3)
    0.08
    """
    probabilities, labels = _probabilities(p, y)
    return float(((probabilities - np.eye(probabilities.shape[1])[labels]) ** 2).sum(axis=1).mean())


def log_loss(p: ArrayLike, y: ArrayLike) -> float:
    """The mean of -ln p_y (scikit-learn's, which keeps p away from 0 and 1 by the precision of a double)."""
    from sklearn.metrics import log_loss as mean_log_loss

    probabilities, labels = _probabilities(p, y)
    return float(mean_log_loss(labels, probabilities, labels=range(probabilities.shape[1])))


def calibration_measures(p: ArrayLike, y: ArrayLike) -> dict[str, float]:
    """All measures of probabilities by name."""
    probabilities, labels = _probabilities(p, y)
    right = probabilities.argmax(axis=1) == labels
    return {
        "ece": expected_calibration_error(probabilities.max(axis=1).clip(max=1.0), right),
        "class_wise_ece": class_wise_calibration_error(probabilities.clip(max=1.0), labels),
        "brier": brier_score(probabilities, labels),
        "log_loss": log_loss(probabilities, labels),
    }


def _probabilities(p: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    probabilities = np.asarray(p, dtype=np.float64)
    if probabilities.ndim != 2 or probabilities.shape[1] < 2:
        raise ValueError(f"p has shape {probabilities.shape} but needs one row per point and one column per class.")
    labels = _classes(y, "y", probabilities.shape[1])
    if len(labels) != len(probabilities):
        raise ValueError(f"p has {len(probabilities)} rows but y has {len(labels)} labels: give one for each row.")
    if not (np.abs(probabilities.sum(axis=1) - 1) < 1e-6).all() or probabilities.min() < 0:
        raise ValueError("p has rows that are not probabilities: each must be non-negative and sum to 1.")
    return probabilities, labels


# Measures of a shift: does a score tell known from shifted points? Higher scores mean "known".


def shift_auroc(known: ArrayLike, shifted: ArrayLike) -> float:
    """The chance that a known point scores above a shifted one (a tie counts half)."""
    inside, outside = np.asarray(known, dtype=np.float64), np.asarray(shifted, dtype=np.float64)
    return auroc(np.concatenate([inside, outside]), np.repeat([True, False], [len(inside), len(outside)]))


def fpr_at_95(known: ArrayLike, shifted: ArrayLike) -> float:
    """FPR95: the share of shifted points that pass the strictest threshold that at least 95% of the known points pass.

    >>> fpr_at_95([5, 4, 3, 2], [1, 2.5])
    0.5
    """
    inside, outside = np.sort(np.asarray(known, dtype=np.float64))[::-1], np.asarray(shifted, dtype=np.float64)
    if not len(inside) or not len(outside):
        raise ValueError("known or shifted is empty: give at least one score of each.")
    threshold = inside[int(np.ceil(round(0.95 * len(inside), 9))) - 1]
    return float((outside >= threshold).mean())
