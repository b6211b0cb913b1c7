import math

import numpy as np
import pytest
import reference as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_points import blobs

from sdmlm import SDMEstimator
from sdmlm.estimator.layer import confidence_of
from sdmlm.estimator.splits import fold_count, random_folds

FRESH = blobs(25, 3, seed=9, gap=1.6)[0]


@pytest.fixture(scope="module", params=["folds", "halves"])
def fitted(request):
    """Few points are partitioned into folds, many into halves; small ones here, for the slow versions."""
    X, y = blobs(150, 3, gap=1.6)
    estimator = SDMEstimator(rule="region", rounds=3, progress=False)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "halves":
            patch.setattr("sdmlm.estimator.splits._FEW", 10)
        estimator.fit(X, y)
    assert len(estimator.layers_) == 3 * (2 if request.param == "halves" else 5)
    return estimator


def of_points(layer, vectors, white, z):
    """(q, relative distance, distance, z) of points from the layer's support, in plain Python."""
    support = layer.support
    stored = support.vectors.tolist(), support.labels.tolist(), support.predictions.tolist()
    near, labels = layer.whitened.vectors.tolist(), layer.whitened.labels.tolist()
    out = []
    for h, w, row in zip(vectors.tolist(), white.tolist(), z.tolist(), strict=True):
        c = int(np.argmax(row))
        q = slow.similarity(*stored, h, c)[0]
        out.append((q, slow.relative_distance(near, labels, w, c), min(slow.distances(near, w)), row))
    return out


def of_calibration(layer):
    ca = layer.calibration
    return of_points(layer, layer.calibration_vectors, layer.calibration_whitened, ca.z)


def pooled(layers):
    """The stored relative distances by class: of the calibration points of all folds of a partition with q > 0."""
    known = [
        (row, y) for layer in layers for row, y in zip(of_calibration(layer), layer.calibration.labels, strict=True)
    ]
    return [[row[1] for row, y in known if int(y) == c and row[0] > 0] for c in range(3)]


def signals(found, cdf, labels=None):
    """(q, d, d_nearest, z); `labels`: the points are calibration points themselves."""
    out = []
    for i, (q, relative, nearest, row) in enumerate(found):
        c = int(np.argmax(row))
        is_stored = labels is not None and q > 0 and int(labels[i]) == c
        out.append((q, slow.distance_of_class(relative, cdf[c], is_stored), nearest, row))
    return out


def new_signals(layers, x):
    """The signals of new points by the first layer of each of three partitions."""
    folds, found = len(layers) // 3, []
    for i in range(0, len(layers), folds):
        vectors, z = layers[i].adaptor(x)
        found.append(signals(of_points(layers[i], vectors, layers[i].whitening(x), z), pooled(layers[i : i + folds])))
    return found


def averaged(rows):
    """One point's signals over several layers: q by the mean of log(1 + q), the rest by its mean."""
    q = math.exp(sum(math.log(1 + row[0]) for row in rows) / len(rows)) - 1
    return q, *(np.mean([row[i] for row in rows], axis=0) for i in (1, 2, 3))


def test_every_point_is_out_of_sample_once_in_each_partition(fitted):
    folds = len(fitted.layers_) // 3
    for start in range(0, len(fitted.layers_), folds):
        part = fitted.layers_[start : start + folds]
        held = [name for layer in part for name in layer.calibration_ids]
        assert sorted(held) == list(range(150))
        for layer in part:
            assert sorted([*layer.support_ids, *layer.calibration_ids]) == list(range(150))


def test_calibration_points_are_averaged_over_the_layers_that_did_not_see_them(fitted):
    rows = {name: [] for name in range(150)}
    folds = len(fitted.layers_) // 3
    for i, layer in enumerate(fitted.layers_):
        cdf = pooled(fitted.layers_[i - i % folds :][:folds])
        found = signals(of_calibration(layer), cdf, layer.calibration.labels)
        for name, row in zip(layer.calibration_ids, found, strict=True):
            rows[name].append(row)
    ca = fitted.calibration_
    for i, name in enumerate(fitted.calibration_ids_):
        assert len(rows[name]) == 3
        q, d, nearest, z = averaged(rows[name])
        assert float(ca.q[i]) == pytest.approx(q)
        assert float(ca.d[i]) == pytest.approx(d)
        assert float(ca.d_nearest[i]) == pytest.approx(nearest)
        np.testing.assert_allclose(ca.z[i], z)
        p = slow.sdm(z, q, d)
        np.testing.assert_allclose(ca.p[i], p)
        assert float(ca.q_prime[i]) == pytest.approx(slow.q_prime(q, p[int(np.argmax(z))]))


