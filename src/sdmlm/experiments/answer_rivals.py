"""Scores that may distinguish right from wrong answers of a language model: likelihoods, a probe and SDM layers.

Each is an `evaluation.certified.Method`, so that all are certified in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sdmlm.estimator.acceptance import Evidence
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.scores import Scores
from sdmlm.evaluation.certified import Method
from sdmlm.language_model.likelihood import FIGURES
from sdmlm.language_model.reduction import Reduction
from sdmlm.language_model.usual import UsualLikelihood

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
LEAST_WRONG = 5  # for a probe; twice as many for an SDM layer
LIKELIHOODS = {
    "mean log-probability": "mean_log_probability",
    "least log-probability": "least_log_probability",
    "summed log-probability": "summed_log_probability",
    "P(Yes) of the LM": "yes_minus_no",
}
CONSISTENCY = "self-consistency"
PROBE = "linear probe on the states"
OWN_LAYER = "SDM layer of the model"
FITTED_STATES, FITTED_BOTH = "SDM refitted on states", "SDM refitted, with likelihood"
USUAL = ", if usual"  # with the bound on unusual likelihood


@dataclass(frozen=True)
class JudgedSet:
    """Answers with the input of every score."""

    right: Mask
    h: Floats  # the whole summary "states+likelihood", whatever the SDM layer reads
    score: Floats  # of the SDM layer, as `signed_confidence`
    verified: Mask
    in_region: Mask
    agreement: Floats | None  # share of sampled answers that equal the greedy one

    def __len__(self) -> int:
        return len(self.right)

    @property
    def states(self) -> Floats:
        """The summary "states": the state at the tag and the mean of all states."""
        return self.h[:, : 2 * ((self.h.shape[1] - len(FIGURES)) // 3)]

    def figure(self, name: str) -> Floats:
        """A likelihood figure by its name."""
        return np.asarray(self.h[:, FIGURES.index(name) - len(FIGURES)])

    def part(self, index: NDArray[Any]) -> JudgedSet:
        """Some of the answers."""
        agreement = None if self.agreement is None else self.agreement[index]
        decided = self.verified[index], self.in_region[index]
        return JudgedSet(self.right[index], self.h[index], self.score[index], *decided, agreement)


def signed_confidence(scores: Scores) -> Floats:
    """log(2 + q) (z'_Yes - z'_No): the confidence of the SDM layer, from surely wrong to surely right."""
    return np.asarray(np.log(2.0 + scores.q) * (scores.z[:, 1] - scores.z[:, 0]))


def rivals(fitted: JudgedSet, seed: int = 0) -> dict[str, Method]:
    """Every score by name, fitted on answers that are not compared."""
    methods = {name: _plain(fitted, _figure(figure)) for name, figure in LIKELIHOODS.items()}
    if fitted.agreement is not None:
        methods[CONSISTENCY] = _plain(fitted, lambda answers: np.asarray(answers.agreement))
    wrong = int(min(fitted.right.sum(), (~fitted.right).sum()))
    if wrong >= LEAST_WRONG:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
        probe.fit(fitted.states, fitted.right)
        methods[PROBE] = _plain(fitted, lambda answers: np.asarray(probe.decision_function(answers.states)))
    if wrong >= 2 * LEAST_WRONG:
        reduction = Reduction.fit(_tensor(fitted.h))
        methods[FITTED_STATES] = _sdm(fitted, lambda answers: _tensor(answers.states), seed)
        methods[FITTED_BOTH] = _sdm(fitted, lambda answers: reduction(_tensor(answers.h)), seed)
    methods[OWN_LAYER] = _plain(fitted, lambda answers: answers.score)
    return methods


def with_usual(method: Method, fitted: JudgedSet, epsilon: float) -> Method:
    """The same score, with the bound on unusual likelihood that the model's own rule has."""
    usual = UsualLikelihood.fit(fitted.h)

    def distance(answers: JudgedSet) -> Floats:
        return usual.d(answers.h)

    return Method(
        replace(method.known, d=distance(fitted)),
        lambda answers: replace(method.score(answers), d=distance(answers)),
        epsilon,
    )


def _figure(name: str) -> Callable[[JudgedSet], Floats]:
    return lambda answers: answers.figure(name)


def _tensor(values: Floats) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values)).float()


def _plain(fitted: JudgedSet, score: Callable[[JudgedSet], Floats]) -> Method:
    """A score that all answers have, whatever an SDM layer predicts."""
    return Method(_evidence(score(fitted), fitted.right), lambda answers: _evidence(score(answers)))


def _evidence(score: Floats, right: Mask | None = None) -> Evidence:
    ones = np.ones(len(score))
    return Evidence(score, ones, ones.astype(np.int64), None if right is None else right.astype(np.int64))


def _sdm(fitted: JudgedSet, read: Callable[[JudgedSet], torch.Tensor], seed: int) -> Method:
    """An SDM layer fitted on the answers; what is known of these is out of sample."""
    estimator = SDMEstimator(rule="region", seed=seed, progress=False).fit(read(fitted), fitted.right.astype(np.int64))
    ca = estimator.calibration_
    known = (torch.log(2.0 + ca.q.double()) * (ca.z[:, 1] - ca.z[:, 0])).numpy()
    order = np.argsort(estimator.calibration_ids_)
    return Method(
        _evidence(known[order], fitted.right),
        lambda answers: _evidence(signed_confidence(estimator.score(read(answers)))),
    )
