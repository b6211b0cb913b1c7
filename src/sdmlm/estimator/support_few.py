"""The search for few queries in a support set: the same result as the blocked search of `support.py`, in fewer steps.

For a batch of answers, or one, the arithmetic takes microseconds, and most of the time is overhead of the steps. So there is
one product with the whole support, and NumPy does the rest, for queries of all classes together. The method is the same:
approximate distances, and exact ones for those within the rounding error of a decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from sdmlm.estimator.support import SupportSet

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class TooClose(Exception):
    """So many pairs need an exact distance that a product in double precision is faster."""


class FewQueries:
    """Approximate squared distances of queries (n, M) to all arranged rows of a support on the CPU.

    `excluded` (n,): the arranged row that each query ignores, -1 for none. `least` and `most` bound the squared norms. `slack`: the support's bound on the rounding errors
    of two approximate distances together, as a share of the squared norms.
    """

    def __init__(self, support: SupportSet, vectors: Tensor, excluded: Tensor | None, slack: float) -> None:
        self._support, self._vectors = support, vectors
        near = vectors if support._shift is None else vectors - support._shift
        self._norms: NDArray[Any] = near.square().sum(dim=1).numpy()
        squares = self._norms + support._largest
        self.least, self.most, self._slack = squares.min(), squares.max(), slack * squares
        # Without the queries' own norms, which are the same along a row.
        self._distances: NDArray[Any] = torch.addmm(support._norms, near, support._near.T, alpha=-2.0).numpy()
        if excluded is not None:
            ignored = excluded.numpy()
            some = np.flatnonzero(ignored >= 0)
            self._distances[some, ignored[some]] = np.inf
        self._largest = np.finfo(self._distances.dtype).max  # an excluded row is farther
        self._spans = list(support._spans.values())
        first = self._spans[0][0] if self._spans else len(support)
        if first:  # rows that are never a match
            self._spans.insert(0, (0, first))
        self._span_of = {c: n for n, c in enumerate(support._spans, start=int(first > 0))}

    def match(self, classes: Integers) -> tuple[Integers, Floats, Integers]:
        """q, squared distance and index of the nearest row, for queries that are predicted as these classes."""
        own = self._own(classes)
        (near, stop), (near_at, stop_at) = self._nearest(own)
        here = stop - self._norms
        low, high = (self._limit(here + error)[:, None] for error in (-self._slack, self._slack))
        q = np.zeros(len(own), dtype=np.int64)
        for n in set(own.tolist()) - {-1}:
            start, end = self._spans[n]
            mine = (own == n).nonzero()[0]
            part = self._distances[mine, start:end]
            below, close = part < low[mine], part <= high[mine]
            q[mine] = below.sum(axis=1, dtype=np.int32)
            close ^= below
            if close.any():  # so near to the limit that rounding could decide
                query, row = np.divmod(np.flatnonzero(close), end - start)
                query = mine[query]
                q += np.bincount(query[self._exact(query, row + start) < stop[query]], minlength=len(own))
        # Of two equally near vectors take the one with the lower index: the result must not depend on the arrangement.
        first = (near < stop) | ((near == stop) & (near_at < stop_at))
        return q, np.where(first, near, stop), np.where(first, near_at, stop_at)

    def nearest_by_class(self, classes: Integers) -> Floats:
        """The squared distances to the nearest match of each query's class and to the nearest other row, (2, n); inf for none."""
        return self._nearest(self._own(classes))[0]

    def _own(self, classes: Integers) -> Integers:
        """The span of each query's matches, -1 for none."""
        return np.array([self._span_of.get(c, -1) for c in classes.tolist()])

    def _nearest(self, own: Integers) -> tuple[Floats, Integers]:
        """Exact squared distance and the user's index of the nearest match and of the nearest other row, both (2, n).

        (inf, -1) for none.
        """
        n, spans = len(own), len(self._spans)
        each, starts = np.arange(n), np.array([start for start, _ in self._spans])
        # A column for each span, and a last one for queries that have no match.
        least = np.full((n, spans + 1), np.inf, dtype=self._distances.dtype)
        np.minimum.reduceat(self._distances, starts, axis=1, out=least[:, :spans])
        mine = least[each, own]
        least[each, own] = np.inf
        limits = np.repeat(least.min(axis=1, keepdims=True), spans + 1, axis=1)
        limits[each, own] = mine
        limits = self._limit(limits + self._slack[:, None])
        within = np.empty(self._distances.shape, dtype=bool)
        for i, (start, end) in enumerate(self._spans):
            np.less_equal(self._distances[:, start:end], limits[:, i, None], out=within[:, start:end])
        query, row = np.divmod(np.flatnonzero(within), len(self._support))
        exact = self._exact(query, row)
        place = query + n * (np.searchsorted(starts, row, side="right") - 1 != own[query])
        squares, at = np.full(2 * n, np.inf), np.full(2 * n, len(self._support))
        np.minimum.at(squares, place, exact)
        best = exact == squares[place]
        np.minimum.at(at, place[best], self._support._order.numpy()[row[best]])
        at[at == len(self._support)] = -1
        return squares.reshape(2, n), at.reshape(2, n)

    def _limit(self, values: NDArray[Any]) -> NDArray[Any]:
        """Limits of approximate distances, in their precision; finite, so that no excluded row is within one."""
        return np.asarray(np.minimum(values, self._largest), dtype=self._distances.dtype)

    def _exact(self, query: Integers, row: Integers) -> Floats:
        if len(query) > len(self._distances) * (32 + len(self._support) // 60):
            raise TooClose
        difference = self._vectors[torch.from_numpy(query)].double() - self._support._vectors[torch.from_numpy(row)]
        squares: Floats = difference.square_().sum(dim=1).numpy()
        return squares
