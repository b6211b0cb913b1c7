import numpy as np
import pytest
from toy_points import blobs

from sdmlm import SDMEstimator
from sdmlm.estimator.support import SupportSet

pytest.importorskip("faiss")
from sdmlm.estimator.support_faiss import FaissSupportSet


def problem(n=3000, m=16, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, n)
    predictions = np.where(rng.random(n) < 0.05, 1 - labels, labels)
    return (rng.normal(size=(n, m)) + 2 * labels[:, None]).astype(np.float32), labels, predictions


def test_looking_into_every_cell_gives_the_exact_answers():
    vectors, labels, predictions = problem()
    approximate = FaissSupportSet(vectors, labels, predictions, max_q=3000)
    approximate._index.nprobe = approximate._index.nlist
    exclude = np.where(np.arange(200) % 2 == 0, np.arange(200), -1)
    exact = SupportSet(vectors, labels, predictions).query(vectors[:200], predictions[:200], exclude)
    found = approximate.query(vectors[:200], predictions[:200], exclude)
    assert (found.q == exact.q).float().mean() > 0.99  # float32 ties may differ
    np.testing.assert_allclose(found.d_nearest, exact.d_nearest, atol=2e-3)
    assert (found.nearest == exact.nearest).float().mean() > 0.99


def test_it_says_that_it_is_approximate_and_mostly_right():
    vectors, labels, predictions = problem()
    approximate = FaissSupportSet(vectors, labels, predictions)
    assert approximate.approximate
    assert not SupportSet.approximate
    exact = SupportSet(vectors, labels, predictions).neighbors(vectors[:100], 5)[1]
    found = approximate.neighbors(vectors[:100], 5)[1]
    assert (found == exact).float().mean() > 0.8
    assert approximate.query(vectors, predictions).q.max() <= 2048


def test_small_blocks_give_the_same():
    vectors, labels, predictions = problem(400)
    exclude = np.arange(400)
    whole = FaissSupportSet(vectors, labels, predictions)
    small = FaissSupportSet(vectors, labels, predictions, memory_mb=0.1)
    one, two = (s.query(vectors, predictions, exclude) for s in (whole, small))
    assert (one.q == two.q).all()
    assert (one.nearest == two.nearest).all()


def test_padding_and_add():
    support = FaissSupportSet(np.eye(3, dtype=np.float32), [0, 1, 0], [0, 1, 0])
    support.add(2 * np.eye(3, dtype=np.float32), [1, 1, 1], [1, 1, 1])
    assert len(support) == 6
    distances, indices = support.neighbors(np.eye(3, dtype=np.float32), 8)
    assert indices[0, :2].tolist() == [0, 3]
    assert (indices[:, 6:] == -1).all()
    assert distances[:, 6:].isinf().all()


def test_an_estimator_on_the_index_saves_the_index(tmp_path):
    X, y, _ = problem(600)
    estimator = SDMEstimator.published(
        exemplar_dim=8, epochs=3, learning_rate=1e-2, rounds=1, index="faiss", progress=False
    ).fit(X, y)
    assert estimator.layers_[0].support.approximate
    estimator.save_pretrained(tmp_path / "e")
    loaded = SDMEstimator.from_pretrained(tmp_path / "e")
    assert loaded.layers_[0].support.approximate
    assert np.array_equal(estimator.score(X).q, loaded.score(X).q)
    assert estimator.region_ == loaded.region_


def test_the_automatic_estimator_over_an_index(tmp_path):
    points, y = blobs(400, 2, gap=4.0)
    fresh, fresh_y = blobs(100, 2, seed=1, gap=4.0)
    estimator = SDMEstimator(index="faiss", rounds=2, alpha=0.9, progress=False).fit(points, y)
    scores = estimator.score(fresh)
    assert (scores.prediction == fresh_y).mean() > 0.95
    assert scores.accepted.mean() > 0.5
    np.testing.assert_allclose(
        scores.d, SDMEstimator(rounds=2, alpha=0.9, progress=False).fit(points, y).score(fresh).d, atol=0.1
    )
    estimator.save_pretrained(tmp_path / "e")
    np.testing.assert_array_equal(SDMEstimator.from_pretrained(tmp_path / "e").score(fresh).accepted, scores.accepted)
