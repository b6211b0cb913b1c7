"""The SDM next-token loss, from logits and from hidden states, against a version in plain Python."""

from __future__ import annotations

import math

import pytest
import reference as slow
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from sdmlm.finetuning.loss import LogitTransform, output_head, sdm_loss_from_hidden, sdm_next_token_loss


def batch(seed: int, b: int = 3, length: int = 7, h: int = 5, v: int = 11, share: float = 0.4) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(b, length, h, generator=g), torch.randn(v, h, generator=g)
    labels = torch.randint(0, v, (b, length), generator=g)
    labels[torch.rand(b, length, generator=g) > share] = -100
    return hidden, weight, torch.randn(v, generator=g), labels, 2 + torch.rand(b, generator=g)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), share=st.floats(0.05, 1), num_items=st.none() | st.integers(1, 50))
def test_both_forms_equal_the_plain_version(seed: int, share: float, num_items: int | None) -> None:
    hidden, weight, bias, labels, base = batch(seed, share=share)
    total, count = slow.next_token_loss(F.linear(hidden, weight, bias), labels, base)
    expected = total / (num_items or max(count, 1))
    plain = sdm_next_token_loss(F.linear(hidden, weight, bias), labels, base, num_items)
    chunked = sdm_loss_from_hidden(hidden, weight, labels, base, num_items, bias, chunk=2)
    assert plain.item() == pytest.approx(expected, rel=1e-5)
    assert chunked.item() == pytest.approx(expected, rel=1e-5)


def test_base_e_is_cross_entropy() -> None:
    hidden, weight, _, labels, base = batch(0)
    logits = hidden @ weight.T
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1))
    e = torch.full_like(base, math.e)
    torch.testing.assert_close(sdm_next_token_loss(logits, labels, e), expected)
    torch.testing.assert_close(sdm_loss_from_hidden(hidden, weight, labels, e), expected)


def test_each_document_has_its_own_base() -> None:
    hidden, weight, _, labels, base = batch(1, share=1.0)
    logits = hidden @ weight.T
    alone = [sdm_next_token_loss(logits[n : n + 1], labels[n : n + 1], base[n : n + 1]) for n in range(3)]
    torch.testing.assert_close(sdm_next_token_loss(logits, labels, base), torch.stack(alone).mean())
    others = [sdm_next_token_loss(logits[:1], labels[:1], base[n : n + 1]).item() for n in range(3)]
    assert len({round(loss, 5) for loss in others}) == 3


TRANSFORMS = [LogitTransform(), LogitTransform(0.25), LogitTransform(softcap=1.5), LogitTransform(3.0, 2.0)]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), chunk=st.sampled_from([1, 3, 100, None]), num_items=st.sampled_from([None, 17]))
def test_gradients_equal_the_plain_version(
    transform: LogitTransform, seed: int, chunk: int | None, num_items: int | None
) -> None:
    hidden, weight, bias, labels, base = batch(seed)
    grads = []
    for fused in (False, True):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        h, w, b = leaves
        if fused:
            loss = sdm_loss_from_hidden(h, w, labels, base, num_items, b, transform, chunk)
        else:
            x = F.linear(h, w, b) * transform.scale
            z = x if transform.softcap is None else transform.softcap * torch.tanh(x / transform.softcap)
            loss = sdm_next_token_loss(z, labels, base, num_items)
        (3 * loss).backward()
        grads.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for plain, fused_grad in zip(*grads, strict=True):
        torch.testing.assert_close(fused_grad, plain, rtol=1e-4, atol=1e-6)


def test_gradients_equal_finite_differences() -> None:
    """Not only equal to each other: equal to the slope of the plain Python version."""
    hidden, weight, _, labels, base = batch(5, share=0.8)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    sdm_loss_from_hidden(hidden, weight, labels, base, num_items=1).backward()
    for leaf, index in ((hidden, (0, 2, 1)), (hidden, (2, 0, 4)), (weight, (3, 2))):
        values = []
        for step in (1e-3, -1e-3):
            h, w = hidden.detach().double(), weight.detach().double()
            (h if leaf is hidden else w)[index] += step
            values.append(slow.next_token_loss(h @ w.T, labels, base)[0])
        assert leaf.grad is not None
        assert leaf.grad[index].item() == pytest.approx((values[0] - values[1]) / 2e-3, rel=1e-3, abs=1e-5)


