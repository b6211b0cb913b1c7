"""The reason for a decision, and its numbers."""

import math
from types import SimpleNamespace

import pytest
from estimator_checks import blobs

from sdmlm.estimator.explain import reason
from sdmlm.estimator.region import HighReliabilityRegion


def test_a_reason_names_the_condition_that_failed():
    """Each cause by hand, on points of every sort."""
    region = HighReliabilityRegion(0.8, 4.0, (0.8, 0.9))
    nothing = HighReliabilityRegion(0.8, math.inf, (math.inf, math.inf))
    only_one = HighReliabilityRegion(0.8, 4.0, (math.inf, 0.9))
    points = [  # region, q, q', p of the predicted class 0, whether accepted, what the sentence must say
        (region, 9, 5.0, 0.85, True, "Accepted as class 0 at alpha 0.8: the 9 most similar"),
        (region, 0, 0.0, 0.6, False, "out of distribution"),
        (nothing, 9, 5.0, 0.95, False, "no high-reliability region"),
        (region, 9, 3.99, 0.95, False, "gives q' 3.99, below the 4"),
        (only_one, 9, 5.0, 0.99, False, "no verdict class 0 is accepted"),
        (region, 9, 4.0, 0.79, False, "0.7900 for class 0 is below its threshold psi 0.8000"),
        (region, 9, 4.0, 0.8, False, "another class also reaches its threshold"),
    ]
    said = [text for *_, text in points]
    for where, q, q_prime, p, accepted, text in points:
        found = SimpleNamespace(prediction=[0], q=[q], q_prime=[q_prime], d=[0.5], probability=[p], accepted=[accepted])
        assert [t for t in said if t in reason(found, 0, where)] == [text]


def test_explanations_tell_the_truth(fitted):
    new, _ = blobs(60, seed=4)
    new[:5] *= 20
    scores = fitted.score(new)
    layer = fitted.layers_[0]
    seen = set()
    for i, explanation in enumerate(fitted.explain(new, k=3)):
        seen.add(explanation.decision)
        assert (explanation.decision == "accepted") == scores.accepted[i]
        assert (explanation.decision == "out of distribution") == scores.out_of_distribution[i]
        assert explanation.reason.startswith("Accepted" if scores.accepted[i] else "Rejected")
        nearest = explanation.exemplars[0]
        assert nearest.id == layer.support_ids[scores.nearest[i]]
        assert nearest.distance == pytest.approx(scores.d_nearest[i])
        # The first three exemplars agree with the prediction if and only if q says so.
        agree = [e.label == e.prediction == explanation.prediction for e in explanation.exemplars]
        assert agree[: min(3, explanation.q)] == [True] * min(3, explanation.q)
        ca = layer.calibration
        inside = fitted.region_.contains(ca.q_prime, ca.p, ca.predictions).numpy()
        state = {"accepted": inside, "out of distribution": (ca.q == 0).numpy()}
        state["rejected"] = ~inside & ~state["out of distribution"]
        peers = state[explanation.decision] & (ca.predictions.numpy() == explanation.prediction)
        assert explanation.peers.count == peers.sum()
        if peers.any():
            assert explanation.peers.accuracy == pytest.approx((ca.labels == ca.predictions).numpy()[peers].mean())
    assert seen == {"accepted", "rejected", "out of distribution"}
