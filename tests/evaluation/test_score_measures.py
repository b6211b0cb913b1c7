"""Measures of a score against definitions written out point by point, and against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference as slow
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, roc_auc_score, roc_curve

from sdmlm.evaluation import metrics

# Few different scores, so that there are ties.
problems = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6))
def test_aurc_is_the_mean_over_all_orders_of_ties(points: list[tuple[int, bool]]) -> None:
    assert metrics.aurc(*zip(*points, strict=True)) == pytest.approx(slow.aurc(points))


@settings(max_examples=200, deadline=None)
@given(problems)
def test_measures_agree_with_plain_counting(points: list[tuple[int, bool]]) -> None:
    scores, correct = (list(values) for values in zip(*points, strict=True))
    best = slow.risks(sorted(correct, reverse=True))
    assert metrics.excess_aurc(scores, correct) == pytest.approx(metrics.aurc(scores, correct) - np.mean(best))
    assert metrics.auarc(scores, correct) == pytest.approx(1 - metrics.aurc(scores, correct))
    for target in (0.5, 0.9, 0.95):
        shares = [0.0]
        for t in set(scores):
            accepted = [right for s, right in points if s >= t]
            if sum(accepted) / len(accepted) >= target:
                shares.append(len(accepted) / len(points))
        assert metrics.coverage_at_accuracy(scores, correct, target) == pytest.approx(max(shares))
        threshold = metrics.threshold_at_accuracy(scores, correct, target)
        assert np.mean(np.array(scores) >= threshold) == pytest.approx(max(shares))
    if len(set(correct)) == 2:
        assert metrics.auroc(scores, correct) == pytest.approx(roc_auc_score(correct, scores))
    else:
        assert math.isnan(metrics.auroc(scores, correct))
        assert math.isnan(metrics.prediction_rejection_ratio(scores, correct))


def test_prr_is_one_for_the_ideal_order_and_about_zero_for_chance() -> None:
    rng = np.random.default_rng(0)
    correct = rng.random(20_000) < 0.8
    assert metrics.prediction_rejection_ratio(correct.astype(float), correct) == pytest.approx(1)
    assert metrics.prediction_rejection_ratio(np.zeros(20_000), correct) == pytest.approx(0)
    assert metrics.prediction_rejection_ratio(rng.random(20_000), correct) == pytest.approx(0, abs=0.03)
    assert metrics.prediction_rejection_ratio(-correct.astype(float), correct) == pytest.approx(-1)
    # Four points by hand: errors left at coverage 0, 1/4, ... are 0, 0, 1, 1, 2
    by_hand = (4 - 3.0) / (4 - 2.0)
    assert metrics.prediction_rejection_ratio([4, 3, 2, 1], [True, False, True, False]) == pytest.approx(by_hand)


def test_calibration_measures_agree_with_plain_counting_and_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    p = rng.dirichlet([1, 2, 3], 400)
    y = np.array([rng.choice(3, p=row) for row in p])
    right = p.argmax(axis=1) == y
    assert metrics.expected_calibration_error(p.max(axis=1), right) == pytest.approx(
        slow.calibration_error(p.max(axis=1).tolist(), right.tolist(), 15)
    )
    by_class = [slow.calibration_error(p[:, c].tolist(), (y == c).tolist(), 15) for c in range(3)]
    assert metrics.class_wise_calibration_error(p, y) == pytest.approx(np.mean(by_class))
    expected = np.mean([sum((row[c] - (label == c)) ** 2 for c in range(3)) for row, label in zip(p, y, strict=True)])
    assert metrics.brier_score(p, y) == pytest.approx(expected)
    two = p[:, :2] / p[:, :2].sum(axis=1, keepdims=True)
    assert metrics.brier_score(two, y % 2) == pytest.approx(2 * brier_score_loss(y % 2, two[:, 1]))
    assert metrics.log_loss(p, y) == pytest.approx(-np.mean(np.log(p[np.arange(400), y])))
    assert metrics.expected_calibration_error([1.0, 0.0], [True, False]) == 0


def test_shift_measures_agree_with_scikit_learn() -> None:
    rng = np.random.default_rng(2)
    known, shifted = rng.normal(1.5, 1, 300), rng.normal(0, 1, 200)
    truth = np.repeat([1, 0], [300, 200])
    assert metrics.shift_auroc(known, shifted) == pytest.approx(roc_auc_score(truth, np.append(known, shifted)))
    false, true, _ = roc_curve(truth, np.append(known, shifted), drop_intermediate=False)
    assert metrics.fpr_at_95(known, shifted) == pytest.approx(false[true >= 0.95].min())
    assert metrics.fpr_at_95(known, known) >= 0.95


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.aurc([], []), "at least one point"),
        (lambda: metrics.aurc([1, 2], [True]), "one of each per point"),
        (lambda: metrics.auroc([1, math.nan], [True, False]), "NaN"),
        (lambda: metrics.expected_calibration_error([2.0], [True]), "probabilities"),
        (lambda: metrics.brier_score([[0.5, 0.9]], [0]), "sum to 1"),
        (lambda: metrics.log_loss([[0.5, 0.5]], [2]), "whole numbers"),
        (lambda: metrics.brier_score([[0.5, 0.5]], [0, 1]), "one for each row"),
        (lambda: metrics.fpr_at_95([], [1.0]), "empty"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_measures_of_probabilities_together():
    rng = np.random.default_rng(0)
    p, y = rng.dirichlet(np.ones(3), 50), rng.integers(0, 3, 50)
    assert metrics.calibration_measures(p, y) == {
        "ece": metrics.expected_calibration_error(p.max(axis=1), p.argmax(axis=1) == y),
        "class_wise_ece": metrics.class_wise_calibration_error(p, y),
        "brier": metrics.brier_score(p, y),
        "log_loss": metrics.log_loss(p, y),
    }
