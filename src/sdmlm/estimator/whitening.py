"""Distance in whitened h: how far a point is in units of the spread within the classes (docs/method.md, 3.4).

The trained exemplar vectors mainly show the directions that distinguish the classes, but most shifts happen in other directions.
Whitening divides each direction by the spread of the points within a class along it, with Ledoit-Wolf shrinkage of the covariance.

A point of an unseen class often lies between known classes: not far from every point, but hardly nearer to the predicted class than
to others. So the distance to the nearest known point is multiplied by a ratio: the distance to the nearest point of the predicted
class over the distance to the nearest other point.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.covariance import LedoitWolf
from torch import Tensor

from sdmlm.estimator.activation import full_precision
from sdmlm.estimator.adaptor import standardization
from sdmlm.estimator.convex import principal_components


@dataclass(frozen=True)
class Whitening:
    """An affine map after which the points of a class have unit spread in every direction."""

    mean: Tensor  # (D,)
    matrix: Tensor  # (D, K)

    @classmethod
    def fit(cls, x: Tensor, labels: Tensor) -> Whitening:
        """Compute the map from points (N, D) with their classes."""
        mean, std = standardization(x, "feature")
        points, y = ((x - mean) / std).cpu().double().numpy(), labels.cpu().numpy()
        axes = principal_components(points)
        points = points @ axes.T
        for c in np.unique(y):
            points[y == c] -= points[y == c].mean(axis=0)
        variances, directions = np.linalg.eigh(LedoitWolf(assume_centered=True).fit(points).covariance_)
        scaled = directions / np.sqrt(np.maximum(variances, 1e-6 * max(float(variances.max()), 1e-12)))
        matrix = (axes.T @ scaled) / std.cpu().double().numpy()[:, None]
        return cls(mean, torch.from_numpy(matrix).to(x.device, torch.float32))

    @full_precision()
    def __call__(self, x: Tensor) -> Tensor:
        """Whitened vectors (N, K) of raw ones (N, D)."""
        return (x - self.mean) @ self.matrix


def relative_distance(own: Tensor, other: Tensor) -> Tensor:
    """min(own, other) * own / other, from the distances to the nearest points of the predicted class and of others.

    0 at a point of the predicted class; infinite where there is none, or at a point of another class.
    """
    product = torch.minimum(own, other) * own / other
    product = torch.where(torch.isinf(own) | (other == 0), torch.inf, product)
    return torch.where(own == 0, 0.0, product)
