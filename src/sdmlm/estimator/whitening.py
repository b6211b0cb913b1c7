"""Distance in whitened h: how far a point is in units of the spread within the classes (docs/method.md, 3.4).

The trained exemplar vectors follow the directions that tell classes apart and hardly see others, in which most shifts happen.
Here every direction counts by the spread of the known points of a class along it, with Ledoit-Wolf shrinkage.

A point of an unseen class often lies between known classes: not far from all points, but hardly nearer to those of the class that
is predicted than to others. So the distance to the nearest known point is multiplied by how much farther the nearest
one of the predicted class is than the nearest of another class.
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
        """From points (N, D) with their classes."""
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
