"""The vectors, labels and predictions that a support is made of: checks, and the search for equal rows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

_BLOCK = 4096  # rows compared at a time


def as_vectors(values: ArrayLike | Tensor) -> Tensor:
    """A contiguous (N, M) tensor of finite float32 (float64 stays float64)."""
    vectors = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    if vectors.ndim != 2:
        raise ValueError(f"Expected a matrix of vectors (N, M), got shape {tuple(vectors.shape)}.")
    if vectors.dtype not in (torch.float32, torch.float64):
        vectors = vectors.float()
    # A sum is finite if all is (or it overflows: then look closely), and costs far less than a mask of all entries.
    if not bool(vectors.sum().isfinite()) and not bool(torch.isfinite(vectors).all()):
        raise ValueError("The vectors contain NaN or infinite values: remove or repair those rows.")
    return vectors.detach().contiguous()


def checked_labels(
    vectors: Tensor, labels: ArrayLike | Tensor, predictions: ArrayLike | Tensor
) -> tuple[Tensor, Tensor]:
    labels, predictions = integers(labels, "labels", vectors), integers(predictions, "predictions", vectors)
    if len(predictions) and int(predictions.min()) < 0:
        raise ValueError("predictions holds a negative class: predictions are class indices 0..C-1.")
    return labels, predictions


def integers(values: ArrayLike | Tensor, name: str, vectors: Tensor) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    if tensor.numel() and tensor.is_floating_point():
        raise ValueError(f"{name} must hold integers, got {tensor.dtype}.")
    if tensor.shape != (len(vectors),):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} but there are {len(vectors)} vectors.")
    return tensor.to(device=vectors.device, dtype=torch.long)


def equal_rows(vectors: Tensor, norms: Tensor) -> Tensor | None:
    """For each row the index of an equal row, or its own; None if no equal rows are found.

    Equal rows have equal norms, so only neighbours in the order of the norms are compared, which is cheap. A duplicate is
    missed if a different row of the same norm lies between: this costs time, but does not change results.
    """
    order = torch.argsort(norms, stable=True)
    after, before = order[1:], order[:-1]
    again = norms[after] == norms[before]
    maybe = again.nonzero().squeeze(1)
    for part in maybe.split(_BLOCK):
        again[part] = (vectors[after[part]] == vectors[before[part]]).all(dim=1)
    if not bool(again.any()):
        return None
    new = torch.cat([again.new_ones(1), ~again])  # the first of its kind in the order
    twin = torch.empty_like(order)
    twin[order] = order[new][torch.cumsum(new, 0) - 1]
    return twin
