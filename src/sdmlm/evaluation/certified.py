"""SDM and its usual rivals under one promise: each gives a score, and the same certificate finds its threshold.

All are fitted on the same points and certified on the same held-out points, so that what they accept can be compared.

Conformal sets (APS, RAPS) have no line of their own. They accept where the set has one class: where the probability of the most
likely class, from which the second one's place in the set follows, exceeds a threshold (for RAPS, one moved by a constant). With a
certified threshold that is the line of the probability itself.
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
from sdmlm.evaluation.vbll import VBLL

Ints = NDArray[np.int64]
Scorer = Callable[[Any], Evidence]
Fit = Callable[[Any], Any]  # (X, y) -> a model with predict and predict_proba

# These need no calibration points: cross-validation gives their out-of-sample scores.
OUT_OF_FOLD: dict[str, tuple[Fit, type[EmbeddingBaseline]]] = {
    "logistic regression": (fit_logistic, LogisticRegressionScore),
    "VBLL": (lambda train: VBLL().fit(*train), LogisticRegressionScore),
    "k-NN distance": (fit_logistic, KNNDistance),
    "Mahalanobis": (fit_logistic, Mahalanobis),
    "relative Mahalanobis": (fit_logistic, RelativeMahalanobis),
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
    n_folds = max(2, min(5, int(np.bincount(y).min())))
    folds = list(StratifiedKFold(n_folds, shuffle=True, random_state=seed).split(X, y))
    fitted: dict[Fit, tuple[Any, list[Any]]] = {}  # the model over all points, and those that leave a fold out
    for name, (fit, kind) in OUT_OF_FOLD.items():
        if fit not in fitted:
            fitted[fit] = fit((X, y)), [fit((X[a], y[a])) for a, _ in folds]
        model, fold_models = fitted[fit]
        scores, predictions = np.empty(len(y)), np.empty(len(y), dtype=np.int64)
        for fold_model, (a, b) in zip(fold_models, folds, strict=True):
            part = _evidence(kind(fold_model, (X[a], y[a])).fit(X[b], y[b]))(X[b])
            scores[b], predictions[b] = part.confidence, part.predictions
        whole = kind(model, (X, y)).fit(X, y)
        methods[name] = Method(Evidence(scores, np.ones(len(y)), predictions, y), _evidence(whole))
    _, fold_models = fitted[fit_logistic]
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
