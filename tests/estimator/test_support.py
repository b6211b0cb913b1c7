import itertools

import numpy as np
import pytest
import reference as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdmlm.estimator import support as support_module
from sdmlm.estimator.support import SupportSet


def problem(rng, n=60, m=5, n_queries=20, classes=3, grid=False):
    make = (
        (lambda *s: rng.integers(-2, 3, s).astype(np.float32)) if grid else (lambda *s: rng.normal(size=s).astype("f4"))
    )
    labels = rng.integers(0, classes, n)
    predictions = np.where(rng.random(n) < 0.2, rng.integers(0, classes, n), labels)
    return make(n, m), labels, predictions, make(n_queries, m), rng.integers(0, classes, n_queries)


def assert_like_slow(support, vectors, labels, predictions, queries, guesses, exclude=None):
    found = support.query(queries, guesses, exclude)
    mine, others = support.nearest_by_class(queries, guesses, exclude)
    for i, (query, guess) in enumerate(zip(queries, guesses, strict=True)):
        own = -1 if exclude is None else exclude[i]
        q, d = slow.similarity(vectors, labels, predictions, query, guess, own)
        assert int(found.q[i]) == q
        assert float(found.d_nearest[i]) == pytest.approx(d, rel=1e-12, abs=0)
        far = slow.distances(vectors, query)
        if own >= 0:
            far[own] = np.inf
        assert int(found.nearest[i]) == int(np.argmin(far))
        match = (np.asarray(labels) == guess) & (np.asarray(predictions) == guess)
        for given_value, which in ((mine[i], match), (others[i], ~match)):
            least = min((far[j] for j in np.flatnonzero(which)), default=np.inf)
            assert float(given_value) == pytest.approx(least, rel=1e-12, abs=0)


@pytest.mark.parametrize("grid", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("seed", range(8))
def test_agrees_with_the_slow_walk(seed, grid):
    rng = np.random.default_rng(seed)
    vectors, labels, predictions, queries, guesses = problem(rng, grid=grid, m=2 if grid else 5)
    assert_like_slow(SupportSet(vectors, labels, predictions), vectors, labels, predictions, queries, guesses)


@pytest.mark.parametrize("grid", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-18, 1e10, 1e18, 1e20, 1e30])
def test_vectors_whose_squares_float32_cannot_hold(scale, grid):
    rng = np.random.default_rng(0)
    vectors, labels, predictions, queries, guesses = problem(rng, grid=grid, m=2 if grid else 5)
    vectors, queries = (scale * v.astype(np.float64) for v in (vectors, queries))
    vectors, queries = vectors.astype(np.float32), np.concatenate([queries, 0 * queries[:1]]).astype(np.float32)
    guesses = np.append(guesses, 0)
    assert_like_slow(SupportSet(vectors, labels, predictions), vectors, labels, predictions, queries, guesses)
    queries[0] = 1e25  # beside a support of any scale
    assert_like_slow(SupportSet(vectors, labels, predictions), vectors, labels, predictions, queries[:1], guesses[:1])


