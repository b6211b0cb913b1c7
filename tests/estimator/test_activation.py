import math

import numpy as np
import pytest
import reference as slow
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdmlm.estimator.activation import (
    Q_SOFTMAX,
    full_precision,
    log_sdm,
    rescaled_similarity,
    sdm,
    sdm_loss,
    sdm_losses,
)

rows = st.integers(1, 5).flatmap(
    lambda c: st.tuples(
        st.lists(st.floats(-20, 20), min_size=c + 1, max_size=c + 1), st.integers(0, 5000), st.floats(0, 1)
    )
)


def one(z, q, d):
    return torch.tensor([z], dtype=torch.float64), torch.tensor([q]), torch.tensor([d], dtype=torch.float64)


@given(rows)
def test_matches_the_definition(row):
    z, q, d = row
    expected = np.array(slow.sdm(z, q, d))
    np.testing.assert_allclose(sdm(*one(z, q, d))[0], expected, rtol=1e-9, atol=1e-300)
    p_max = float(expected.max())
    assert rescaled_similarity(torch.tensor([q]), torch.tensor([p_max], dtype=torch.float64))[0] == pytest.approx(
        slow.q_prime(q, p_max), rel=1e-9
    )


@given(rows)
def test_outputs_are_a_distribution_and_keep_the_argmax(row):
    z, q, d = row
    p = sdm(*one(z, q, d))[0]
    assert float(p.sum()) == pytest.approx(1.0)
    assert float(p[int(np.argmax(z))]) == pytest.approx(float(p.max()))


@given(rows, st.integers(0, 10**6))
def test_loss_matches_the_definition(row, pick):
    z, q, d = row
    z = [v / 4 for v in z]  # keeps the plain powers from underflowing in the slow version
    y = pick % len(z)
    assert float(sdm_loss(*one(z, q, d), torch.tensor([y]))) == pytest.approx(  # type: ignore[call-arg]
        slow.loss(z, q, d, y), rel=1e-9, abs=1e-12
    )


def test_first_epoch_values_give_softmax_and_cross_entropy():
    z = torch.randn(7, 3, dtype=torch.float64)
    q, d, y = torch.full((7,), Q_SOFTMAX, dtype=torch.float64), torch.ones(7), torch.arange(7) % 3
    torch.testing.assert_close(sdm(z, q, d), torch.softmax(z, dim=1))
    torch.testing.assert_close(sdm_loss(z, q, d, y), torch.nn.functional.cross_entropy(z, y))


def test_loss_is_the_mean_and_its_gradient_is_right():
    z = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    q, d, y = torch.tensor([0, 1, 5, 100, 2048, 10**6]), torch.rand(6, dtype=torch.float64), torch.arange(6) % 4
    torch.testing.assert_close(sdm_loss(z, q, d, y), sdm_losses(z, q, d, y).mean())
    assert torch.autograd.gradcheck(lambda v: sdm_loss(v, q, d, y), (z,))
    # d/dz_i of -log_b softmax(z d ln b)_y is d (p_i - [i = y]): the ln b cancels.
    (gradient,) = torch.autograd.grad(sdm_losses(z, q, d, y).sum(), z)
    expected = d[:, None] * (sdm(z, q, d) - torch.nn.functional.one_hot(y, 4))
    torch.testing.assert_close(gradient, expected)


def test_no_gradient_flows_through_q_or_d():
    q, d = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    z = torch.randn(2, 2, requires_grad=True)
    sdm_loss(z, q, d, torch.tensor([0, 1])).backward()
    assert z.grad is not None
    assert q.grad is None
    assert d.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stable_for_extreme_values(dtype):
    big = torch.finfo(dtype).max
    z = torch.tensor([[big, -big], [1e4, -1e4], [big, -big], [0.0, 0.0]], dtype=dtype, requires_grad=True)
    q, d = torch.tensor([10**9, 10**9, 10**9, 0]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    p = sdm(z, q, d)
    assert torch.equal(p, torch.tensor([[1, 0], [1, 0], [0.5, 0.5], [0.5, 0.5]], dtype=dtype))
    assert not log_sdm(z, q, d).isnan().any()
    losses = sdm_losses(z, q, d, torch.zeros(4, dtype=torch.long))
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
    # The wrong class: the loss is d times the difference of z, whatever the base.
    wrong = sdm_losses(z, q, d, torch.ones(4, dtype=torch.long)).detach()
    assert float(wrong[1]) == pytest.approx(2e4, rel=1e-5)


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_rescaled_similarity_bounds(q, p, other):
    value = float(rescaled_similarity(torch.tensor([q]), torch.tensor([p], dtype=torch.float64))[0])
    assert 0 <= value <= q
    if p <= other:
        assert value <= float(rescaled_similarity(torch.tensor([q]), torch.tensor([other], dtype=torch.float64))[0])
    if q == 0:
        assert value == 0


def test_log_base():
    z, q, d = torch.tensor([[0.3, -1.0]]).double(), torch.tensor([6]), torch.tensor([0.5])
    assert float(log_sdm(z, q, d)[0, 1]) == pytest.approx(math.log(float(sdm(z, q, d)[0, 1]), 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_large_q(dtype):
    p = sdm(torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([100_000]), torch.tensor([1.0]))
    assert float(p[0, 0]) == pytest.approx(1.0)
    assert float(rescaled_similarity(torch.tensor([2049]), torch.tensor([1.0], dtype=dtype))[0]) == 2049.0


def test_a_callers_tf32_is_off_while_we_compute(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with full_precision():
            assert matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
        assert matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)
