"""SDM and its usual rivals under one promise: each gives a score, and the same certificate finds its threshold.

All are fitted on the same points and certified on the same held-out points, so that what they accept can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold

from sdmlm.estimator.acceptance import CertifiedRule, Evidence, Promise, certify_rule
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.evaluation.embedding_baselines import (
    EmbeddingBaseline,
    IsotonicScore,
    KNNDistance,
    LogisticRegressionScore,
    Mahalanobis,
    PlattScore,
    RelativeMahalanobis,
    TemperatureScore,
    fit_logistic,
)

Ints = NDArray[np.int64]
Scorer = Callable[[Any], Evidence]

# These need no calibration points: cross-validation gives their out-of-sample scores.
OUT_OF_FOLD: dict[str, type[EmbeddingBaseline]] = {
    "logistic regression": LogisticRegressionScore,
    "k-NN distance": KNNDistance,
    "Mahalanobis": Mahalanobis,
    "relative Mahalanobis": RelativeMahalanobis,
}
# The others keep a fifth of the points to calibrate on.
CALIBRATED: dict[str, type[EmbeddingBaseline]] = {
    "temperature": TemperatureScore,
    "Platt": PlattScore,
    "isotonic": IsotonicScore,
}


@dataclass(frozen=True)
class Method:
    """A fitted method: out-of-sample evidence of points it was fitted over, and a function for new points.

    `epsilon` is the share of known points that may be rejected for their Distance, so that shifted points are rejected too.
    The rivals have no Distance, so theirs is 0.
    """

    known: Evidence
    score: Scorer
    epsilon: float = 0.0

    def rule(
        self, X: Any, y: Ints, n_classes: int, alpha: float, delta: float = 0.05, promise: Promise = "overall"
    ) -> CertifiedRule:
        """The certified rule from held-out points (X, y); with no such points it accepts nothing."""
        fresh = Evidence(np.empty(0), np.empty(0), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        if len(X):
            scored = self.score(X)
            fresh = Evidence(scored.confidence, scored.d, scored.predictions, y)
        settings: dict[str, Any] = {"alpha": alpha, "delta": delta, "promise": promise, "epsilon": self.epsilon}
        return certify_rule(self.known, fresh, n_classes, **settings)


def sdm_method(estimator: SDMEstimator) -> Method:
    """A fitted SDM estimator as one of the methods."""

    def score(X: Any) -> Evidence:
        scores = estimator.score(X)
        return Evidence(scores.confidence, scores.d, scores.prediction)

    return Method(estimator.calibration_evidence(), score, estimator.epsilon)


def rival_methods(X: Any, y: Ints, seed: int = 0) -> dict[str, Method]:
    """Each rival, fitted on points X with labels y in 0..C-1."""
    methods: dict[str, Method] = {}
    model = fit_logistic((X, y))
    n_folds = max(2, min(5, int(np.bincount(y).min())))
    folds = list(StratifiedKFold(n_folds, shuffle=True, random_state=seed).split(X, y))
    fold_models = [fit_logistic((X[a], y[a])) for a, _ in folds]
    for name, kind in OUT_OF_FOLD.items():
        scores, predictions = np.empty(len(y)), np.empty(len(y), dtype=np.int64)
        for fold_model, (a, b) in zip(fold_models, folds, strict=True):
            part = _evidence(kind(fold_model, (X[a], y[a])).fit(X[b], y[b]))(X[b])
            scores[b], predictions[b] = part.confidence, part.predictions
        whole = kind(model, (X, y)).fit(X, y)
        methods[name] = Method(Evidence(scores, np.ones(len(y)), predictions, y), _evidence(whole))
    a, b = folds[0]
    for name, kind in CALIBRATED.items():
        score = _evidence(kind(fold_models[0], (X[a], y[a])).fit(X[b], y[b]))
        known = score(X[b])
        methods[name] = Method(Evidence(known.confidence, known.d, known.predictions, y[b]), score)
    return methods


def _evidence(baseline: EmbeddingBaseline) -> Scorer:
    def score(X: Any) -> Evidence:
        predictions = np.asarray(baseline.accept(X)[0])
        return Evidence(np.asarray(baseline.score(X), dtype=np.float64), np.ones(len(predictions)), predictions)

    return score
