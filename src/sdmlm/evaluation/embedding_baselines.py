"""The usual rivals over embeddings: a calibrated logistic regression, and distances to the training points.

The interface is that of `baselines`: `fit(X, y)` on CALIBRATION points, `accept(X)` and `score(X)`. All predict by one
logistic regression over standardised columns, fitted on the training points (`fit_logistic`). They differ in the score.

- `LogisticRegressionScore`: its largest probability.
- `TemperatureScore`, `PlattScore`, `IsotonicScore`: the same after temperature scaling (Guo et al. 2017), Platt's sigmoid
  or isotonic regression. They are calibrated probabilities, so they accept what reaches alpha.
- `KNNDistance`: minus the distance to the k-th nearest training point, of unit length (Sun et al. 2022).
- `Mahalanobis`: minus the smallest squared Mahalanobis distance to a class mean, with one covariance for all classes
  (Lee et al. 2018); Ledoit-Wolf's estimate, so that it exists with few points.
- `RelativeMahalanobis`: the same minus the distance to the mean of all points (Ren et al. 2021).

The scores that are no probabilities, and that of `LogisticRegressionScore`, accept a point if it reaches the lowest threshold
at which at least a share alpha of the accepted calibration points is right. This is the usual practice, without a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.covariance import LedoitWolf
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from sdmlm.estimator.region import check_alpha
from sdmlm.evaluation.baselines import Decisions, Floats, Labelled, TemperatureScaling
from sdmlm.evaluation.metrics import threshold_at_accuracy


def fit_logistic(train: Labelled) -> Pipeline:
    """A logistic regression over standardised columns."""
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    return model.fit(np.asarray(train[0], dtype=np.float64), np.asarray(train[1]))


class EmbeddingBaseline:
    """Base class of the rivals: predictions of the logistic regression, and a threshold on the score.

    Parameters
    ----------
    model : the logistic regression, fitted on the training points.
    train : the training points (X, y).
    alpha : the accuracy wanted among the accepted.
    """

    def __init__(self, model: Pipeline, train: Labelled, alpha: float = 0.95) -> None:
        self.model, self.alpha = model, alpha
        self.X_train, self.y_train = np.asarray(train[0], dtype=np.float64), np.asarray(train[1])

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Calibrate on points that the logistic regression was not trained on."""
        check_alpha(self.alpha)
        points, labels = np.asarray(X, dtype=np.float64), np.asarray(y)
        self._calibrate(points, labels)
        correct = self.model.predict(points) == labels
        self.threshold_ = threshold_at_accuracy(self.score(points), correct, self.alpha)
        return self

    def accept(self, X: ArrayLike) -> Decisions:
        """(predictions, accepted) of embeddings (N, D)."""
        if not hasattr(self, "threshold_"):
            raise ValueError(f"This {type(self).__name__} is not fitted yet: call fit with calibration points.")
        points = np.asarray(X, dtype=np.float64)
        return np.asarray(self.model.predict(points)), self.score(points) >= self.threshold_

    def score(self, X: ArrayLike) -> Floats:
        """One score per point, higher means more trustworthy."""
        raise NotImplementedError

    def _calibrate(self, X: Floats, y: NDArray[Any]) -> None:
        """Learn from calibration points; the default learns nothing."""


class LogisticRegressionScore(EmbeddingBaseline):
    """The largest probability of the logistic regression."""

    def score(self, X: ArrayLike) -> Floats:
        return np.asarray(self.model.predict_proba(np.asarray(X, dtype=np.float64)).max(axis=1))


