"""A variational Bayesian last layer (VBLL; Harrison, Willes and Snoek 2024), for comparison, over fixed embeddings.

The weights of a linear layer over standardised columns get a Gaussian posterior with independent entries, N(M, V), under the prior
N(0, 1). It maximises the paper's lower bound on the evidence, in which Jensen's inequality takes the expectation inside the
log-sum-exp (phi: a point with a 1 appended):

    sum_n [ (M phi_n)_y - log sum_c exp( (M phi_n)_c + v_nc / 2 ) ] - KL,    v_nc = sum_j V_cj phi_nj^2

A prediction averages over the posterior by the usual approximation softmax(M phi / sqrt(1 + pi v / 8)). Far from the training
points v is large, so the probabilities become more equal.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.preprocessing import StandardScaler
from torch import Tensor

Floats = NDArray[np.float64]

_STEPS = 100  # of L-BFGS


class VBLL:
    """Predictions and probabilities of a variational Bayesian last layer; the same interface as scikit-learn's."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> VBLL:
        """Maximise the bound over points X (N, D) with labels y (N,)."""
        points = np.asarray(X, dtype=np.float64)
        self.classes_, where = np.unique(np.asarray(y), return_inverse=True)
        self._scaler = StandardScaler().fit(points)
        phi, labels = self._features(points), torch.from_numpy(where)
        n_classes, width = len(self.classes_), phi.shape[1]
        self.mean_ = torch.zeros(n_classes, width, dtype=torch.float64, requires_grad=True)
        self.log_variance_ = torch.full(
            (n_classes, width), -math.log(len(phi)), dtype=torch.float64, requires_grad=True
        )
        optimizer = torch.optim.LBFGS([self.mean_, self.log_variance_], max_iter=_STEPS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = -lower_bound(phi, labels, self.mean_, self.log_variance_) / len(phi)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(loss)  # type: ignore[no-untyped-call]
        self.mean_, self.log_variance_ = self.mean_.detach(), self.log_variance_.detach()
        return self

    def predict_proba(self, X: ArrayLike) -> Floats:
        """Probabilities of the classes, (N, C), averaged over the posterior."""
        phi = self._features(np.asarray(X, dtype=np.float64))
        spread = phi.square() @ self.log_variance_.exp().T
        logits = phi @ self.mean_.T / torch.sqrt(1.0 + math.pi / 8.0 * spread)
        return np.asarray(torch.softmax(logits, dim=1).numpy())

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:
        """The most likely class of each point."""
        return np.asarray(self.classes_[self.predict_proba(X).argmax(axis=1)])

    def _features(self, X: Floats) -> Tensor:
        scaled = torch.from_numpy(np.asarray(self._scaler.transform(X)))
        return torch.cat([scaled, torch.ones(len(scaled), 1, dtype=torch.float64)], dim=1)


def lower_bound(phi: Tensor, labels: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """The bound on the log evidence of all points together."""
    variance = log_variance.exp()
    logits, spread = phi @ mean.T, phi.square() @ variance.T
    fit = logits.gather(1, labels[:, None]).squeeze(1) - torch.logsumexp(logits + spread / 2, dim=1)
    divergence = 0.5 * (mean.square() + variance - 1.0 - log_variance).sum()
    return fit.sum() - divergence