def test_autocast_of_the_caller_changes_nothing():
    rng = np.random.default_rng(0)
    vectors, labels, predictions, queries, guesses = problem(rng, n=4000, m=64, n_queries=500)
    support = SupportSet(vectors, labels, predictions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = SupportSet.query.__wrapped__(support, queries, guesses)  # type: ignore[attr-defined]
    assert not torch.equal(rounded.q, support.query(queries, guesses).q)  # so that it could be seen
    plain, near = support.query(queries, guesses), support.neighbors(queries, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, also = support.query(queries, guesses), support.neighbors(queries, 3)
    assert torch.equal(plain.q, found.q)
    assert torch.equal(plain.d_nearest, found.d_nearest)
    assert all(torch.equal(a, b) for a, b in zip(near, also, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_a_query_in_the_support_ignores_its_own_entry(seed):
    rng = np.random.default_rng(seed)
    vectors, labels, predictions, _, _ = problem(rng, grid=seed % 2 == 0, m=2)
    support = SupportSet(vectors, labels, predictions)
    exclude = np.where(rng.random(len(vectors)) < 0.8, np.arange(len(vectors)), -1)
    assert_like_slow(support, vectors, labels, predictions, vectors, predictions, exclude)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.booleans())
def test_the_order_of_the_support_does_not_matter(seed, n, grid):
    rng = np.random.default_rng(seed)
    vectors, labels, predictions, queries, guesses = problem(rng, n=n, m=2, grid=grid)
    shuffle = rng.permutation(n)
    one = SupportSet(vectors, labels, predictions).query(queries, guesses)
    two = SupportSet(vectors[shuffle], labels[shuffle], predictions[shuffle]).query(queries, guesses)
    assert torch.equal(one.q, two.q)
    assert torch.equal(one.d_nearest, two.d_nearest)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_a_new_run_ender_never_raises_q_and_a_new_match_never_lowers_it(seed):
    rng = np.random.default_rng(seed)
    vectors, labels, predictions, queries, guesses = problem(rng, n=25, m=2, grid=True, classes=2)
    support = SupportSet(vectors, labels, predictions)
    before = support.query(queries, guesses).q
    support.add(queries[:1], [7], [int(guesses[0])])  # a label outside the classes: out of distribution
    after = support.query(queries, guesses).q
    assert (after <= before).all()
    assert int(after[0]) == 0
    support = SupportSet(vectors, labels, predictions)
    c = int(guesses[0])
    support.add(queries[:1], [c], [c])
    own = guesses == c
    assert (support.query(queries[own], guesses[own]).q >= before[torch.from_numpy(own)]).all()


def test_small_blocks_and_large_blocks_agree(monkeypatch):
    rng = np.random.default_rng(0)
    vectors, labels, predictions, queries, guesses = problem(rng, n=700, m=40, n_queries=90)
    exclude = rng.integers(-1, 700, 90)
    whole = SupportSet(vectors, labels, predictions)
    monkeypatch.setattr(support_module, "_QUERY_BLOCK", 7)
    monkeypatch.setattr(support_module, "_SUPPORT_BLOCK", 16)
    monkeypatch.setattr(support_module, "_FEW", 0)
    small = SupportSet(vectors, labels, predictions, memory_mb=0.001)
    one, two = whole.query(queries, guesses, exclude), small.query(queries, guesses, exclude)
    for name in ("q", "d_nearest", "nearest"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    for a, b in zip(whole.neighbors(queries, 5, exclude), small.neighbors(queries, 5, exclude), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("offset", [0.0, 100.0, 1e5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_duplicates_are_at_distance_zero(offset, dtype):
    rng = np.random.default_rng(1)
    vectors = (rng.normal(size=(300, 200)) + offset).astype(dtype)
    labels = rng.integers(0, 2, 300)
    found = SupportSet(vectors, labels, labels).query(vectors[::-1].copy(), labels[::-1].copy())
    assert (found.d_nearest == 0).all()
    assert torch.equal(found.nearest, torch.arange(299, -1, -1))


def test_exact_where_float32_distances_are_not():
    """Near ties, far below the resolution of |a|^2 + |b|^2 - 2ab, with distances that differ by one part in 1e7."""
    rng = np.random.default_rng(2)
    direction = rng.normal(size=(400, 64))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    vectors = (direction * (3.0 + 1e-6 * rng.random((400, 1)))).astype(np.float32)
    labels = rng.integers(0, 2, 400)
    queries, guesses = np.zeros((2, 64), np.float32), np.array([0, 1])
    support = SupportSet(vectors, labels, labels)
    assert_like_slow(support, vectors, labels, labels, queries, guesses)
    exact = np.sqrt((vectors.astype(np.float64) ** 2).sum(axis=1))
    distance, index = support.neighbors(queries, 50)
    assert index[0].tolist() == np.lexsort((np.arange(400), exact))[:50].tolist()
    np.testing.assert_allclose(distance[0], np.sort(exact)[:50], rtol=1e-14)


@pytest.mark.parametrize("grid", [False, True])
def test_neighbors(grid):
    rng = np.random.default_rng(3)
    vectors, labels, predictions, queries, _ = problem(rng, m=2, grid=grid)
    support = SupportSet(vectors, labels, predictions)
    exclude = rng.integers(-1, len(vectors), len(queries))
    for own in (None, exclude):
        distances, indices = support.neighbors(queries, 7, own)
        for i, query in enumerate(queries):
            far = np.array(slow.distances(vectors, query))
            if own is not None and own[i] >= 0:
                far[own[i]] = np.inf
            expected = np.lexsort((np.arange(len(far)), far))[:7]
            assert indices[i].tolist() == expected.tolist()
            np.testing.assert_allclose(distances[i], far[expected], rtol=1e-12)


def test_neighbors_of_a_small_support_are_padded():
    support = SupportSet(np.eye(2, dtype=np.float32), [0, 1], [0, 1])
    distances, indices = support.neighbors(np.eye(2, dtype=np.float32), 3, exclude=[0, -1])
    assert indices.tolist() == [[1, -1, -1], [1, 0, -1]]
    assert torch.isinf(distances[0, 1:]).all()


def test_no_run_ender_counts_everything_and_max_q_caps():
    vectors = np.arange(10, dtype=np.float32)[:, None]
    labels = np.ones(10, int)
    assert SupportSet(vectors, labels, labels).query([[0.0]], [1]).q.tolist() == [10]
    assert SupportSet(vectors, labels, labels).query([[0.0]], [1], exclude=[3]).q.tolist() == [9]
    assert SupportSet(vectors, labels, labels, max_q=4).query([[0.0]], [1]).q.tolist() == [4]
    assert SupportSet(vectors, labels, labels).query([[0.0]], [0]).q.tolist() == [0]


def test_a_tie_with_the_run_ender_does_not_count():
    vectors, labels = np.array([[1.0], [-1.0], [0.5]], np.float32), np.array([0, 1, 0])
    for order in itertools.permutations(range(3)):
        support = SupportSet(vectors[list(order)], labels[list(order)], labels[list(order)])
        assert support.query([[0.0]], [0]).q.tolist() == [1]


def test_add_keeps_order_and_equals_a_fresh_set():
    rng = np.random.default_rng(4)
    vectors, labels, predictions, queries, guesses = problem(rng)
    support = SupportSet(vectors[:40], labels[:40], predictions[:40])
    support.add(vectors[40:], labels[40:], predictions[40:])
    assert torch.equal(support.vectors, torch.from_numpy(vectors))
    assert_like_slow(support, vectors, labels, predictions, queries, guesses)


def test_empty_support_and_no_queries():
    support = SupportSet(np.empty((0, 3), np.float32), np.empty(0, int), np.empty(0, int))
    found = support.query(np.zeros((2, 3), np.float32), [0, 1])
    assert found.q.tolist() == [0, 0]
    assert found.nearest.tolist() == [-1, -1]
    assert torch.isinf(found.d_nearest).all()
    full = SupportSet(np.eye(3, dtype=np.float32), [0, 1, 0], [0, 1, 0])
    assert len(full.query(np.empty((0, 3), np.float32), np.empty(0, int)).q) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SupportSet(np.zeros(3), [0, 0, 0], [0, 0, 0]), "matrix of vectors"),
        (lambda: SupportSet([[np.nan]], [0], [0]), "NaN"),
        (lambda: SupportSet([[1.0]], [0, 1], [0]), "labels has shape"),
        (lambda: SupportSet([[1.0]], [0.5], [0]), "integers"),
        (lambda: SupportSet([[1.0]], [0], [-1]), "negative"),
        (lambda: SupportSet([[1.0]], [0], [0]).query([[1.0, 2.0]], [0]), "2 wide"),
        (lambda: SupportSet([[1.0]], [0], [0]).query([[1.0]], [0], exclude=[1]), "outside -1..0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_tight_clusters_are_exact_and_change_to_double_precision(monkeypatch, offset):
    """Two clusters far apart and very tight: in float32 every pair would be within the rounding error."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 2, 500)
    vectors = (10.0 * labels[:, None] + offset + 1e-4 * rng.normal(size=(500, 30))).astype(np.float32)
    predictions = np.where(rng.random(500) < 0.05, 1 - labels, labels)
    support = SupportSet(vectors, labels, predictions)
    seen = precisions(monkeypatch)
    assert_like_slow(support, vectors, labels, predictions, vectors[:40], predictions[:40], list(range(40)))
    assert torch.float64 in seen


def precisions(monkeypatch):
    """Grows by the dtype that each batch of queries is computed in."""
    seen = []
    original = support_module._Queries.__init__

    def spy(self, owner, queries, excluded, dtype):
        seen.append(dtype)
        original(self, owner, queries, excluded, dtype)

    monkeypatch.setattr(support_module._Queries, "__init__", spy)
    return seen


def test_equal_rows_are_looked_at_once(monkeypatch):
    """Of 300 equal rows each would need its exact distance, more than float32 is worth: one of them stands for all."""
    rng = np.random.default_rng(6)
    labels = rng.integers(0, 2, 500)
    vectors = rng.normal(size=(500, 30)).astype(np.float32)
    same = rng.permutation(500)[:300]
    vectors[same[:200]], vectors[same[200:]] = vectors[same[0]], vectors[same[-1]]
    predictions = np.where(rng.random(500) < 0.05, 1 - labels, labels)
    support = SupportSet(vectors, labels, predictions)
    seen = precisions(monkeypatch)
    assert_like_slow(support, vectors, labels, predictions, vectors[:60], predictions[:60], list(range(60)))
    assert set(seen) == {torch.float32}
    distances, indices = support.neighbors(vectors[same[:1]], 210)
    assert indices[0, :200].tolist() == sorted(same[:200].tolist())
    assert distances[0, 199] == 0 < distances[0, 200]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.0, 1000.0]), st.sampled_from([1.0, 1e-15, 1e15]))
def test_few_queries_find_what_many_find(seed, grid, offset, scale):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 120))
    draw = (lambda size: rng.integers(0, 3, size)) if grid else (lambda size: rng.normal(size=size))
    vectors = ((draw((n, 5)) + offset) * scale).astype(np.float32)
    labels, predictions = rng.integers(-1, 3, n), rng.integers(0, 3, n)
    queries = np.concatenate([vectors[:10], ((draw((10, 5)) + offset) * scale).astype(np.float32)])
    guesses = rng.integers(0, 4, len(queries))
    exclude = rng.integers(-1, n, len(queries))
    for max_q in (None, 2):
        support = SupportSet(vectors, labels, predictions, max_q=max_q)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(support_module, "_FEW", 0)
            found = [
                (support.query(queries, guesses, own), torch.stack(support.nearest_by_class(queries, guesses, own)))
                for own in (None, exclude)
            ]
        for own, (many, pairs) in zip((None, exclude), found, strict=True):
            few = support.query(queries, guesses, own)
            assert torch.equal(few.q, many.q)
            assert torch.equal(few.nearest, many.nearest)
            assert torch.equal(few.d_nearest, many.d_nearest)
            assert torch.equal(torch.stack(support.nearest_by_class(queries, guesses, own)), pairs)
        together, nearest = found[0]
        for i in range(len(queries)):
            alone = support.query(queries[i : i + 1], guesses[i : i + 1])
            assert (alone.q[0], alone.nearest[0]) == (together.q[i], together.nearest[i])
            assert float(alone.d_nearest[0]) == pytest.approx(float(together.d_nearest[i]), rel=1e-14)
            pair = torch.cat(support.nearest_by_class(queries[i : i + 1], guesses[i : i + 1]))
            torch.testing.assert_close(pair, nearest[:, i], rtol=1e-14, atol=0)


def test_few_queries_with_many_equal_rows_go_the_long_way(monkeypatch):
    vectors = np.zeros((500, 4), dtype=np.float32)
    support = SupportSet(vectors, np.zeros(500, int), np.zeros(500, int))
    asked = []
    plain = SupportSet._query_class
    monkeypatch.setattr(SupportSet, "_query_class", lambda self, *a: asked.append(1) or plain(self, *a))
    found = support.query(vectors[:1] + 1, [0])
    assert (found.q.tolist(), found.nearest.tolist(), found.d_nearest.tolist()) == ([500], [0], [2.0])
    assert asked == [1]
    assert support.query(vectors[:2] + 1, [0, 0], exclude=[3, -1]).q.tolist() == [499, 500]
    assert asked == [1, 1]
    spread = np.arange(2000, dtype=np.float32).reshape(500, 4)
    assert SupportSet(spread, np.zeros(500, int), np.zeros(500, int)).query(spread[7:8], [0]).nearest.tolist() == [7]
    assert asked == [1, 1]
