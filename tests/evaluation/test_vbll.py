import math

import numpy as np
import torch
from toy_points import blobs

from sdmlm.evaluation.vbll import VBLL, lower_bound


def slow_bound(phi, y, mean, variance):
    total = 0.0
    for row, label in zip(phi, y, strict=True):
        logits = [sum(m * f for m, f in zip(ms, row, strict=True)) for ms in mean]
        spread = [sum(v * f * f for v, f in zip(vs, row, strict=True)) for vs in variance]
        total += logits[label] - math.log(sum(math.exp(z + s / 2) for z, s in zip(logits, spread, strict=True)))
    for ms, vs in zip(mean, variance, strict=True):
        total -= sum(0.5 * (m * m + v - 1 - math.log(v)) for m, v in zip(ms, vs, strict=True))
    return total


def test_the_bound_by_hand_and_below_the_expectation():
    rng = np.random.default_rng(0)
    phi, y = rng.normal(size=(7, 4)), rng.integers(0, 3, 7)
    mean, variance = rng.normal(size=(3, 4)), rng.uniform(0.1, 0.8, size=(3, 4))
    tensors = torch.from_numpy(phi), torch.from_numpy(y), torch.from_numpy(mean), torch.from_numpy(np.log(variance))
    bound = float(lower_bound(*tensors))
    np.testing.assert_allclose(bound, slow_bound(phi, y, mean, variance))
    weights = mean + np.sqrt(variance) * rng.normal(size=(20000, 3, 4))
    logits = np.einsum("scj,nj->snc", weights, phi)
    log_p = np.take_along_axis(logits, np.tile(y, (20000, 1))[:, :, None], 2)[:, :, 0] - np.log(np.exp(logits).sum(2))
    divergence = (0.5 * (mean**2 + variance - 1 - np.log(variance))).sum()
    expected = log_p.sum(axis=1).mean() - divergence
    assert expected - 20 < bound < expected


def test_the_fit_is_a_maximum():
    X, y = blobs(120, 3, gap=2.0)
    layer = VBLL().fit(X, y)
    phi, labels = layer._features(X.astype(np.float64)), torch.from_numpy(y)
    mean, log_variance = layer.mean_.clone().requires_grad_(), layer.log_variance_.clone().requires_grad_()
    lower_bound(phi, labels, mean, log_variance).backward()
    assert float(mean.grad.abs().max()) < 0.1
    assert float(log_variance.grad.abs().max()) < 0.1
    assert (layer.predict(X) == y).mean() > 0.8


def test_far_away_it_is_less_sure_than_the_mean_weights():
    X, y = blobs(200, 2, gap=3.0)
    layer = VBLL().fit(X, y)
    far = 50 * X[:20]
    phi = layer._features(far.astype(np.float64))
    plain = torch.softmax(phi @ layer.mean_.T, dim=1).min(dim=1).values.numpy()
    assert (layer.predict_proba(far).min(axis=1) > plain).all()
    np.testing.assert_allclose(layer.predict_proba(X).sum(axis=1), 1.0)


def test_any_labels():
    X, y = blobs(80, 2, gap=4.0)
    assert set(VBLL().fit(X, np.array(["no", "yes"])[y]).predict(X)) == {"no", "yes"}
