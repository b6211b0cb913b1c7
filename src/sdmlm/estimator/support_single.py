"""The search for a single query in a support set: the same result as the blocked search of `support.py`, in fewer steps.

For one query the arithmetic takes microseconds, and most of the time is overhead of the steps. So there is one product with
the whole support, and NumPy does the rest. The method is the same: approximate distances, and exact ones for those within the
rounding error of a decision.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from sdmlm.estimator.support import SupportSet


class TooClose(Exception):
    """So many pairs need an exact distance that a product in double precision is faster."""


class SingleQuery:
    """Approximate squared distances of a query (1, M) to all arranged rows of a support on the CPU.

    `slack` is the support's bound on the rounding errors of two of them together, as a share of the squared norms.
    """

    def __init__(self, support: SupportSet, vector: Tensor, slack: float) -> None:
        self._support, self._vector = support, vector
        near = vector[0] if support._shift is None else vector[0] - support._shift
        self.norm = float(near.square().sum())
        self.squares = self.norm + support._largest
        self.slack = slack * self.squares
        # Without the query's own norm, which is the same for all.
        self.distances: NDArray[Any] = torch.addmv(support._norms, support._near, near, alpha=-2.0).numpy()
        self._most = 32 + len(support) // 60

    def match(self, c: int) -> tuple[int, float, int]:
        """(q, squared distance, index of the nearest row) for a query that is predicted as c."""
        start, end = self._support._spans.get(c, (0, 0))
        stop, stop_at = self.nearest((0, start), (end, len(self.distances)))
        here = stop - self.norm
        near, near_at = self.nearest((start, end), bound=here)
        own = self.distances[start:end]
        q = int(np.count_nonzero(own < here - self.slack))
        close = np.flatnonzero((own >= here - self.slack) & (own <= here + self.slack) & (own < np.inf))
        if len(close):
            q += int(np.count_nonzero(self._exact(close + start) < stop))
        # Of two equally near vectors take the one with the lower index: the result must not depend on the arrangement.
        first = near < stop or (near == stop and 0 <= near_at < stop_at)
        return (q, near, near_at) if first else (q, stop, stop_at)

    def nearest(self, *spans: tuple[int, int], bound: float = math.inf) -> tuple[float, int]:
        """Exact squared distance and the user's index of the nearest row of the spans, (inf, -1) for none.

        Rows whose approximate distance is beyond `bound` are skipped.
        """
        parts = [(start, self.distances[start:end]) for start, end in spans if start < end]
        limit = min([bound, *(float(part.min()) for _, part in parts)]) + self.slack
        rows = np.concatenate([np.flatnonzero(part <= limit) + start for start, part in parts] or [np.empty(0, int)])
        if not len(rows):
            return math.inf, -1
        exact = self._exact(rows)
        least = exact.min()
        return float(least), int(self._support._order.numpy()[rows[exact == least]].min())

    def _exact(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        if len(rows) > self._most:
            raise TooClose
        difference = self._vector.double() - self._support._vectors[torch.from_numpy(rows)]
        squares: NDArray[np.float64] = difference.square_().sum(dim=1).numpy()
        return squares
