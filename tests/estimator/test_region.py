import math

import numpy as np
import pytest
import reference as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdmlm.estimator.region import (
    DistanceCDF,
    HighReliabilityRegion,
    dkw_epsilon,
    effective_sample_size,
    find_region,
)

ALPHAS = (0.55, 0.6, 0.75, 0.8, 0.9, 0.95, 0.99, 1.0)


def random_problem(rng):
    """Small, with ties in q' and in p, values that equal alpha, and now and then a class without points."""
    n, classes = int(rng.integers(1, 40)), int(rng.integers(2, 5))
    alpha = float(rng.choice(ALPHAS))
    q_prime = rng.choice([0.0, 0.5, 1.0, 2.0, 3.0, 3.5], n) if rng.random() < 0.5 else rng.random(n) * 5
    p = rng.random((n, classes))
    sharp = rng.random() < 0.7
    labels = rng.integers(0, classes, n)
    if sharp:  # mostly right, so that regions exist
        p[np.arange(n), labels] = np.maximum(p[np.arange(n), labels], rng.choice([alpha, 0.97, 1.0], n))
    if rng.random() < 0.5:
        p = np.round(p, 1)
    if rng.random() < 0.2:
        labels[labels == 1] = 0
    return q_prime, p, labels, alpha


def test_find_region_agrees_with_the_literal_algorithm():
    rng = np.random.default_rng(0)
    found_some = found_none = 0
    for _ in range(4000):
        q_prime, p, labels, alpha = random_problem(rng)
        q_min, psi = slow.find_region(q_prime, p, labels, alpha)
        region = find_region(q_prime, p, labels, alpha)
        assert region.q_min == q_min
        if psi is None:
            found_none += 1
            assert math.isinf(region.q_min)
        else:
            found_some += 1
            assert region.psi == psi
        if psi is not None:
            predictions = p.argmax(axis=1)
            expected = slow.contains(q_min, psi, q_prime, p, predictions)
            assert np.array_equal(region.contains(q_prime, p, predictions), expected)
    assert found_some > 500
    assert found_none > 500


def test_the_index_is_taken_in_double_precision_as_it_stands():
    # (1 - 0.9) * 10 is 0.99999... in double precision: index 0, not 1.
    p = np.zeros((20, 2))
    p[:10, 0] = [0.5, *[0.99] * 9]
    p[10:, 1] = 0.99
    labels = np.repeat([0, 1], 10)
    assert math.floor((1 - 0.9) * 10) == 0
    assert math.isinf(find_region(np.ones(20), p, labels, 0.9).q_min)
    # (1 - 0.95) * 20 is 1.00000...: index 1, so one low point of twenty is passed over.
    p, labels = np.full((40, 2), 0.99), np.repeat([0, 1], 20)
    p[0, 0] = 0.5
    assert find_region(np.ones(40), p, labels, 0.95) == HighReliabilityRegion(0.95, 1.0, (0.99, 0.99))


def test_region_of_nothing():
    region = find_region(np.empty(0), np.empty((0, 2)), np.empty(0, int), 0.95)
    assert math.isinf(region.q_min)
    assert not region.contains(np.array([1e9]), np.array([[0.0, 1.0]]), np.array([1])).any()


def test_q_of_zero_is_never_inside():
    rng = np.random.default_rng(1)
    for _ in range(200):
        q_prime, p, labels, alpha = random_problem(rng)
        region = find_region(q_prime, p, labels, alpha)
        assert not region.contains(np.zeros(len(p)), p, p.argmax(axis=1)).any()


def test_find_region_scales():
    """A million points: the literal algorithm would need days. A quadratic one runs into the time-out."""
    rng = np.random.default_rng(0)
    n = 1_000_000
    labels = rng.integers(0, 2, n)
    own = 1 - rng.random(n) * 0.2
    p = np.stack([np.where(labels == 0, own, 1 - own), np.where(labels == 1, own, 1 - own)], axis=1)
    region = find_region(rng.random(n) * own * 100, p, labels, 0.95)
    assert region.alpha == 0.95


