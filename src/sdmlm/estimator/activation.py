"""The SDM activation, its loss and the rescaled similarity q' (docs/method.md, section 3).

Shapes: z (N, C), q (N,), d (N,), y (N,). Everything is differentiable in z; no gradient flows through q or d.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

# q of the first training epoch: 2 + q = e, and with d = 1 the SDM activation is softmax.
Q_SOFTMAX = 2.718281828459045 - 2.0

_DEVICES = ("cpu", "cuda", "mps", "xpu")  # devices with autocast


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute in the precision of the tensors, also if the caller uses autocast to half precision, or TF32 on a GPU."""
    gpu, rounded = torch.cuda.is_available(), [kind for kind in _DEVICES if torch.is_autocast_enabled(kind)]
    if not gpu and not rounded:  # nothing to change: this is entered a dozen times for a single point
        yield
        return
    with contextlib.ExitStack() as stack:
        if gpu:
            stack.enter_context(_without_tf32())
        for kind in rounded:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    name, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, name)
    setattr(matmul, name, exact)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def _log_base(z: Tensor, q: Tensor) -> Tensor:
    """ln(2 + q), in the precision of z; q itself may be too large for that."""
    return torch.log(2.0 + q.detach().double()).to(z.dtype)


def _scaled(z: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """(z - max z) d ln(2+q): subtracting the maximum of a row does not change the softmax, and avoids overflow."""
    shifted = z - z.detach().amax(dim=-1, keepdim=True)
    # The clamp keeps d = 0 times a difference too large for the dtype at 0 instead of NaN.
    shifted = shifted.clamp(min=torch.finfo(z.dtype).min)
    return shifted * (d.detach().to(z.dtype) * _log_base(z, q)).unsqueeze(-1)


def sdm(z: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """SDM(z)_i = (2+q)^(d z_i) / sum_c (2+q)^(d z_c); (N, C). q = e-2 and d = 1 give softmax.

    >>> sdm(torch.tensor([[1.0, 0.0]]), q=torch.tensor([2.0]), d=torch.tensor([1.0]))
    tensor([[0.8000, 0.2000]])
    """
    return torch.softmax(_scaled(z, q, d), dim=-1)


def log_sdm(z: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """log_(2+q) SDM(z): the logarithm to base 2+q; (N, C)."""
    return torch.log_softmax(_scaled(z, q, d), dim=-1) / _log_base(z, q).unsqueeze(-1)


def sdm_losses(z: Tensor, q: Tensor, d: Tensor, y: Tensor) -> Tensor:
    """-log_(2+q) SDM(z)_y of each row; (N,)."""
    return -log_sdm(z, q, d).gather(-1, y.long().unsqueeze(-1)).squeeze(-1)


def sdm_loss(z: Tensor, q: Tensor, d: Tensor, y: Tensor) -> Tensor:
    """The mean of -log_(2+q) SDM(z)_y over the batch."""
    return sdm_losses(z, q, d, y).mean()


def rescaled_similarity(q: Tensor, p_predicted: Tensor) -> Tensor:
    """q' = min(q, (2+q)^p) with p the SDM output at the predicted class; (N,). q = 0 gives 0."""
    wide = torch.promote_types(p_predicted.dtype, torch.float32)  # half precision cannot count to 2,049
    q, p = q.to(wide), p_predicted.to(wide)
    return torch.minimum(q, (2.0 + q) ** p)