class ProbabilityScore(EmbeddingBaseline):
    """Base class of the calibrated probabilities: they accept where the probability is at least alpha."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        super().fit(X, y)
        self.threshold_ = self.alpha
        return self


class TemperatureScore(ProbabilityScore):
    """The largest probability after temperature scaling of its log-probabilities."""

    def _calibrate(self, X: Floats, y: NDArray[Any]) -> None:
        classes = np.searchsorted(self.model.classes_, y)
        self._scaling = TemperatureScaling(self.alpha).fit(self._logits(X), classes)

    def score(self, X: ArrayLike) -> Floats:
        return self._scaling.score(self._logits(X))

    def _logits(self, X: ArrayLike) -> Floats:
        return np.asarray(np.log(np.clip(self.model.predict_proba(np.asarray(X, dtype=np.float64)), 1e-300, 1.0)))


class PlattScore(ProbabilityScore):
    """P(right | largest probability), by a logistic regression on the log-odds of that probability (Platt 1999)."""

    def _calibrate(self, X: Floats, y: NDArray[Any]) -> None:
        self._chance = self._fit_chance(self._confidence(X), self.model.predict(X) == y)

    def score(self, X: ArrayLike) -> Floats:
        return self._chance(self._confidence(X))

    def _confidence(self, X: ArrayLike) -> Floats:
        return np.asarray(self.model.predict_proba(np.asarray(X, dtype=np.float64)).max(axis=1))

    def _fit_chance(self, confidence: Floats, right: NDArray[np.bool_]) -> Callable[[Floats], Floats]:
        if right.all() or not right.any():  # nothing to regress on
            return lambda values: np.full(len(values), float(right[0]))
        sigmoid = LogisticRegression(C=1e6).fit(_log_odds(confidence), right)
        return lambda values: np.asarray(sigmoid.predict_proba(_log_odds(values))[:, 1])


class IsotonicScore(PlattScore):
    """P(right | largest probability), by isotonic regression (Zadrozny and Elkan 2002)."""

    def _fit_chance(self, confidence: Floats, right: NDArray[np.bool_]) -> Callable[[Floats], Floats]:
        steps = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(confidence, right)
        return lambda values: np.asarray(steps.predict(values))


class KNNDistance(EmbeddingBaseline):
    """Minus the distance to the k-th nearest training point, after scaling every point to length 1."""

    def __init__(self, model: Pipeline, train: Labelled, alpha: float = 0.95, k: int = 10) -> None:
        super().__init__(model, train, alpha)
        self._neighbors = NearestNeighbors(n_neighbors=min(k, len(self.X_train))).fit(_unit(self.X_train))

    def score(self, X: ArrayLike) -> Floats:
        distances, _ = self._neighbors.kneighbors(_unit(np.asarray(X, dtype=np.float64)))
        return np.asarray(-distances[:, -1])


class Mahalanobis(EmbeddingBaseline):
    """Minus the smallest squared Mahalanobis distance to the mean of a class."""

    def __init__(self, model: Pipeline, train: Labelled, alpha: float = 0.95) -> None:
        super().__init__(model, train, alpha)
        classes, where = np.unique(self.y_train, return_inverse=True)
        self._means = np.stack([self.X_train[where == c].mean(axis=0) for c in range(len(classes))])
        self._precision = LedoitWolf(assume_centered=True).fit(self.X_train - self._means[where]).precision_

    def score(self, X: ArrayLike) -> Floats:
        points = np.asarray(X, dtype=np.float64)
        distances = np.stack([_squared(points - mean, self._precision) for mean in self._means])
        return np.asarray(-distances.min(axis=0))


class RelativeMahalanobis(Mahalanobis):
    """The Mahalanobis score plus the squared distance to the mean of all training points, whatever their class."""

    def __init__(self, model: Pipeline, train: Labelled, alpha: float = 0.95) -> None:
        super().__init__(model, train, alpha)
        self._background = LedoitWolf().fit(self.X_train)

    def score(self, X: ArrayLike) -> Floats:
        points = np.asarray(X, dtype=np.float64)
        background = _squared(points - self._background.location_, self._background.precision_)
        return np.asarray(super().score(points) + background)


def embedding_baselines(train: Labelled, alpha: float) -> dict[str, EmbeddingBaseline]:
    """All of them by the name in the table, not yet calibrated, over one logistic regression."""
    model = fit_logistic(train)
    kinds: dict[str, type[EmbeddingBaseline]] = {
        "logistic regression": LogisticRegressionScore,
        "temperature": TemperatureScore,
        "Platt": PlattScore,
        "isotonic": IsotonicScore,
        "k-NN distance": KNNDistance,
        "Mahalanobis": Mahalanobis,
        "relative Mahalanobis": RelativeMahalanobis,
    }
    return {name: kind(model, train, alpha) for name, kind in kinds.items()}


def _log_odds(p: Floats) -> Floats:
    inside = np.clip(p, 1e-12, 1 - 1e-12)
    return np.asarray(np.log(inside / (1 - inside))[:, None])


def _unit(X: Floats) -> Floats:
    return np.asarray(X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), math.ulp(1.0)))


def _squared(differences: Floats, precision: Floats) -> Floats:
    return np.asarray(((differences @ precision) * differences).sum(axis=1))