def test_membership_rules_one_by_one():
    region = HighReliabilityRegion(0.9, 2.0, (0.9, 0.95))
    p = np.array([[0.08, 0.97], [0.08, 0.94], [0.92, 0.97], [0.93, 0.07]])
    assert region.contains(np.full(4, 2.0), p, np.array([1, 1, 1, 0])).tolist() == [True, False, False, True]
    assert not region.contains(np.full(4, 1.99), p, np.array([1, 1, 1, 0])).any()


def test_tensors_in_tensors_out():
    rng = np.random.default_rng(2)
    q_prime, p, labels, alpha = random_problem(rng)
    tensors = torch.from_numpy(q_prime), torch.from_numpy(p), torch.from_numpy(labels)
    assert find_region(*tensors, alpha) == find_region(q_prime, p, labels, alpha)
    inside = find_region(*tensors, alpha).contains(tensors[0], tensors[1], tensors[1].argmax(1))
    assert isinstance(inside, torch.Tensor)
    cdf = DistanceCDF.fit(tensors[0], tensors[2], torch.ones(len(labels)), p.shape[1])
    assert isinstance(cdf.quantile(tensors[0]), torch.Tensor)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_distance_quantile(seed):
    rng = np.random.default_rng(seed)
    n, classes = int(rng.integers(1, 30)), int(rng.integers(2, 4))
    d_nearest = rng.integers(0, 6, n) / 2.0
    labels, q = rng.integers(0, classes, n), rng.integers(0, 3, n)
    cdf = DistanceCDF.fit(d_nearest, labels, q, classes)
    stored = [[d_nearest[i] for i in range(n) if labels[i] == c and q[i] > 0] for c in range(classes)]
    x = np.array([0.0, 0.25, 1.0, 1.5, 2.5, 2.6, np.inf])
    got = cdf.quantile(x)
    np.testing.assert_allclose(got, [slow.distance_quantile(v, stored) for v in x])
    assert (np.diff(got) <= 0).all()
    assert ((got >= 0) & (got <= 1)).all()
    if all(stored):
        assert got[0] == 1.0
    else:
        assert (got == 0).all()
    assert (got[-2:] == 0).all()
    np.testing.assert_array_equal(cdf.quantile(x, per_class=True).min(axis=1), got)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(ALPHAS[:-1]))
def test_effective_sample_size_and_epsilon(seed, alpha):
    rng = np.random.default_rng(seed)
    n, classes = int(rng.integers(1, 30)), int(rng.integers(2, 4))
    calibration, labels = rng.integers(0, 8, n) / 2.0, rng.integers(0, classes, n)
    x = rng.integers(0, 9, 12) / 2.0
    sizes = effective_sample_size(x, calibration, labels, classes)
    assert sizes.shape == (12, classes)
    expected = [slow.effective_sample_size(v, calibration, labels, classes) for v in x]
    assert sizes.tolist() == expected
    np.testing.assert_allclose(dkw_epsilon(sizes, alpha), [slow.dkw_epsilon(row, alpha) for row in expected])


def test_epsilon_at_alpha_one_is_infinite():
    assert np.isinf(dkw_epsilon(np.array([[5, 5]]), 1.0)).all()


@pytest.mark.parametrize("alpha", [0.5, 0.0, 1.01, -1, math.nan, "0.9", None, True])
def test_alpha_out_of_range(alpha):
    with pytest.raises(ValueError, match="alpha"):
        find_region(np.ones(2), np.ones((2, 2)), np.array([0, 1]), alpha)


def test_snapping_moves_only_what_is_within_its_tolerance():
    cdf = DistanceCDF([[1.0, 2.0], [2.5]])
    x = np.array([0.9, 1.0 + 1e-7, 1.0 - 1e-7, 2.3, 2.5 + 1e-7, 9.0, np.inf])
    assert cdf.snapped(x, np.full(7, 1e-6)).tolist() == [0.9, 1.0, 1.0, 2.3, 2.5, 9.0, np.inf]
    assert cdf.snapped(x, np.zeros(7)).tolist() == x.tolist()
    assert DistanceCDF([[], []]).snapped(x, np.ones(7)).tolist() == x.tolist()
