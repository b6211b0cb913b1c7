import numpy as np
import reference as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_points import blobs

from sdmlm.estimator.whitening import Whitening, relative_distance
from sdmlm.evaluation.metrics import shift_auroc


def points(n=120, classes=3, dim=5, seed=0):
    X, y = blobs(n, classes, dim, seed)
    return torch.from_numpy(X @ np.random.default_rng(seed + 1).normal(size=(dim, dim)).astype(np.float32)), y


def test_distances_are_those_of_the_inverse_covariance_within_classes():
    x, y = points()
    whitening = Whitening.fit(x, torch.from_numpy(y))
    values = x.double().numpy()
    std = values.std(axis=0, ddof=1)
    centred = values / std
    for c in range(3):
        centred[y == c] -= centred[y == c].mean(axis=0)
    covariance = slow.ledoit_wolf(centred) * np.outer(std, std)
    white = whitening(x).double().numpy()
    for i, j in ((0, 1), (4, 90), (50, 51), (7, 8)):
        difference = values[i] - values[j]
        expected = np.sqrt(difference @ np.linalg.inv(covariance) @ difference)
        np.testing.assert_allclose(np.linalg.norm(white[i] - white[j]), expected, rtol=1e-4)


def test_a_class_has_unit_spread_in_every_direction():
    x, y = points(n=4000)
    white = Whitening.fit(x, torch.from_numpy(y))(x).double().numpy()
    for c in range(3):
        np.testing.assert_allclose(np.cov(white[y == c].T), np.eye(5), atol=0.12)


def test_a_direction_without_spread_stays_finite_and_counts():
    x, y = points()
    x = torch.cat([x, torch.full((len(x), 1), 3.0)], dim=1)
    whitening = Whitening.fit(x, torch.from_numpy(y))
    moved = x[:1].clone()
    moved[0, -1] += 1.0
    assert bool(torch.isfinite(whitening(x)).all())
    assert float((whitening(moved) - whitening(x[:1])).norm()) > 1.0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=5, max_size=5), st.floats(-1000, 1000))
def test_units_of_the_columns_do_not_matter(scales, shift):
    x, y = points()
    labels = torch.from_numpy(y)
    other = (x.double() * torch.tensor(scales, dtype=torch.float64) + shift).float()
    one, two = (torch.cdist(w, w).double() for w in (Whitening.fit(v, labels)(v) for v in (x, other)))
    torch.testing.assert_close(one, two, rtol=0.05, atol=0.05)


def test_more_columns_than_points():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(60, 500)).astype(np.float32))
    white = Whitening.fit(x, torch.arange(60) % 2)(x)
    assert white.shape[1] < 60
    assert bool(torch.isfinite(white).all())


def test_relative_distance_by_hand():
    inf = torch.inf
    own = torch.tensor([2.0, 4.0, 3.0, 0.0, 0.0, inf, inf, 5.0], dtype=torch.float64)
    other = torch.tensor([4.0, 2.0, 3.0, 1.0, 0.0, 1.0, inf, 0.0], dtype=torch.float64)
    assert relative_distance(own, other).tolist() == [1.0, 4.0, 3.0, 0.0, 0.0, inf, inf, inf]
    alone = relative_distance(torch.tensor([2.0]), torch.tensor([inf]))  # an approximate index saw only the own class
    assert alone.tolist() == [0.0]


def test_a_class_between_the_known_ones_is_seen_by_how_near_the_others_are():
    """The distance to the nearest known point alone tells it from known points less well."""
    rng = np.random.default_rng(0)
    known = np.concatenate([rng.normal(size=(300, 4)) + np.eye(4)[3] * 3 * c for c in (0, 2)])
    y = np.repeat([0, 1], 300)
    new = np.concatenate([rng.normal(size=(300, 4)) + np.eye(4)[3] * 3 * c for c in (0, 2)])
    between = rng.normal(size=(300, 4)) + np.eye(4)[3] * 3

    def figures(points):
        own, other, plain = [], [], []
        for point in points:
            far = np.linalg.norm(known - point, axis=1)
            c = int(point[3] > 3)
            own.append(far[y == c].min())
            other.append(far[y != c].min())
            plain.append(far.min())
        return relative_distance(torch.tensor(own), torch.tensor(other)).numpy(), np.array(plain)

    (one, plain), (two, plain_two) = figures(new), figures(between)
    assert shift_auroc(-one, -two) > shift_auroc(-plain, -plain_two) + 0.1
