import math

import numpy as np
import pytest
import reference as slow
import torch
import torch.nn.functional as F

from sdmlm.estimator.adaptor import ExemplarAdaptor, balanced_loss, standardization, train_adaptor


def data(n=60, dim=6, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    x = rng.normal(size=(n, dim)) + 1.5 * np.eye(classes, dim)[y]
    return torch.from_numpy(x).float(), torch.from_numpy(y)


SETTINGS = {"exemplar_dim": 7, "epochs": 3, "batch_size": 16, "learning_rate": 1e-2, "center": "global"}


def train(train_data, calibration, classes=2, seed=0, **changes):
    return train_adaptor(
        train_data, calibration, classes, generator=torch.Generator().manual_seed(seed), **{**SETTINGS, **changes}
    )


def reference_training(train_data, calibration, classes, seed, exemplar_dim, epochs, batch_size, learning_rate, center):
    """The same training, written from the formulas: Conv1d, autograd through everything, plain Adam, loops for q and d."""
    (x, y), (x_ca, y_ca) = train_data, calibration
    mean = x.mean() if center == "global" else x.mean(dim=0)
    std = x.flatten().std() if center == "global" else x.std(dim=0)
    x, x_ca = ((x - mean) / std).double(), ((x_ca - mean) / std).double()
    dim = x.shape[1]
    generator = torch.Generator().manual_seed(seed)
    conv = torch.nn.Conv1d(1, exemplar_dim, dim).double()
    linear = torch.nn.Linear(exemplar_dim, classes).double()
    with torch.no_grad():
        for parameter, fan_in in (
            (conv.weight, dim),
            (conv.bias, dim),
            (linear.weight, exemplar_dim),
            (linear.bias, exemplar_dim),
        ):
            bound = 1 / math.sqrt(fan_in)
            draw = torch.rand(parameter.numel(), generator=generator) * (2 * bound) - bound
            parameter.copy_(draw.reshape(parameter.shape))
    optimizer = torch.optim.Adam([*conv.parameters(), *linear.parameters()], lr=learning_rate)

    def embed(v):
        h = conv(v[:, None, :]).squeeze(2)
        return h, linear(h)

    def signals(h, z, queries, z_queries, labels, own):
        guess, guess_q = z.argmax(1).tolist(), z_queries.argmax(1).tolist()
        found = [
            slow.similarity(h.tolist(), y.tolist(), guess, v, g, i if own else -1)
            for i, (v, g) in enumerate(zip(queries.tolist(), guess_q, strict=True))
        ]
        stored = [
            [d for (q, d), label in zip(found, labels.tolist(), strict=True) if label == c and q > 0]
            for c in range(classes)
        ]
        return [q for q, _ in found], [slow.distance_quantile(d, stored) for _, d in found]

    def losses(z, q, d, labels):
        return [slow.loss(row, qi, di, yi) for row, qi, di, yi in zip(z.tolist(), q, d, labels.tolist(), strict=True)]

    q, d = [math.e - 2] * len(x), [1.0] * len(x)
    best, history = (math.inf, None), []
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(batch_size):
            _, z = embed(x[batch])
            base = 2 + torch.tensor([q[i] for i in batch.tolist()], dtype=torch.float64)
            scale = torch.tensor([d[i] for i in batch.tolist()], dtype=torch.float64)[:, None] * base.log()[:, None]
            loss = (F.cross_entropy(z * scale, y[batch], reduction="none") / base.log()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            (h, z), (h_ca, z_ca) = embed(x), embed(x_ca)
            q, d = signals(h, z, h, z, y, own=True)
            if max(d) == 0:  # our convention: the first epoch's values go on where the gradient would be zero
                q, d = [math.e - 2] * len(x), [1.0] * len(x)
            q_ca, d_ca = signals(h, z, h_ca, z_ca, y_ca, own=False)
            each = losses(z_ca, q_ca, d_ca, y_ca)
            balanced = np.mean(
                [
                    np.mean([v for v, label in zip(each, y_ca.tolist(), strict=True) if label == c])
                    for c in range(classes)
                ]
            )
            history.append(balanced)
            if balanced < best[0]:
                best = balanced, (conv.weight.squeeze(1).clone(), linear.weight.clone())
    return best, history


@pytest.mark.parametrize("center", ["global", "feature"])
@pytest.mark.parametrize(
    ("classes", "batch_size"), [(2, 16), (3, 16), (5, 4)], ids=["2 classes", "3 classes", "more classes than rows"]
)
def test_training_equals_the_literal_version(center, classes, batch_size):
    training, calibration = data(40, classes=classes), data(30, classes=classes, seed=1)
    changes = {"center": center, "batch_size": batch_size}
    got = train(training, calibration, classes, **changes)
    (loss, weights), history = reference_training(training, calibration, classes, 0, **{**SETTINGS, **changes})
    np.testing.assert_allclose([row["calibration_loss"] for row in got.history], history, rtol=2e-3)
    assert got.loss == pytest.approx(loss, rel=2e-3)
    np.testing.assert_allclose(got.adaptor.weight, weights[0], atol=2e-4)
    np.testing.assert_allclose(got.adaptor.out_weight, weights[1], atol=2e-4)


def test_z_does_not_depend_on_the_batch_and_equals_the_two_layers():
    x, _ = data(50)
    adaptor = train(data(), data(seed=1)).adaptor
    h, z = adaptor(x)
    torch.testing.assert_close(z.float(), F.linear(h, adaptor.out_weight, adaptor.out_bias), rtol=1e-4, atol=1e-5)
    alone = torch.cat([adaptor(row[None])[1] for row in x])
    torch.testing.assert_close(alone, z, rtol=1e-13, atol=1e-13)


def test_the_best_epoch_is_kept():
    result = train(data(), data(seed=1), epochs=40, learning_rate=0.3)
    losses = [row["calibration_loss"] for row in result.history]
    assert result.loss == min(losses)
    assert losses[-1] > result.loss  # or the test shows nothing
    best = losses.index(result.loss) + 1
    again = train(data(), data(seed=1), epochs=best, learning_rate=0.3)
    assert torch.equal(again.adaptor.weight, result.adaptor.weight)


def test_cross_entropy_training_never_looks_at_q_or_d():
    class NoSupport:
        def __init__(self, *args):
            raise AssertionError

    result = train(data(), data(seed=1), loss="ce", make_support=NoSupport, epochs=30)
    x, y = data(seed=1)
    z = result.adaptor(x)[1]
    expected = np.mean([F.cross_entropy(z[y == c], y[y == c]).item() for c in range(2)])
    assert result.loss == pytest.approx(expected, rel=1e-4)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


def test_standardization():
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (50, 4)).astype(np.float32)
    x[:, 2] = 7.0
    mean, std = standardization(torch.from_numpy(x), "global")
    np.testing.assert_allclose((mean.item(), std.item()), (x.mean(), x.std(ddof=1)), rtol=1e-5)
    mean, std = standardization(torch.from_numpy(x), "feature")
    np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(std[[0, 1, 3]], x.std(axis=0, ddof=1)[[0, 1, 3]], rtol=1e-5)
    assert std[2] == 1.0
    tall = rng.normal(3, 2, (2**20 // 100 + 77, 100))  # more than is summed at a time
    mean, std = standardization(torch.from_numpy(tall), "feature")
    np.testing.assert_allclose(mean, tall.mean(axis=0), rtol=1e-10)
    np.testing.assert_allclose(std, tall.std(axis=0, ddof=1), rtol=1e-10)


def test_balanced_loss_weighs_classes_alike():
    losses, labels = torch.tensor([1.0, 3.0, 10.0]), torch.tensor([0, 0, 1])
    assert balanced_loss(losses, labels, 2) == pytest.approx((2.0 + 10.0) / 2)


def test_adaptor_standardizes():
    adaptor = ExemplarAdaptor(
        torch.tensor([2.0]),
        torch.tensor([4.0]),
        torch.eye(3),
        torch.ones(3),
        torch.ones(2, 3),
        torch.tensor([0.0, 1.0]),
    )
    h, z = adaptor(torch.tensor([[2.0, 6.0, 10.0]]))
    assert h.tolist() == [[1.0, 2.0, 3.0]]
    assert z.tolist() == [[6.0, 7.0]]


@pytest.mark.parametrize("seed", range(6))
def test_training_never_stays_at_zero_gradients(seed):
    """Far apart classes and a small learning rate: after the first epoch one class is never predicted, none of its points
    has q > 0, and by the rule as it stands d = 0 for all. Training must go on."""
    rng = np.random.default_rng(seed)
    y = torch.arange(100) % 2
    x = torch.from_numpy(rng.normal(size=(100, 8)) * 0.1).float() + 2.0 * (y[:, None] - 0.5)
    result = train((x, y), (x + 0.01, y), seed=seed, exemplar_dim=16, epochs=150, learning_rate=1e-3, batch_size=50)
    assert result.history[-1]["calibration_accuracy"] == 1.0
