"""An exemplar adaptor without a learning rate: the exact minimum of the first epoch's loss (docs/method.md, 3.4).

In the first epoch of training q = e-2 and d = 1, so the SDM loss is cross-entropy, and z' is affine in h: the loss is convex.
L-BFGS finds its minimum with an L2 penalty. The exemplar vector h' holds the class scores z' and the standardised input, so
neighbours are similar in both: h' = [z' / scale; h / sqrt(D)].

Further epochs with q and d were tried and did not help (docs/log.md, 2026-11-18).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from sdmlm.estimator.adaptor import ExemplarAdaptor, standardization

Floats = NDArray[np.float64]
Split = tuple[Tensor, Tensor]  # (x (N, D), y (N,))

INVERSE_PENALTIES = (0.001, 0.01, 0.1, 1.0, 10.0)
MAX_COMPONENTS = 384  # of a wider input, h' has the first principal components
_ITERATIONS = 300


def choose_penalty(splits: Sequence[tuple[Split, Split]], n_classes: int) -> float:
    """The inverse L2 penalty with the lowest balanced cross-entropy over (training split, calibration split) pairs."""
    losses = np.zeros(len(INVERSE_PENALTIES))
    for train, calibration in splits:
        mean, std = standardization(train[0], "feature")
        x, x_ca = (_doubles((split[0] - mean) / std) for split in (train, calibration))
        y, y_ca = train[1].cpu().numpy(), calibration[1].cpu().numpy()
        for i, inverse_penalty in enumerate(INVERSE_PENALTIES):
            weight, bias = _minimum(x, y, n_classes, inverse_penalty)
            losses[i] += _balanced_cross_entropy(x_ca @ weight.T + bias, y_ca, n_classes)
    return INVERSE_PENALTIES[int(np.argmin(losses))]


def convex_adaptor(train: Split, n_classes: int, inverse_penalty: float) -> ExemplarAdaptor:
    """The adaptor whose z' is the penalised cross-entropy solution on the training split."""
    mean, std = standardization(train[0], "feature")
    x, y = (train[0] - mean) / std, train[1].cpu().numpy()
    doubles = _doubles(x)
    weight, bias = _minimum(doubles, y, n_classes, inverse_penalty)
    z = doubles @ weight.T + bias
    scale = max(float(np.sqrt(np.square(z - z.mean(axis=0)).sum(axis=1).mean())), 1e-12)
    parts = [weight / scale, principal_components(doubles) / math.sqrt(x.shape[1])]
    exemplar = np.concatenate(parts)
    out = np.zeros((n_classes, len(exemplar)))
    out[:, :n_classes] = scale * np.eye(n_classes)
    offset = np.concatenate([bias / scale, np.zeros(len(exemplar) - n_classes)])

    def tensor(values: Floats) -> Tensor:
        return torch.from_numpy(values).to(x.device, torch.float32)

    return ExemplarAdaptor(mean, std, tensor(exemplar), tensor(offset), tensor(out), tensor(np.zeros(n_classes)))


def principal_components(x: Floats, most: int = MAX_COMPONENTS) -> Floats:
    """Directions (K, D) that keep the distances between rows of x: all axes, or the `most` principal components."""
    n, width = x.shape
    if width <= most:
        return np.eye(width)
    centred = x - x.mean(axis=0)
    if n <= width:  # through the smaller of the two Gram matrices
        values, vectors = np.linalg.eigh(centred @ centred.T)
        keep = np.argsort(values)[::-1][: min(most, n)]
        keep = keep[values[keep] > 1e-10 * values.max()]
        components: Floats = (vectors[:, keep] / np.sqrt(values[keep])).T @ centred
        return components
    values, vectors = np.linalg.eigh(centred.T @ centred)
    return np.ascontiguousarray(vectors[:, np.argsort(values)[::-1][:most]].T)


def _minimum(x: Floats, y: NDArray[np.int64], n_classes: int, inverse_penalty: float) -> tuple[Floats, Floats]:
    """(weights (C, D), biases (C,)) of penalised multinomial logistic regression."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a point near the minimum is good enough
        model = LogisticRegression(C=inverse_penalty, max_iter=_ITERATIONS).fit(x, y)
    weight, bias = model.coef_, model.intercept_
    if len(weight) == 1:  # two classes: one score, split between them
        weight, bias = np.concatenate([-weight / 2, weight / 2]), np.concatenate([-bias / 2, bias / 2])
    assert len(weight) == n_classes
    return weight, bias


def _balanced_cross_entropy(z: Floats, y: NDArray[np.int64], n_classes: int) -> float:
    largest = z.max(axis=1, keepdims=True)
    losses = np.log(np.exp(z - largest).sum(axis=1)) + largest[:, 0] - z[np.arange(len(y)), y]
    return float(np.mean([losses[y == c].mean() for c in range(n_classes) if (y == c).any()]))


def _doubles(x: Tensor) -> Floats:
    return np.asarray(x.cpu().double().numpy())
