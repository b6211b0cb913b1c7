import math

import numpy as np
import pytest
from scipy.stats import binom

from sdmlm.estimator.certify import Certificate, certify_region, threshold_grid
from sdmlm.estimator.region import HighReliabilityRegion

REGION = HighReliabilityRegion(0.9, 1.0, (0.8, 0.8))
GRID = [1.0, 2.0, 3.0, 4.0]


def draw(rng, n, accuracy):
    """q' uniform over the four steps; the accuracy of predicted class c from step k on is accuracy[c][k] there."""
    step = rng.integers(0, 4, n)
    predictions = rng.integers(0, 2, n)
    right = rng.random(n) < np.asarray(accuracy)[predictions, step]
    p = np.where(np.arange(2) == predictions[:, None], 0.9, 0.1)
    return step + 1.0, p, predictions, np.where(right, predictions, 1 - predictions)


def true_accuracy(accuracy, q_min):
    """Worst class's accuracy among the accepted of the population from q_min on."""
    return min(np.mean(row[int(q_min) - 1 :]) for row in accuracy)


@pytest.mark.parametrize(
    "accuracy",
    [
        [[0.895] * 4, [0.99] * 4],  # one class just short everywhere
        [[0.80, 0.85, 0.93, 0.93], [0.88, 0.90, 0.90, 0.95]],  # the loose regions fall short, the tight ones do not
        [[0.86, 0.90, 0.90, 0.90], [0.95] * 4],
    ],
)
def test_the_promise_holds_over_thousands_of_draws(accuracy):
    rng = np.random.default_rng(0)
    delta, broken, trials = 0.1, 0, 2000
    for _ in range(trials):
        certificate = certify_region(REGION, GRID, *draw(rng, 600, accuracy), delta=delta)
        if certificate.region is not None and true_accuracy(accuracy, certificate.region.q_min) < 0.9:
            broken += 1
    # More than this would happen by chance once in a million if the promise held just so.
    assert broken <= binom.ppf(1 - 1e-6, trials, delta)


def test_the_promise_is_not_vacuous_and_the_loosest_is_returned():
    rng = np.random.default_rng(1)
    accuracy = [[0.6, 0.97, 0.97, 0.97], [0.97] * 4]
    found = [certify_region(REGION, GRID, *draw(rng, 2000, accuracy)).region for _ in range(300)]
    assert np.mean([region is not None and region.q_min == 2.0 for region in found]) > 0.9


def test_without_correction_the_promise_would_break():
    """The multiplicity correction is needed: testing every threshold at delta itself fails too often in this case."""
    rng = np.random.default_rng(2)
    accuracy = [[0.899] * 4, [0.999] * 4]
    naive = corrected = 0
    for _ in range(1500):
        drawn = draw(rng, 800, accuracy)
        naive += certify_region(REGION, GRID, *drawn, delta=0.4).region is not None  # 0.4 / 4 thresholds = 0.1 each
        corrected += certify_region(REGION, GRID, *drawn, delta=0.1).region is not None
    assert naive / 1500 > 0.1
    assert corrected / 1500 <= 0.1


def test_exact_binomial_p_value_and_no_points():
    p = np.tile([0.1, 0.9], (50, 1))
    predictions, labels = np.ones(50, int), np.array([0, *[1] * 49])
    certificate = certify_region(REGION, [1.0], np.ones(50), p, predictions, labels, delta=0.05)
    empty, full = certificate.tests
    assert (empty.predicted_class, empty.accepted, empty.p_value, empty.passed) == (0, 0, 1.0, False)
    tail = sum(math.comb(50, k) * 0.1**k * 0.9 ** (50 - k) for k in (0, 1))
    assert (full.accepted, full.errors, full.passed) == (50, 1, True)
    assert full.p_value == pytest.approx(tail)
    assert certificate.region is None
    assert "No threshold" in str(certificate)


def test_covering_some_classes_rejects_the_others():
    p = np.tile([0.1, 0.9], (60, 1))
    ones = np.ones(60, int)
    certificate = certify_region(REGION, [1.0], np.ones(60), p, ones, ones, delta=0.05, classes=[1])
    assert certificate.region is not None
    assert certificate.region.psi == (math.inf, 0.8)
    assert not certificate.region.contains(np.ones(1), np.array([[0.99, 0.01]]), np.array([0])).any()
    assert "class 1 (all others are rejected)" in str(certificate)


def test_saved_and_loaded_it_is_the_same(tmp_path):
    p, ones = np.tile([0.1, 0.9], (60, 1)), np.ones(60, int)
    for classes in (None, [1]):
        certificate = certify_region(REGION, [1.0], np.ones(60), p, ones, ones, classes=classes)
        certificate.save(tmp_path / "c.json")
        assert Certificate.load(tmp_path / "c.json") == certificate
    for damaged in ("{}", "[" * 100_000):
        (tmp_path / "c.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"c\.json is not a readable certificate"):
            Certificate.load(tmp_path / "c.json")


def test_grid_comes_from_calibration_and_starts_at_the_region():
    q = np.arange(1, 101) ** 2.0  # far from even
    grid = threshold_grid(HighReliabilityRegion(0.9, 50.0**2, (0.9, 0.9)), np.random.default_rng(0).permutation(q))
    kept = [v for v in q.tolist() if v >= 2500]
    assert grid == [kept[int(k / 10 * (len(kept) - 1))] for k in range(10)]
    assert grid[0] == 2500
    assert threshold_grid(HighReliabilityRegion(0.9, math.inf, (math.inf,) * 2), q) == []


@pytest.mark.parametrize(
    ("delta", "classes", "message"), [(0.0, None, "delta"), (1.0, None, "delta"), (0.1, [2], "classes")]
)
def test_bad_input(delta, classes, message):
    with pytest.raises(ValueError, match=message):
        certify_region(REGION, GRID, np.ones(1), np.ones((1, 2)), np.ones(1, int), np.ones(1, int), delta, classes)
