"""Every method under the same certificate, on the same points."""

from __future__ import annotations

import numpy as np
import pytest

from sdmlm import SDMEstimator
from sdmlm.estimator.acceptance import Evidence, certify_rule
from sdmlm.evaluation.certified import Method, rival_methods, sdm_method


def blobs(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return rng.normal(size=(n, 5)) + 2.5 * np.eye(3, 5)[y], y


@pytest.fixture(scope="module")
def methods() -> dict[str, Method]:
    X, y = blobs(500, 0)
    estimator = SDMEstimator(progress=False).fit(X, y, held_out=blobs(400, 1))
    return {"SDM": sdm_method(estimator), **rival_methods(X, y)}


def test_known_evidence_of_the_rivals_is_out_of_sample(methods: dict[str, Method]) -> None:
    """The scores that order the candidates come from models that did not see the point: they differ from the final ones."""
    X, y = blobs(500, 0)
    for name in ("logistic regression", "VBLL", "k-NN distance", "Mahalanobis", "relative Mahalanobis"):
        known, now = methods[name].known, methods[name].score(X)
        assert len(known) == len(X)
        assert not np.allclose(known.confidence, now.confidence)
        assert known.right.mean() <= (now.predictions == y).mean() + 0.02


def test_the_rule_is_the_certificate_over_the_methods_own_evidence(methods: dict[str, Method]) -> None:
    X, y = blobs(400, 1)
    for method in methods.values():
        scored = method.score(X)
        fresh = Evidence(scored.confidence, scored.d, scored.predictions, y)
        by_hand = certify_rule(method.known, fresh, 3, alpha=0.9, delta=0.05, epsilon=method.epsilon)
        assert method.rule(X, y, 3, 0.9) == by_hand
    assert methods["SDM"].rule(X, y, 3, 0.9).certified
    assert methods["logistic regression"].rule(X, y, 3, 0.9).certified


def test_without_held_out_points_nothing_is_accepted(methods: dict[str, Method]) -> None:
    rule = methods["logistic regression"].rule(np.empty((0, 5)), np.empty(0, dtype=np.int64), 3, 0.9)
    assert not rule.certified
    assert not rule.accepts(methods["logistic regression"].score(blobs(50, 2)[0])).any()


def test_only_sdm_gives_up_points_for_its_distance(methods: dict[str, Method]) -> None:
    assert methods["SDM"].epsilon == 0.05
    assert all(method.epsilon == 0 for name, method in methods.items() if name != "SDM")
