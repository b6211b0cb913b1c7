"""An approximate support set on a FAISS index, for supports beyond a million vectors (extra `faiss`).

It is approximate in two ways: the index searches only some of its cells, so neighbours can be missed; and q is capped at the
number of neighbours that it returns. A region must be calibrated with the same index that is used for scoring: the estimator
does so, and saves the index itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sdmlm.estimator.support import SupportMatch, SupportSet

try:
    import faiss
except ImportError as error:
    raise ValueError(
        'index="faiss" needs the faiss package: install the extra faiss (in a clone: pip install -e ".[faiss]").'
    ) from error


class FaissSupportSet(SupportSet):
    """SupportSet with an inverted-file index. `index` is a serialised index; without it, one is built."""

    approximate = True
    default_max_q = 2048  # as in the published code

    def __init__(
        self,
        vectors: ArrayLike | Tensor,
        labels: ArrayLike | Tensor,
        predictions: ArrayLike | Tensor,
        max_q: int | None = None,
        memory_mb: float = 64.0,
        index: Tensor | None = None,
    ) -> None:
        self._given = index
        super().__init__(vectors, labels, predictions, max_q or self.default_max_q, memory_mb)

    def _arrange(self, vectors: Tensor, labels: Tensor, predictions: Tensor) -> None:
        self.labels, self.predictions = labels, predictions
        self._vectors = vectors.float()
        self._order = self._rows = torch.arange(len(vectors), device=vectors.device)
        given, self._given = self._given, None
        if given is not None:
            self._index: Any = faiss.deserialize_index(given.cpu().numpy())
            return
        data = self._vectors.cpu().numpy()
        cells = max(1, min(4 * int(len(data) ** 0.5), len(data) // 39))  # FAISS wants 39 vectors a cell to train on
        flat = faiss.IndexFlatL2(data.shape[1])
        self._index = faiss.IndexIVFFlat(flat, data.shape[1], cells)
        self._index.nprobe = max(8, cells // 8)
        self._index.train(data)
        self._index.add(data)

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "index": torch.from_numpy(faiss.serialize_index(self._index))}

    def query(
        self, vectors: ArrayLike | Tensor, predictions: ArrayLike | Tensor, exclude: ArrayLike | Tensor | None = None
    ) -> SupportMatch:
        """As SupportSet.query, among the points that the index returns."""
        vectors = self._queries(vectors)
        guesses = torch.as_tensor(predictions, device=vectors.device)
        own = None if exclude is None else torch.as_tensor(exclude, device=vectors.device)
        k = min(self.max_q or len(self), len(self))
        # A query needs about a dozen arrays of length k (100 bytes per neighbour): work in parts that fit into memory.
        step = max(1, int(self.memory_mb * 2**20 / (100 * max(1, k))))
        parts = [
            self._query_part(
                vectors[s : s + step], guesses[s : s + step], None if own is None else own[s : s + step], k
            )
            for s in range(0, max(1, len(vectors)), step)
        ]
        return SupportMatch(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def _query_part(
        self, vectors: Tensor, guesses: Tensor, own: Tensor | None, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        distances, indices = self.neighbors(vectors, k, own)
        labels, predicted = self.labels[indices.clamp(min=0)], self.predictions[indices.clamp(min=0)]
        match = (labels == predicted) & (predicted == guesses[:, None]) & (indices >= 0)
        stop = torch.where(match, torch.inf, distances).amin(dim=1, keepdim=True)
        return (match & (distances < stop)).sum(dim=1), distances[:, 0], indices[:, 0]

    def nearest_by_class(
        self, vectors: ArrayLike | Tensor, classes: ArrayLike | Tensor, exclude: ArrayLike | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As SupportSet.nearest_by_class, among the points that the index returns."""
        distances, indices = self.neighbors(vectors, min(self.max_q or len(self), len(self)), exclude)
        labels, predicted = self.labels[indices.clamp(min=0)], self.predictions[indices.clamp(min=0)]
        guesses = torch.as_tensor(classes, device=labels.device)[:, None]
        own = (labels == predicted) & (labels == guesses)
        pair = (torch.where(which, distances, torch.inf).amin(dim=1) for which in (own, ~own))
        return next(pair), next(pair)

    def neighbors(
        self, vectors: ArrayLike | Tensor, k: int, exclude: ArrayLike | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As SupportSet.neighbors, among the points that the index returns; a duplicate is at distance 0 here too."""
        vectors = self._queries(vectors)
        own = self._excluded_rows(exclude, vectors)[:, None]
        squared, rows = self._index.search(np.ascontiguousarray(vectors.cpu().numpy()), min(k + 1, len(self)))
        distances = torch.from_numpy(squared).double().to(vectors.device)
        indices = torch.from_numpy(rows).to(vectors.device)
        distances = torch.where((indices < 0) | (indices == own), torch.inf, distances).clamp(min=0.0).sqrt()
        distances, by = distances.sort(dim=1, stable=True)
        indices = torch.where(distances.isinf(), -1, indices.gather(1, by))
        missing = max(0, k - indices.shape[1])
        distances = torch.nn.functional.pad(distances, (0, missing), value=torch.inf)
        indices = torch.nn.functional.pad(indices, (0, missing), value=-1)
        return distances[:, :k], indices[:, :k]
