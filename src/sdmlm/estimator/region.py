"""From distances to decisions: eCDFs, Algorithm 1, membership, effective sample size (docs/method.md, section 3).

Every function takes arrays or tensors, computes in double precision, and returns the type of its first argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sdmlm.errors import BadSetting
from sdmlm.storage.artifacts import finite_or_none

Array = Any  # numpy array or torch tensor
Floats = NDArray[np.float64]


def _floats(values: Array) -> Floats:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values, dtype=np.float64)


def _labels(values: Array) -> NDArray[np.int64]:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values, dtype=np.int64)


def _like(result: NDArray[Any], given: Array) -> Array:
    return torch.as_tensor(result, device=given.device) if isinstance(given, torch.Tensor) else result


def check_alpha(alpha: float) -> float:
    """alpha as a float in (0.5, 1], or ValueError."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float, np.number)) or not 0.5 < alpha <= 1.0:
        raise BadSetting("alpha", f"is {alpha!r} but must be above 0.5 and at most 1: 0.95 is usual.")
    return float(alpha)


class DistanceCDF:
    """The class-wise empirical CDFs of d_nearest that turn a distance into d in [0, 1] (docs/method.md, 3.2)."""

    def __init__(self, values: Sequence[Array]) -> None:
        self.values = [np.sort(_floats(v)) for v in values]  # per class, ascending
        self._all = np.unique(np.concatenate(self.values)) if self.values else np.empty(0)

    @classmethod
    def fit(cls, d_nearest: Array, labels: Array, q: Array, n_classes: int) -> DistanceCDF:
        """Keep, for each true class, the distances of the points with q > 0."""
        distances, y, counted = _floats(d_nearest), _labels(labels), _floats(q) > 0
        return cls([distances[counted & (y == c)] for c in range(n_classes)])

    def snapped(self, d_nearest: Array, tolerance: Array) -> Array:
        """Distances (N,); those within their tolerance (N,) of a stored value are replaced by the nearest such value.

        A stored point that is scored again lies exactly on a step of its eCDF. The last bits of its h' depend on the batch, as
        products in float32 do, and could change d by a whole step.
        """
        x, width = _floats(d_nearest), _floats(tolerance)
        if len(self._all) == 0 or len(x) == 0:
            return d_nearest
        right = np.clip(np.searchsorted(self._all, x), 0, len(self._all) - 1)
        left = np.maximum(right - 1, 0)
        near = np.where(np.abs(self._all[left] - x) <= np.abs(self._all[right] - x), self._all[left], self._all[right])
        with np.errstate(invalid="ignore"):  # an infinite distance is near nothing
            return _like(np.where(np.abs(near - x) <= width, near, x), d_nearest)

    def quantile(self, d_nearest: Array, per_class: bool = False) -> Array:
        """d = min_c 1 - eCDF_c(d_nearest), (N,); with `per_class` the values before the minimum, (N, C).

        eCDF_c(x) is the share of stored values strictly below x, so d = 1 at distance 0 and 0 beyond the largest stored
        value. A class with no stored value gives 0.
        """
        x = _floats(d_nearest)
        columns = [
            1.0 - np.searchsorted(stored, x, side="left") / len(stored) if len(stored) else np.zeros(len(x))
            for stored in self.values
        ]
        d = np.stack(columns, axis=1)
        return _like(d if per_class else d.min(axis=1), d_nearest)

    def quantile_of(self, d_nearest: Array, classes: Array) -> Array:
        """1 - eCDF_c(d_nearest) for the given class c of each point, (N,)."""
        x, y = _floats(d_nearest), _labels(classes)
        d = np.zeros(len(x))
        for c in set(y.tolist()):
            own, stored = y == c, self.values[c]
            if len(stored):
                d[own] = 1.0 - np.searchsorted(stored, x[own], side="left") / len(stored)
        return _like(d, d_nearest)


@dataclass(frozen=True)
class HighReliabilityRegion:
    """The high-reliability region found by Algorithm 1.

    Attributes
    ----------
    alpha : float
        The accuracy that it is an estimate for.
    q_min : float
        The least q' in the region; infinite if there is no region, so that everything is rejected.
    psi : tuple of float
        By class, the least SDM output of the class in the region.

    Examples
    --------
    >>> import numpy as np
    >>> region = HighReliabilityRegion(alpha=0.9, q_min=2.0, psi=(0.95, 0.97))
    >>> region.contains(np.array([3.0, 1.0]), np.array([[0.96, 0.04], [0.02, 0.98]]), np.array([0, 1]))
    array([ True, False])
    """

    alpha: float
    q_min: float
    psi: tuple[float, ...]

    def contains(self, q_prime: Array, p: Array, predictions: Array) -> Array:
        """Whether each point is in the region, (N,): q' >= q'_min, the predicted class reaches its psi, no other does."""
        return _like(membership([self], q_prime, p, predictions)[:, 0], q_prime)

    def to_dict(self, class_names: Sequence[str] | None = None) -> dict[str, Any]:
        """Plain values for JSON, psi by class name if names are given; None for a threshold that nothing can reach."""
        psi = [finite_or_none(value) for value in self.psi]
        named = psi if class_names is None else dict(zip(class_names, psi, strict=True))
        return {"alpha": self.alpha, "q_min": finite_or_none(self.q_min), "psi": named}


