"""The scores of an estimator for N points."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Scores:
    """The scores of an estimator for N points: NumPy arrays with one entry per point.

    Indexing with a slice, a mask or indices gives the Scores of those points; `len` is their number.

    Attributes
    ----------
    prediction : ndarray of int (N,)
        The predicted class, the argmax of z'; an index into `classes_` of the estimator.
    accepted : ndarray of bool (N,)
        Whether the prediction can be accepted, by the estimator's rule: certified, or the high-reliability region.
    out_of_distribution : ndarray of bool (N,)
        q = 0; always rejected.
    q, d, z : ndarray
        Similarity (N,), Distance (N,) and Magnitude (N, C).
    p : ndarray (N, C)
        The SDM output.
    confidence : ndarray (N,)
        Similarity and Magnitude in one number, for the certified rule.
    q_prime, in_region, highest_alpha : ndarray (N,)
        The rescaled similarity, membership in the high-reliability region, and the highest alpha at which that holds.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sdmlm import SDMEstimator
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> scores = SDMEstimator(progress=False).fit(X[:450], y[:450]).score(X[450:])
    >>> len(scores), scores.p.shape
    (119, (119, 2))
    >>> bool(scores[scores.accepted].accepted.all())
    True
    """

    prediction: NDArray[np.int64]  # y_hat = argmax z'
    p: NDArray[np.float64]  # (N, C) SDM(z')
    q: NDArray[Any]  # Similarity: leading neighbours that agree; a geometric mean over averaged layers
    d: NDArray[np.float64]  # Distance in [0, 1], 1 = nearest to the support
    d_nearest: NDArray[np.float64]  # Euclidean distance to the nearest support vector
    nearest: NDArray[np.int64]  # its index in the support
    z: NDArray[np.float64]  # (N, C) Magnitude: z'
    q_prime: NDArray[np.float64]  # rescaled similarity q'
    confidence: NDArray[np.float64]  # Similarity and Magnitude: log-odds of the SDM output with d = 1
    accepted: NDArray[np.bool_]  # by the estimator's rule: certified, or the high-reliability region
    in_region: NDArray[np.bool_]  # in the high-reliability region of the papers
    out_of_distribution: NDArray[np.bool_]  # q = 0: always rejected
    d_lower: NDArray[np.float64]  # max(d - eps, 0)
    d_upper: NDArray[np.float64]  # min(d + eps, 1)
    p_lower: NDArray[np.float64]  # (N, C) SDM(z') with d_lower
    p_upper: NDArray[np.float64]  # (N, C) SDM(z') with d_upper
    q_prime_lower: NDArray[np.float64]
    q_prime_upper: NDArray[np.float64]
    accepted_lower: NDArray[np.bool_]  # in the region also by the lower estimate
    highest_alpha: NDArray[np.float64]  # the highest alpha of the grid at which it is accepted, NaN for none

    def __len__(self) -> int:
        return len(self.prediction)

    def __getitem__(self, index: Any) -> Scores:
        index = [index] if isinstance(index, (int, np.integer)) else index
        return Scores(**{f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)})

    @classmethod
    def concatenate(cls, parts: Sequence[Scores]) -> Scores:
        """The Scores of several blocks of points as one, in order."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @property
    def probability(self) -> NDArray[np.float64]:
        """The SDM output at the predicted class, (N,)."""
        return np.take_along_axis(self.p, self.prediction[:, None], axis=1)[:, 0]

    def rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per point, ready for JSON (NaN and inf become None)."""
        columns = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _plain(values: NDArray[Any]) -> list[Any]:
    if values.dtype.kind == "f":
        values = values.astype(object)
        values[~np.isfinite(values.astype(float))] = None
    return list(values.tolist())