def test_no_gradient_reaches_the_base_or_what_is_frozen() -> None:
    hidden, weight, _, labels, base = batch(2)
    base, hidden = base.requires_grad_(), hidden.requires_grad_()
    for loss in (
        sdm_next_token_loss(hidden @ weight.T, labels, base),
        sdm_loss_from_hidden(hidden, weight, labels, base),
    ):
        loss.backward()
    assert base.grad is None
    assert weight.grad is None
    assert hidden.grad is not None


def test_nothing_counts() -> None:
    hidden, weight, _, labels, base = batch(3)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    labels = torch.full_like(labels, -100)
    labels[:, 0] = 1  # a first token has no prediction
    loss = sdm_loss_from_hidden(hidden, weight, labels, base)
    assert loss.item() == sdm_next_token_loss(hidden @ weight.T, labels, base).item() == 0
    loss.backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_second_backward_pass_is_refused_rather_than_wrong() -> None:
    hidden, weight, _, labels, base = batch(4)
    loss = sdm_loss_from_hidden(hidden.requires_grad_(), weight, labels, base)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Sizes(TorchDispatchMode):
    """Notes the largest tensor with a vocabulary dimension that any operation makes."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.shape and tensor.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return out


def test_never_more_logits_than_a_chunk() -> None:
    hidden, weight, bias, labels, base = batch(6, b=8, length=50, v=101, share=0.3)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    saved: list[int] = []
    with (
        Sizes(101) as sizes,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t),
    ):
        sdm_loss_from_hidden(hidden, weight, labels, base, bias=bias, chunk=16).backward()
    assert sizes.rows <= 16
    assert max(saved) <= max(leaf.numel() for leaf in leaves)
    assert sum(saved) < 2 * sum(leaf.numel() for leaf in leaves)
    with Sizes(101) as sizes:  # the witness sees the plain version
        sdm_next_token_loss(hidden @ weight.T, labels, base)
    assert sizes.rows == 400


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(autocast: bool) -> None:
    hidden, weight, _, labels, base = batch(7, b=8, length=40, h=16, v=50)
    dtype = torch.float32 if autocast else torch.bfloat16
    h, w = (t.clone().to(dtype).requires_grad_() for t in (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = sdm_loss_from_hidden(h, w, labels, base, chunk=8)
    loss.backward()
    exact_h, exact_w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    exact = sdm_next_token_loss(exact_h @ exact_w.T, labels, base)
    exact.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    for ours, theirs in ((h.grad, exact_h.grad), (w.grad, exact_w.grad)):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == dtype
        assert (ours.float() - theirs).norm() < 0.02 * theirs.norm()


SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(**SMALL), LogitTransform()),
        (Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.5), LogitTransform(softcap=0.5)),
        (CohereConfig(**SMALL, logit_scale=0.0625), LogitTransform(0.0625)),
        (GraniteConfig(**SMALL, logits_scaling=8.0), LogitTransform(0.125)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_output_head_gives_the_models_own_loss(config: object, expected: LogitTransform) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    head, transform = output_head(model)
    assert transform == expected
    assert model.training
    ids = torch.arange(20).view(2, 10)
    labels = ids.masked_fill(ids % 3 == 0, -100)
    hidden = model.get_decoder()(input_ids=ids).last_hidden_state
    loss = sdm_loss_from_hidden(
        hidden, head.weight, labels, torch.full((2,), math.e), bias=head.bias, transform=transform
    )
    torch.testing.assert_close(loss, model(input_ids=ids, labels=labels).loss)


def test_output_head_refuses_what_it_does_not_know() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    plain = model.forward

    def odd(*args: object, **kwargs: object) -> object:
        out = plain(*args, **kwargs)
        out.logits = out.logits.exp()
        return out

    model.forward = odd
    with pytest.raises(ValueError, match="LlamaForCausalLM changes its logits"):
        output_head(model)

    class Wrapped(torch.nn.Linear):
        pass

    model.set_output_embeddings(Wrapped(16, 40))
    with pytest.raises(ValueError, match=r"is test_loss\.Wrapped, not torch\.nn\.Linear"):
        output_head(model)
