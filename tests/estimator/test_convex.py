import math

import numpy as np
import pytest
import reference as slow
import torch
from sklearn.linear_model import LogisticRegression
from toy_points import blobs

from sdmlm.estimator.convex import INVERSE_PENALTIES, choose_penalty, convex_adaptor, principal_components


def split(n, classes, seed=0, dim=6, gap=1.5):
    X, y = blobs(n, classes, dim, seed, gap)
    X[:, 0] = 40 * X[:, 0] + 300  # columns of different scale
    return torch.from_numpy(X), torch.from_numpy(y)


def standardised(x, by):
    by = by.double().numpy()
    return (x.double().numpy() - by.mean(axis=0)) / by.std(axis=0, ddof=1)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_z_is_logistic_regression_on_standardised_columns(classes):
    train, fresh = split(300, classes), split(50, classes, seed=1)[0]
    _, z = convex_adaptor(train, classes, 0.1)(fresh)
    model = LogisticRegression(C=0.1, max_iter=5000, tol=1e-10).fit(standardised(train[0], train[0]), train[1])
    expected = model.decision_function(standardised(fresh, train[0]))
    given = z[:, 1] - z[:, 0] if classes == 2 else z - z.mean(dim=1, keepdim=True)
    expected = expected if classes == 2 else expected - expected.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(given, expected, atol=5e-3)
    assert (z.argmax(dim=1).numpy() == model.predict(standardised(fresh, train[0]))).mean() > 0.99


@pytest.mark.parametrize("classes", [2, 4])
def test_z_is_at_the_minimum_of_the_penalised_loss(classes):
    """Its gradient by the weights vanishes there, and is far from 0 at weights that are a tenth off."""
    x, y = split(300, classes)
    adaptor, inverse = convex_adaptor((x, y), classes, 0.1), 0.1
    h, hot = standardised(x, x), np.eye(classes)[y]
    weight = (adaptor.out_weight @ adaptor.weight).double().numpy()
    bias = (adaptor.out_weight @ adaptor.bias + adaptor.out_bias).double().numpy()

    def gradient(weight):
        z = h @ weight.T + bias
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        # With two classes scikit-learn penalises the one weight vector w = 2 weight[1], so each half counts twice.
        return inverse * (p - hot).T @ h + (2 if classes == 2 else 1) * weight

    assert np.abs(gradient(weight)).max() < 0.01 * np.abs(gradient(1.1 * weight)).max() + 1e-3
    assert np.abs(gradient(1.1 * weight)).max() > 0.05


def test_exemplar_vectors_hold_the_scores_and_the_input():
    train, classes = split(200, 3), 3
    vectors, z = convex_adaptor(train, classes, 1.0)(train[0])
    assert vectors.shape == (200, classes + 6)
    z = z.numpy()
    scale = math.sqrt(sum(sum((v - m) ** 2 for v, m in zip(row, z.mean(axis=0), strict=True)) for row in z) / len(z))
    np.testing.assert_allclose(vectors[:, :classes], z / scale, atol=1e-5)
    np.testing.assert_allclose(vectors[:, classes:], standardised(train[0], train[0]) / math.sqrt(6), atol=1e-5)


@pytest.mark.parametrize(("n", "width", "most"), [(40, 60, 50), (200, 12, 20), (40, 60, 60)])
def test_components_keep_the_distances(n, width, most):
    x = np.random.default_rng(0).normal(size=(n, width))
    reduced = x @ principal_components(x, most).T
    for i, j in ((0, 1), (5, 20), (30, 39)):
        assert np.linalg.norm(reduced[i] - reduced[j]) == pytest.approx(np.linalg.norm(x[i] - x[j]))


@pytest.mark.parametrize("n", [40, 300])
def test_the_first_components_hold_the_most_variance(n):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 60)) * np.linspace(5, 0.1, 60)
    components = principal_components(x, 10)
    np.testing.assert_allclose(components @ components.T, np.eye(10), atol=1e-8)
    kept = np.var((x - x.mean(axis=0)) @ components.T, axis=0).sum()
    singular = np.linalg.svd(x - x.mean(axis=0), compute_uv=False)
    assert kept == pytest.approx((singular[:10] ** 2).sum() / n)


def test_the_penalty_has_the_lowest_balanced_loss_on_the_other_split():
    train, other = split(60, 2, dim=20), split(60, 2, seed=1, dim=20)
    chosen = choose_penalty([(train, other), (other, train)], 2)
    losses = []
    for inverse in INVERSE_PENALTIES:
        total = 0.0
        for fitted, held in ((train, other), (other, train)):
            _, z = convex_adaptor(fitted, 2, inverse)(held[0])
            total += slow.balanced_cross_entropy(z.tolist(), held[1].tolist())
        losses.append(total)
    assert chosen == INVERSE_PENALTIES[int(np.argmin(losses))]
    assert 0 < np.argmin(losses) < len(INVERSE_PENALTIES) - 1  # neither end: the choice is a real one


def test_what_does_not_carry_over_is_penalised_most():
    x, y = split(80, 2)
    assert choose_penalty([((x, y), (x, 1 - y))], 2) == min(INVERSE_PENALTIES)
    assert choose_penalty([((x, y), (x, y))], 2) == max(INVERSE_PENALTIES)
