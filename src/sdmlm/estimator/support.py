"""The support set: exact Similarity q and distance to the nearest match (docs/method.md, 3.2).

For a query with prediction c the support has two kinds of vectors. *Matches* are correctly predicted as c; every other
vector *ends the run*. q is the number of matches strictly nearer than the nearest vector that ends the run. One pass
over the vectors that end the run finds that distance, and one pass over the matches counts those below it. Together they are
one matrix product, block by block: no sorting, no top-k, no cap, bounded memory.

Distances are computed as |a|^2 + |b|^2 - 2ab, which is fast but inexact. Distances within the rounding error of a decision
are computed again from the differences in double precision, so the results are those of exact arithmetic on the given vectors
(up to double-precision rounding), and a duplicate is at distance 0. If that would be most of a batch (tight clusters that are
far from each other), the batch is computed again with products in double precision.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sdmlm.estimator.activation import full_precision
from sdmlm.estimator.support_few import FewQueries, TooClose
from sdmlm.estimator.vectors import as_vectors, checked_labels, equal_rows, integers

# Rounding errors of a length-M dot product grow like sqrt(M); eight standard deviations are never exceeded in practice
# (Higham & Mary 2019: each one with probability below 1e-13).
_SIGMAS = 8.0

_LEAST, _MOST = 1e-25, 1e37  # squared norms with which products in float32 keep their relative precision
_QUERY_BLOCK = 512  # queries at a time: enough for a fast matrix product
_SUPPORT_BLOCK = 4096  # support rows at a time, fewer if memory_mb is small
_FEW = 2**20  # distances of several queries up to which `FewQueries` is faster


@dataclass(frozen=True)
class SupportMatch:
    """The matches of N queries in the support."""

    q: Tensor  # (N,) int64: Similarity
    d_nearest: Tensor  # (N,) float64: Euclidean distance to the nearest support vector, inf if there is none
    nearest: Tensor  # (N,) int64: its index, -1 if there is none


class SupportSet:
    """Exemplar vectors (N, M) with true labels and predictions, both (N,).

    Labels outside the classes are allowed: such a vector is never a match, it can only end a run (a known
    out-of-distribution region). `max_q` caps q, as an index that returns so many neighbours would (the published code:
    2048); by default q is uncapped. `memory_mb` bounds the temporary memory of a query whatever the sizes.
    """

    approximate = False

    def __init__(
        self,
        vectors: ArrayLike | Tensor,
        labels: ArrayLike | Tensor,
        predictions: ArrayLike | Tensor,
        max_q: int | None = None,
        memory_mb: float = 64.0,
    ) -> None:
        self.max_q, self.memory_mb = max_q, memory_mb
        vectors = as_vectors(vectors)
        self._arrange(vectors, *checked_labels(vectors, labels, predictions))

    def _arrange(self, vectors: Tensor, labels: Tensor, predictions: Tensor) -> None:
        """Group the rows: those that are never a match first (-1), then the matches of each class in turn."""
        group = torch.where(labels == predictions, predictions, -1)
        self._order = torch.argsort(group, stable=True)  # arranged row -> the user's index
        self._rows = torch.empty_like(self._order)  # the user's index -> arranged row
        self._rows[self._order] = torch.arange(len(group), device=group.device)
        self.labels, self.predictions = labels, predictions
        self._vectors = vectors[self._order]
        classes, sizes = torch.unique_consecutive(group[self._order], return_counts=True)
        ends = torch.cumsum(sizes, 0)
        starts = ends - sizes
        self._spans = {int(c): (int(s), int(e)) for c, s, e in zip(classes, starts, ends, strict=True) if c >= 0}
        # Far from the origin |a|^2 + |b|^2 - 2ab loses most digits, and nearly all distances would need the exact path.
        mean = self._vectors.sum(dim=0) / max(1, len(group))
        self._norms = self._vectors.square().sum(dim=1)
        self._shift = mean if bool(self._norms.mean() < 2 * mean.square().sum()) else None
        self._near = self._vectors
        if self._shift is not None:
            self._near = self._vectors - mean
            self._norms = self._near.square().sum(dim=1)
        self._twin = equal_rows(self._vectors, self._norms)
        self._largest = float(self._norms.max()) if len(group) else 0.0
        if not _LEAST <= self._largest <= _MOST:
            parts = self._near.split(_SUPPORT_BLOCK) if len(group) else ()
            self._largest = max((float(part.double().square().sum(dim=1).max()) for part in parts), default=0.0)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def vectors(self) -> Tensor:
        """The exemplar vectors in the order they were given, (N, M)."""
        return self._vectors[self._rows]

    def state(self) -> dict[str, Tensor]:
        """The tensors to save; the constructor takes them by these names."""
        return {"vectors": self.vectors, "labels": self.labels, "predictions": self.predictions}

    def add(self, vectors: ArrayLike | Tensor, labels: ArrayLike | Tensor, predictions: ArrayLike | Tensor) -> None:
        """Append labelled vectors; their indices follow the existing ones."""
        vectors = self._queries(vectors)
        labels, predictions = checked_labels(vectors, labels, predictions)
        joined = torch.cat([self.vectors, vectors])
        self._arrange(joined, torch.cat([self.labels, labels]), torch.cat([self.predictions, predictions]))

    @full_precision()
    def query(
        self,
        vectors: ArrayLike | Tensor,
        predictions: ArrayLike | Tensor,
        exclude: ArrayLike | Tensor | None = None,
    ) -> SupportMatch:
        """q, d_nearest and nearest of each query. `exclude` (N,) is the support index to ignore, -1 for none."""
        vectors = self._queries(vectors)
        predictions = integers(predictions, "predictions", vectors)
        excluded = self._excluded_rows(exclude, vectors)
        with contextlib.suppress(TooClose):
            if (few := self._few(vectors, None if exclude is None else excluded)) is not None:
                q, distance, nearest = map(torch.from_numpy, few.match(predictions.numpy()))
                q = q if self.max_q is None else q.clamp_(max=self.max_q)
                return SupportMatch(q, distance.sqrt_(), nearest)
        n = len(vectors)
        q = torch.zeros(n, dtype=torch.long, device=vectors.device)
        distance = torch.full((n,), torch.inf, dtype=torch.float64, device=vectors.device)
        nearest = torch.full((n,), -1, dtype=torch.long, device=vectors.device)
        for c in predictions.unique().tolist():
            members = (predictions == c).nonzero().squeeze(1)
            for part in members.split(_QUERY_BLOCK):
                q[part], distance[part], nearest[part] = self._query_class(vectors[part], c, excluded[part])
        if self.max_q is not None:
            q.clamp_(max=self.max_q)
        return SupportMatch(q, distance.sqrt(), nearest)

    @full_precision()
    def neighbors(
        self, vectors: ArrayLike | Tensor, k: int, exclude: ArrayLike | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k nearest support vectors: (distances, indices), each (N, k), ties by index.

        If the support has fewer than k vectors, the rest is padded with distance inf and index -1.
        """
        vectors = self._queries(vectors)
        excluded = self._excluded_rows(exclude, vectors)
        distances = torch.full((len(vectors), k), torch.inf, dtype=torch.float64, device=vectors.device)
        indices = torch.full((len(vectors), k), -1, dtype=torch.long, device=vectors.device)
        for start in range(0, len(vectors), _QUERY_BLOCK):
            part = slice(start, start + _QUERY_BLOCK)
            row, rank, distance, index = self._closely(vectors[part], excluded[part], lambda q: q.smallest(k))
            distances[start + row, rank], indices[start + row, rank] = distance.sqrt(), index
        return distances, indices

    @full_precision()
    def nearest_by_class(
        self, vectors: ArrayLike | Tensor, classes: ArrayLike | Tensor, exclude: ArrayLike | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The distances to the nearest match of each query's class and to the nearest other vector, both (N,); inf for none."""
        vectors = self._queries(vectors)
        classes = integers(classes, "classes", vectors)
        excluded = self._excluded_rows(exclude, vectors)
        with contextlib.suppress(TooClose):
            if (few := self._few(vectors, None if exclude is None else excluded)) is not None:
                own, other = torch.from_numpy(few.nearest_by_class(classes.numpy())).sqrt_()
                return own, other
        squares = torch.empty(2, len(vectors), dtype=torch.float64, device=vectors.device)
        for c in classes.unique().tolist():
            for part in (classes == c).nonzero().squeeze(1).split(_QUERY_BLOCK):
                for to, spans in zip(squares, self._own_and_other(c), strict=True):
                    to[part] = self._closely(vectors[part], excluded[part], _nearest_of(spans))
        return squares[0].sqrt(), squares[1].sqrt()

    # How it is done

    def _own_and_other(self, c: int) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """The arranged rows of the matches of class c, and all others."""
        start, end = self._spans.get(c, (0, 0))
        return ((start, end),), ((0, start), (end, len(self)))

    def _query_class(self, vectors: Tensor, c: int, excluded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, squared distance and index of the nearest, for queries that are all predicted as c."""
        (own,), others = self._own_and_other(c)

        def both(queries: _Queries) -> tuple[Tensor, ...]:
            stop, stop_at = queries.nearest(*others)
            return stop, stop_at, *queries.count_below(stop, own)

        stop, stop_at, q, near, near_at = self._closely(vectors, excluded, both)
        # Of two equally near vectors take the one with the lower index: the result must not depend on the arrangement.
        first = (near < stop) | ((near == stop) & (near_at < stop_at) & (near_at >= 0))
        return q, torch.where(first, near, stop), torch.where(first, near_at, stop_at)

    def _closely(self, vectors: Tensor, excluded: Tensor, ask: Callable[[_Queries], tuple[Tensor, ...]]) -> Any:
        """Compute in the precision of the vectors, or in double precision if many are too close together or out of range."""
        queries = _Queries(self, vectors, excluded, vectors.dtype)
        with contextlib.suppress(TooClose):
            if queries.in_range:
                return ask(queries)
        return ask(_Queries(self, vectors, excluded, torch.float64))

    def _few(self, vectors: Tensor, excluded: Tensor | None) -> FewQueries | None:
        """The search for few queries; None for many, elsewhere than on the CPU, or out of the range of their precision."""
        n = len(vectors)
        if not n or not len(self) or vectors.device.type != "cpu" or (n > 1 and n * len(self) > _FEW):
            return None
        queries = FewQueries(self, vectors, excluded, _slack(vectors))
        return queries if queries.least >= _LEAST and queries.most <= _MOST else None

    def _queries(self, vectors: ArrayLike | Tensor) -> Tensor:
        vectors = as_vectors(vectors).to(self._vectors)
        if vectors.shape[1] != self._vectors.shape[1]:
            raise ValueError(
                f"The vectors are {vectors.shape[1]} wide but the support is {self._vectors.shape[1]} wide: "
                "give vectors from the same adaptor."
            )
        return vectors

    def _excluded_rows(self, exclude: ArrayLike | Tensor | None, vectors: Tensor) -> Tensor:
        """The arranged row each query ignores, -1 for none."""
        if exclude is None:
            return torch.full((len(vectors),), -1, device=vectors.device)
        exclude = integers(exclude, "exclude", vectors)
        if len(exclude) and (int(exclude.min()) < -1 or int(exclude.max()) >= len(self)):
            raise ValueError(f"exclude holds an index outside -1..{len(self) - 1}: give support indices, -1 for none.")
        if not len(self):
            return exclude
        return torch.where(exclude >= 0, self._rows[exclude.clamp(min=0)], -1)


def _slack(vectors: Tensor) -> float:
    """A bound on the rounding errors of two approximate squared distances together, as a share of the squared norms."""
    return float(2 * _SIGMAS * vectors.shape[1] ** 0.5 * torch.finfo(vectors.dtype).eps / 2)


def _nearest_of(spans: tuple[tuple[int, int], ...]) -> Callable[[_Queries], Any]:
    return lambda queries: queries.nearest(*spans)[0]


class _Queries:
    """A batch of queries against the arranged rows of a support: blocked distances and their exact values."""

    def __init__(self, support: SupportSet, vectors: Tensor, excluded: Tensor, dtype: torch.dtype) -> None:
        self.support, self.vectors, self.excluded, self.n = support, vectors, excluded, len(vectors)
        # An exact pair costs about as much as sixty entries of a product in double precision.
        self._pairs_left = math.inf if dtype == torch.float64 else self.n * max(32.0, len(support) / 60)
        near = vectors.to(dtype)
        self.near = near if support._shift is None else near - support._shift.to(dtype)
        norm = self.near.square().sum(dim=1)
        self.norm = norm.double()
        squares = norm + support._largest
        self.slack = _slack(self.near) * squares
        self.in_range = bool(((squares >= _LEAST) & (squares <= _MOST)).all())

    def full(self, value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((self.n,), value, dtype=dtype, device=self.near.device)

    def blocks(self, *spans: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
        """(first arranged row, squared distances (n, rows) less the query's own norm) over the spans.

        The norm of the query is the same along a row: leaving it out saves a pass over the block.
        """
        support = self.support
        # Half of the budget for the block, half for masks and exact distances.
        columns = int(support.memory_mb * 2**20 / (2 * self.near.element_size() * max(1, self.n)))
        columns = min(max(16, columns), _SUPPORT_BLOCK)
        some = bool((self.excluded >= 0).any())
        for first, last in spans:
            for start in range(first, last, columns):
                end = min(start + columns, last)
                rows, norms = support._near[start:end], support._norms[start:end]
                if rows.dtype != self.near.dtype:
                    rows = support._vectors[start:end].to(self.near.dtype)
                    rows = rows if support._shift is None else rows - support._shift.to(rows.dtype)
                    norms = rows.square().sum(dim=1)
                block = torch.addmm(norms, self.near, rows.T, alpha=-2.0)
                if some:
                    hit = ((self.excluded >= start) & (self.excluded < end)).nonzero().squeeze(1)
                    block[hit, self.excluded[hit] - start] = torch.inf
                yield start, block

    def exact(self, row: Tensor, column: Tensor) -> Tensor:
        """Squared distances of (query, arranged row) pairs from their differences, in double precision."""
        twin = self.support._twin
        if twin is not None:  # many equal rows, one distance
            pairs, inverse = torch.unique(row * len(twin) + twin[column], return_inverse=True)
            return self._exact(pairs // len(twin), pairs % len(twin))[inverse]
        return self._exact(row, column)

    def _exact(self, row: Tensor, column: Tensor) -> Tensor:
        self._pairs_left -= len(row)
        if self._pairs_left < 0:
            raise TooClose
        out = torch.empty(len(row), dtype=torch.float64, device=self.near.device)
        step = max(1, int(self.support.memory_mb * 2**20 / (4 * 8 * self.vectors.shape[1])))
        for start in range(0, len(row), step):
            part = slice(start, start + step)
            difference = self.vectors[row[part]].double() - self.support._vectors[column[part]]
            out[part] = difference.square_().sum(dim=1)
        return out

    def nearest(self, *spans: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Exact squared distance to, and the user's index of, the nearest row of the spans; (inf, -1) for none."""
        best = _Nearest(self)
        for start, block in self.blocks(*spans):
            best.update(start, block)
        return best.distance, best.index

    def count_below(self, stop: Tensor, span: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """How many rows of the span lie strictly below `stop` (n,), and the nearest of those up to it as in `nearest`."""
        here = (stop - self.norm).to(self.near.dtype)
        low, high = here - self.slack, here + self.slack
        q = self.full(0, torch.long)
        best = _Nearest(self, here)  # a match beyond the run-ender is not the nearest: no need to know it exactly
        for start, block in self.blocks(span):
            best.update(start, block)
            below = (block < low[:, None]).sum(dim=1)
            q += below
            # Distances so close to the limit that rounding could decide are computed exactly.
            close = ((block <= high[:, None]).sum(dim=1) > below).nonzero().squeeze(1)
            if len(close):
                part = block[close]
                row, column = ((part >= low[close, None]) & (part <= high[close, None])).nonzero(as_tuple=True)
                keep = part[row, column] < torch.inf  # an excluded entry
                row, column = close[row[keep]], column[keep] + start
                q += torch.bincount(row[self.exact(row, column) < stop[row]], minlength=self.n)
        return q, best.distance, best.index

    def smallest(self, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The k nearest rows of each query as (query, rank, exact squared distance, the user's index), flat."""
        row = torch.empty(0, dtype=torch.long, device=self.near.device)
        rank, index, exact = row, row, row.double()
        worst = self.full(torch.inf, self.near.dtype)  # approximate distance that a candidate must not exceed
        for start, block in self.blocks((0, len(self.support))):
            worst = torch.minimum(worst, block.topk(k, largest=False).values[:, -1] if k <= block.shape[1] else worst)
            new, column = ((block <= (worst + self.slack)[:, None]) & (block < torch.inf)).nonzero(as_tuple=True)
            row = torch.cat([row, new])
            exact = torch.cat([exact, self.exact(new, column + start)])
            index = torch.cat([index, self.support._order[column + start]])
            # Three stable sorts, the least significant key first: index, distance, query.
            by = torch.argsort(index, stable=True)
            by = by[torch.argsort(exact[by], stable=True)]
            by = by[torch.argsort(row[by], stable=True)]
            row, exact, index = row[by], exact[by], index[by]
            first = torch.searchsorted(row, torch.arange(self.n, device=row.device))
            rank = torch.arange(len(row), device=row.device) - first[row]
            keep = rank < k
            row, rank, exact, index = row[keep], rank[keep], exact[keep], index[keep]
        return row, rank, exact, index


class _Nearest:
    """The exact nearest row so far, per query; rows beyond `bound` (n,), an approximate distance, are skipped."""

    def __init__(self, queries: _Queries, bound: Tensor | None = None) -> None:
        self.queries = queries
        self.distance = queries.full(torch.inf, torch.float64)
        self.index = queries.full(-1, torch.long)
        self._least = queries.full(torch.inf, queries.near.dtype) if bound is None else bound

    def update(self, start: int, block: Tensor) -> None:
        """Include a block; exact distances are only computed for entries within rounding error of the smallest so far."""
        least = block.amin(dim=1)
        self._least = torch.minimum(self._least, least)
        limit = self._least + self.queries.slack
        rows = ((least <= limit) & (least < torch.inf)).nonzero().squeeze(1)
        part = block if len(rows) == len(block) else block[rows]
        row, column = (part <= limit[rows, None]).nonzero(as_tuple=True)
        row, column = rows[row], column + start
        exact, index = self.queries.exact(row, column), self.queries.support._order[column]
        before = self.distance.clone()
        self.distance.scatter_reduce_(0, row, exact, "amin")
        # Of equal distances the lowest index: drop the index of a larger distance, then take the least.
        none = len(self.queries.support)
        old = torch.where((self.index < 0) | (self.distance < before), none, self.index)
        best = exact == self.distance[row]
        old.scatter_reduce_(0, row[best], index[best], "amin")
        self.index = torch.where(old < none, old, -1)