def test_new_points_are_scored_by_one_layer_of_each_partition(fitted):
    scores, x = fitted.score(FRESH), torch.from_numpy(FRESH)
    found = new_signals(fitted.layers_, x)
    for i, rows in enumerate(zip(*found, strict=True)):
        q, d, nearest, z = averaged(rows)
        assert scores.q[i] == pytest.approx(q)
        assert scores.d[i] == pytest.approx(d)
        assert scores.d_nearest[i] == pytest.approx(nearest)
        np.testing.assert_allclose(scores.z[i], z)
        assert scores.prediction[i] == np.argmax(z)
        np.testing.assert_allclose(scores.p[i], slow.sdm(z, q, d))
        assert scores.confidence[i] == pytest.approx(slow.confidence(z, q))
        assert scores.out_of_distribution[i] == (q == 0)


def test_the_region_is_that_of_algorithm_1_over_all_points(fitted):
    ca = fitted.calibration_
    for alpha in (0.7, 0.8, 0.9):
        q_min, psi = slow.find_region(ca.q_prime.tolist(), ca.p.numpy(), ca.labels.tolist(), alpha)
        region = fitted.region(alpha)
        assert region.q_min == q_min
        assert psi is None or region.psi == pytest.approx(psi)


def test_points_that_join_reach_every_layer(fitted):
    more, y = blobs(30, 3, seed=5, gap=1.6)
    before = fitted.score(FRESH)
    new = fitted.with_support(more, y)
    scores, x = new.score(FRESH), torch.from_numpy(FRESH)
    assert [len(layer.support) for layer in new.layers_] == [len(layer.support) + 30 for layer in fitted.layers_]
    found = new_signals(new.layers_, x)
    for i, rows in enumerate(zip(*found, strict=True)):
        q, d, _, z = averaged(rows)
        assert (scores.q[i], scores.d[i]) == (pytest.approx(q), pytest.approx(d))
        np.testing.assert_allclose(scores.z[i], z)
    np.testing.assert_array_equal(before.z, scores.z)  # weights and predictions stay
    assert not np.array_equal(before.q, scores.q)
    after = fitted.score(FRESH)  # the original stays as it is
    np.testing.assert_array_equal(before.q, after.q)
    np.testing.assert_array_equal(before.d, after.d)
    same = new.score(FRESH)
    np.testing.assert_array_equal(same.q, scores.q)
    with pytest.raises(ValueError, match="already in use"):
        new.add_to_support(more[:1], y[:1], ids=[17])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=6),
    st.one_of(st.just(0.0), st.floats(1e-3, 1e5)),
)
def test_confidence_is_the_log_odds_of_the_output_at_d_1(z, q):
    given_value = confidence_of(torch.tensor([z], dtype=torch.float64), torch.tensor([q], dtype=torch.float64)).item()
    top = max(z)
    shifted = [v - top for v in z]
    if q > 0 and max(v for i, v in enumerate(shifted) if i != z.index(top)) * math.log(2 + q) < -30:
        assert given_value >= 30 - math.log(len(z))  # where the slow version loses its digits
    else:
        assert given_value == pytest.approx(slow.confidence(shifted, q), rel=1e-6, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 4), st.integers(0, 10**6), st.integers(5, 120))
def test_folds_partition_the_points_and_every_class(classes, seed, each):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(classes), each + rng.integers(0, 5, classes)))
    folds = fold_count(labels)
    parts = random_folds(labels, folds, rng)
    assert len(parts) == folds
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1 + classes * (folds == 2)
    for part in parts:  # both the fold and the rest hold every class
        assert set(labels[part]) == set(range(classes)) == set(np.delete(labels, part))