def membership(
    regions: Sequence[HighReliabilityRegion], q_prime: Array, p: Array, predictions: Array
) -> NDArray[np.bool_]:
    """Whether each point is in each of several regions, (N, number of regions), in one computation."""
    q_min, psi = np.array([r.q_min for r in regions]), np.array([r.psi for r in regions])
    q, outputs, guesses = _floats(q_prime), _floats(p), _labels(predictions)
    inside = np.empty((len(q), len(regions)), dtype=bool)
    step = max(1, 2**22 // max(1, psi.size))  # bounds the (rows, regions, classes) comparison
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        reached = outputs[part, None, :] >= psi
        own = reached[np.arange(len(reached)), :, guesses[part]]
        inside[part] = (q[part, None] >= q_min) & own & (reached.sum(axis=2) == 1)
    return inside


def find_region(q_prime: Array, p: Array, labels: Array, alpha: float) -> HighReliabilityRegion:
    """Algorithm 1: the smallest q' from which on every class-wise threshold psi_c is at least alpha.

    q_prime (N,), p (N, C) and labels (N,) are those of the calibration points. The published algorithm sorts the remaining
    points at every candidate value. But psi_c, the element at index k = min(floor((1-alpha) n), n-1) of the ascending
    outputs at the true class, is at least alpha exactly if at most k of them are below alpha. So cumulative counts replace the
    sorts, and only one quantile per class is computed at the end: O(n log n) in total.
    """
    alpha = check_alpha(alpha)
    values, outputs, y = _floats(q_prime), _floats(p), _labels(labels)
    n_classes = outputs.shape[1]
    own = np.take_along_axis(outputs, y[:, None], axis=1)[:, 0] if len(y) else np.empty(0)
    keep = values > 0
    values, own, y = values[keep], own[keep], y[keep]
    order = np.argsort(values, kind="stable")
    values, own, y = values[order], own[order], y[order]
    # For each point in ascending order: is it the first of its value, and would every class pass from here on?
    good = np.ones(len(values), dtype=bool)
    good[1:] = values[1:] != values[:-1]
    for c in range(n_classes):
        left = np.cumsum((y == c)[::-1])[::-1]
        low = np.cumsum(((y == c) & (own < alpha))[::-1])[::-1]
        good &= (left > 0) & (low <= np.minimum(np.floor((1.0 - alpha) * left), left - 1))
    if not good.any():
        return HighReliabilityRegion(alpha, math.inf, (math.inf,) * n_classes)
    start = int(np.argmax(good))
    psi = tuple(_threshold(own[start:][y[start:] == c], alpha) for c in range(n_classes))
    return HighReliabilityRegion(alpha, float(values[start]), psi)


def _threshold(outputs: Floats, alpha: float) -> float:
    """The (1-alpha) quantile as the method defines it; the product is not rounded."""
    index = min(math.floor((1.0 - alpha) * len(outputs)), len(outputs) - 1)
    return float(np.partition(outputs, index)[index])


def effective_sample_size(
    q_prime: Array, calibration_q_prime: Array, calibration_labels: Array, n_classes: int
) -> Array:
    """n_c(q'): calibration points of class c whose q' is strictly below the query's, at most n_c - 1; (N, C)."""
    calibration, y = _floats(calibration_q_prime), _labels(calibration_labels)
    return sample_sizes(q_prime, [np.sort(calibration[y == c]) for c in range(n_classes)])


def sample_sizes(q_prime: Array, sorted_by_class: Sequence[Floats]) -> Array:
    """`effective_sample_size` from the q' of the calibration points of each class, ascending."""
    q = _floats(q_prime)
    columns = [
        np.minimum(np.searchsorted(stored, q, side="left"), max(len(stored) - 1, 0)) for stored in sorted_by_class
    ]
    return _like(np.stack(columns, axis=1), q_prime)


def dkw_epsilon(sample_sizes: Array, alpha: float) -> Array:
    """eps = max_c sqrt(ln(2/(1-alpha)) / (2 n_c)), with 1 for a class where n_c = 0; (N,)."""
    alpha = check_alpha(alpha)
    sizes = _floats(sample_sizes)
    log_term = math.log(2.0 / (1.0 - alpha)) if alpha < 1.0 else math.inf
    with np.errstate(divide="ignore"):
        eps = np.where(sizes > 0, np.sqrt(log_term / (2.0 * sizes)), 1.0)
    return _like(eps.max(axis=1), sample_sizes)
