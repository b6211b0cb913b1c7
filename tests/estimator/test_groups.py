"""Points of one group stay on the same side of every partition; known points are scored without themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from toy_points import blobs

from sdmlm import SDMClassifier, SDMEstimator
from sdmlm.estimator.splits import fold_count, grouped_parts, held_out_split, random_folds


def grouped(n, size, classes, rng):
    """Labels, and groups of up to `size` points in random order."""
    groups = rng.integers(0, max(1, 2 * n // size), n)
    return rng.integers(0, classes, n), groups


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 8), st.integers(80, 300))
def test_folds_never_part_a_group_and_lose_no_class(seed, classes, size, n):
    rng = np.random.default_rng(seed)
    y, groups = grouped(n, size, classes, rng)
    folds = fold_count(y, groups)
    parts = random_folds(y, folds, rng, groups)
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    where = {}
    for k, part in enumerate(parts):
        assert set(y[part]) == set(range(classes))
        for group in groups[part].tolist():
            assert where.setdefault(group, k) == k


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 8), st.integers(80, 1000))
def test_of_each_held_out_group_one_point_is_taken(seed, classes, size, n):
    rng = np.random.default_rng(seed)
    y, groups = grouped(n, size, classes, rng)
    kept, held = held_out_split(y, 20, rng, groups)
    total = len(np.unique(groups))
    if total // 2 < 20:
        assert (kept.tolist(), len(held)) == (list(range(n)), 0)
        return
    assert not set(groups[kept]) & set(groups[held])
    assert len(np.unique(groups[held])) == len(held)
    assert len(np.unique(groups[kept])) + len(held) == total
    assert set(np.flatnonzero(np.isin(groups, groups[kept]))) == set(kept)
    expected = max(0.3, min(0.5, 150 / total)) * total
    assert len(held) <= expected + 1
    assert len(held) >= expected - 1 - 4 * classes
    for c in range(classes):
        assert len(set(groups[kept[y[kept] == c]])) >= min(4, len(set(groups[y == c])))


def test_the_held_out_point_of_a_group_is_a_random_one():
    """Else the certificate would speak of the first points of the groups."""
    y, groups = np.tile([0, 0, 1], 100), np.repeat(np.arange(100), 3)
    taken = [held_out_split(y, 20, np.random.default_rng(seed), groups)[1] % 3 for seed in range(60)]
    shares = np.bincount(np.concatenate(taken)) / sum(map(len, taken))
    np.testing.assert_allclose(shares, 1 / 3, atol=0.04)


def test_parts_have_their_shares_of_every_class():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(300), rng.integers(1, 9, 300))
    y = rng.choice(3, len(groups), p=[0.7, 0.2, 0.1])
    parts = grouped_parts(y, groups, [0.5, 0.3, 0.2], rng)
    for part, share in zip(parts, (0.5, 0.3, 0.2), strict=True):
        for c in range(3):
            assert (y[part] == c).sum() / (y == c).sum() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("combine", ["average", "best"])
def test_an_estimator_keeps_groups_together(combine):
    X, y = blobs(800, 3, gap=4.0)
    groups = np.array([f"prompt {i}" for i in np.random.default_rng(0).permutation(np.arange(800) // 2)])
    estimator = SDMEstimator(combine=combine, rounds=2, progress=False).fit(X, y, groups=groups)
    fitted = set()
    for layer in estimator.layers_:
        support, calibration = (set(groups[ids]) for ids in (layer.support_ids, layer.calibration_ids))
        assert not support & calibration
        fitted |= support | calibration
    assert len(estimator.layers_) == {"average": 10, "best": 1}[combine]
    rows = {row.tobytes(): i for i, row in enumerate(X)}
    held = [rows[row.numpy().tobytes()] for row in estimator.held_out_[0]]
    assert not set(groups[held]) & fitted
    assert len(set(groups[held])) == len(held) == 400 - len(fitted)
    assert estimator.certificate_.certified


@pytest.mark.parametrize("through", ["classifier", "pipeline"])
def test_copies_of_a_point_are_no_evidence(through):
    """Four copies of 120 points with random labels: only without groups does the estimator believe that it knows them."""
    rng = np.random.default_rng(1)
    X = np.repeat(rng.normal(size=(120, 60)), 4, axis=0)
    y, groups = np.repeat(rng.permutation(np.arange(120) % 2), 4), np.repeat(np.arange(120), 4)

    def accuracy(**options):
        classifier = SDMClassifier(rounds=2, rule="region", progress=False)
        if through == "pipeline":
            pipeline = make_pipeline(StandardScaler(), classifier)
            pipeline.fit(X, y, **{f"sdmclassifier__{name}": value for name, value in options.items()})
        else:
            classifier.fit(X, y, **options)
        ca = classifier.estimator_.calibration_
        return float((ca.predictions == ca.labels).double().mean())

    assert accuracy() > 0.7  # copies of nearly every point were fitted on
    assert abs(accuracy(groups=groups) - 0.5) < 0.14  # three standard deviations of 120 guesses


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (np.arange(199), "X has 200 rows but groups has 199"),
        (np.zeros((200, 2)), "groups must hold one whole number or text per point"),
        (np.linspace(0, 1, 200), "groups must hold one whole number or text per point"),
        (np.zeros(200, dtype=int), "All points of class 0 are in one group"),
    ],
)
def test_bad_groups_are_named(groups, message):
    X, y = blobs(200)
    with pytest.raises(ValueError, match=message):
        SDMEstimator(progress=False).fit(X, y, groups=groups)


def test_groups_do_not_go_with_a_given_calibration_split():
    X, y = blobs(200)
    estimator = SDMEstimator(combine="best", rule="region", progress=False)
    with pytest.raises(ValueError, match="calibration is a split already"):
        estimator.fit(X[:100], y[:100], calibration=(X[100:], y[100:]), groups=np.arange(100))


def test_a_class_in_too_few_groups_is_named():
    with pytest.raises(ValueError, match="spread over more groups"):  # a fold would have no point of class 1
        random_folds(np.array([0] * 9 + [1] * 2), 3, np.random.default_rng(0), np.arange(11))


@pytest.fixture(scope="module")
def known():
    X, y = blobs(150, 3, gap=1.6)
    more, y_more = blobs(30, 3, seed=5, gap=1.6)
    names = [f"p{i}" for i in range(150)]
    fitted = SDMEstimator(rule="region", rounds=3, progress=False).fit(X, y, ids=names)
    joined = fitted.with_support(more, y_more, ids=[f"m{i}" for i in range(30)])
    return X, more, y_more, fitted, joined


def test_fitted_points_are_scored_by_layers_that_did_not_see_them(known):
    X, more, _, _, joined = known
    own = joined.support_index([*[f"p{i}" for i in range(150)], *[f"m{i}" for i in range(30)], "nobody"])
    assert own[-1] == -1
    assert sorted(own[:-1]) == list(range(180))
    scores = joined.score(np.concatenate([X, more]), exclude=own[:-1])
    ca, where = joined.calibration_, {name: i for i, name in enumerate(joined.calibration_ids_)}
    at = [where[f"p{i}"] for i in range(150)]
    np.testing.assert_allclose(scores.z[:150], ca.z[at], rtol=1e-6)
    np.testing.assert_allclose(scores.q[:150], ca.q[at])
    np.testing.assert_allclose(scores.d_nearest[:150], ca.d_nearest[at], rtol=1e-5)
    # a mix of known and new points gives each what it gets by itself
    mixed = joined.score(np.concatenate([X[:5], more[:5], X[:5]]), exclude=[*own[:5], *own[150:155], *[-1] * 5])
    np.testing.assert_array_equal(mixed.q[:10], scores.q[[*range(5), *range(150, 155)]])
    np.testing.assert_array_equal(mixed.q[10:], joined.score(X[:5]).q)
    np.testing.assert_allclose(joined.output(torch.from_numpy(X), torch.from_numpy(own[:150])), scores.p[:150])


def test_points_that_joined_ignore_their_own_entry(known):
    _, more, y_more, fitted, joined = known
    own = joined.support_index([f"m{i}" for i in range(30)])
    scores = joined.score(more, exclude=own)
    for i in range(0, 30, 7):
        others = np.arange(30) != i
        without = fitted.with_support(more[others], y_more[others]).score(more[i : i + 1])
        assert scores.q[i] == pytest.approx(without.q[0])
        assert scores.d_nearest[i] == pytest.approx(without.d_nearest[0], rel=1e-5)
    assert (joined.score(more).d_nearest < 1e-3).all()
    with pytest.raises(ValueError, match=r"outside -1\.\.179"):
        joined.score(more, exclude=np.full(30, 180))
