"""The scores that are compared on answers of a language model."""

from __future__ import annotations

import numpy as np
import pytest

from sdmlm.evaluation.metrics import auroc
from sdmlm.experiments.answer_rivals import (
    CONSISTENCY,
    FITTED_BOTH,
    FITTED_STATES,
    OWN_LAYER,
    PROBE,
    JudgedSet,
    rivals,
    with_usual,
)


def answers(seed: int, n: int = 300, length: float = 9.0) -> JudgedSet:
    """The likelihood tells much about whether an answer is right, the first of 24 states a little."""
    rng = np.random.default_rng(seed)
    right = rng.random(n) < 0.8
    summed = -np.exp(rng.normal(np.where(right, -1.0, 1.0), 1.0))
    states = rng.normal(size=(n, 24))
    states[:, 0] += right
    lengths = length + rng.integers(0, 3, n)
    figures = np.stack([summed / lengths, summed / 2, summed, rng.normal(size=n), lengths], axis=1)
    nothing = np.zeros(n, dtype=bool)
    return JudgedSet(
        right, np.concatenate([states, figures], axis=1), rng.normal(size=n), nothing, nothing, rng.random(n)
    )


def test_every_rival_scores_answers_it_was_not_fitted_on() -> None:
    fitted, fresh = answers(0), answers(1, 1000)
    methods = rivals(fitted)
    found = {name: auroc(method.score(fresh).confidence, fresh.right) for name, method in methods.items()}
    assert set(found) >= {CONSISTENCY, PROBE, FITTED_STATES, FITTED_BOTH, OWN_LAYER}
    best = found["summed log-probability"]
    assert best > 0.85
    assert found[FITTED_BOTH] > best - 0.03  # the figures are not lost beside the states
    assert 0.6 < found[FITTED_STATES] < 0.85
    assert found[OWN_LAYER] == pytest.approx(0.5, abs=0.06)  # random here
    for method in methods.values():
        assert len(method.known.confidence) == len(fitted)


def test_what_is_known_of_a_refitted_layer_is_out_of_sample_and_in_order() -> None:
    fitted, fresh = answers(0), answers(1, 1000)
    method = rivals(fitted)[FITTED_BOTH]
    known = auroc(method.known.confidence, fitted.right)
    assert known == pytest.approx(auroc(method.score(fresh).confidence, fresh.right), abs=0.06)


def test_too_few_errors_leave_out_what_has_to_be_fitted() -> None:
    fitted = answers(0, 40)
    rightly = fitted.part(np.flatnonzero(fitted.right))
    assert not {PROBE, FITTED_STATES, FITTED_BOTH} & set(rivals(rightly))


def test_the_bound_on_unusual_likelihood_rejects_another_kind_of_answers() -> None:
    fitted, fresh, longer = answers(0), answers(1, 1000), answers(2, 1000, length=40.0)
    method = with_usual(rivals(fitted)["mean log-probability"], fitted, epsilon=0.1)
    rule = method.rule(fresh, fresh.right.astype(np.int64), 2, alpha=0.9)
    assert rule.accepts(method.score(fresh)).mean() > 0.6
    assert rule.accepts(method.score(longer)).mean() < 0.02
