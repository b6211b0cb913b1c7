"""The exemplar adaptor and its training (docs/method.md, 3.1 and 3.3).

h is standardised, h' = g(h) is affine (the published 1-D CNN has kernel width D, so it is applied once: a dense layer),
and z' is affine in h'. Without a non-linearity in between, z' = (U W) h + (U b + c): training needs h' only once per epoch,
for q and d, and not in its steps. So a step takes little longer than its Adam update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from sdmlm.estimator.activation import Q_SOFTMAX, full_precision, sdm_losses
from sdmlm.estimator.region import DistanceCDF
from sdmlm.estimator.support import SupportSet

MakeSupport = Callable[[Tensor, Tensor, Tensor], SupportSet]  # (vectors, labels, predictions)


@dataclass
class ExemplarAdaptor:
    """h -> h' -> z'. `mean` and `std` have one entry (center="global") or D (center="feature")."""

    mean: Tensor
    std: Tensor
    weight: Tensor  # W (M, D)
    bias: Tensor  # b (M,)
    out_weight: Tensor  # U (C, M)
    out_bias: Tensor  # c (C,)
    _direct: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def standardize(self, x: Tensor) -> Tensor:
        return (x - self.mean).div_(self.std)

    @full_precision()
    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(h' (N, M) float32, z' (N, C) float64) of raw vectors x (N, D).

        z' is computed from h directly, in double precision, so that it does not depend on the batch.
        """
        if self._direct is None:
            weight, bias = self.out_weight.double(), self.bias.double()
            self._direct = weight @ self.weight.double(), weight @ bias + self.out_bias.double()
        h = self.standardize(x)
        # Few rows at a time: their doubles stay in the cache.
        z = torch.cat([F.linear(part.double(), *self._direct) for part in h.split(64)])
        return F.linear(h, self.weight, self.bias), z


@dataclass(frozen=True)
class Training:
    """A trained adaptor, its balanced calibration loss, and losses and accuracy of every epoch."""

    adaptor: ExemplarAdaptor
    loss: float
    history: list[dict[str, float]]


def standardization(x: Tensor, center: str) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (n-1) of the training matrix: one scalar each ("global") or per column ("feature")."""
    columns = x.reshape(-1, 1) if center == "global" else x
    n, step = len(columns), max(1, 2**20 // columns.shape[1])
    # Sums in double precision, a slice at a time: no double copy of the matrix.
    mean = torch.stack([part.double().sum(dim=0) for part in columns.split(step)]).sum(dim=0) / n
    squares = [(part.double() - mean).square().sum(dim=0) for part in columns.split(step)]
    std = (torch.stack(squares).sum(dim=0) / max(1, n - 1)).sqrt()
    # A constant column has standard deviation 0; it is divided by 1, so it becomes 0.
    std = torch.where(std > 0, std, torch.ones_like(std))
    return mean.to(x.dtype), std.to(x.dtype)


def balanced_loss(losses: Tensor, labels: Tensor, n_classes: int) -> float:
    """The mean over classes of the class's mean loss."""
    sums = torch.zeros(n_classes, dtype=torch.float64, device=losses.device).index_add_(0, labels, losses.double())
    return float((sums / torch.bincount(labels, minlength=n_classes)).mean())


@torch.inference_mode(False)  # also in a caller's inference mode: optimizers need ordinary tensors
@full_precision()
def train_adaptor(
    train: tuple[Tensor, Tensor],
    calibration: tuple[Tensor, Tensor],
    n_classes: int,
    *,
    exemplar_dim: int,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    center: str,
    generator: torch.Generator,
    make_support: MakeSupport = SupportSet,
    loss: str = "sdm",
    on_epoch: Callable[[dict[str, float]], None] | None = None,
) -> Training:
    """Train g and the linear layer; keep the epoch with the lowest balanced calibration loss.

    `train` and `calibration` are (x (N, D), y (N,)). The first epoch uses q = e-2 and d = 1, which is cross-entropy; after
    every epoch q and d of both splits are recomputed (if all d are 0 then, the values of the first epoch are kept). With
    loss="ce", for the adaptor of the baselines, they are never recomputed. `generator` (on the CPU) draws the initial
    weights and the order of the batches.
    """
    (x, y), (x_ca, y_ca) = train, calibration
    mean, std = standardization(x, center)
    x, x_ca = (x - mean) / std, (x_ca - mean) / std
    n, dim, device = len(x), x.shape[1], x.device

    def uniform(rows: int, columns: int, fan_in: int) -> Tensor:  # the default initialisation of Conv1d and Linear
        bound = 1.0 / math.sqrt(fan_in)
        return (torch.rand(rows, columns, generator=generator, dtype=torch.float32) * (2 * bound) - bound).to(device)

    weight, bias = uniform(exemplar_dim, dim, dim), uniform(1, exemplar_dim, dim).squeeze(0)
    out_weight, out_bias = (
        uniform(n_classes, exemplar_dim, exemplar_dim),
        uniform(1, n_classes, exemplar_dim).squeeze(0),
    )
    parameters = [weight, bias, out_weight, out_bias]
    for parameter in parameters:
        # The gradient buffers are kept: allocating them in every step would take longer than filling them.
        parameter.requires_grad_().grad = torch.zeros_like(parameter)
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, fused=device.type in ("cpu", "cuda"))
    weights = [parameter.detach() for parameter in parameters]  # the same memory, outside autograd

    first = (
        torch.full((n,), Q_SOFTMAX, dtype=torch.float32, device=device),
        torch.ones(n, dtype=torch.float32, device=device),
    )
    q, d = first
    best = [w.clone() for w in weights]
    best_loss, history = math.inf, []
    own_entry = torch.arange(n, device=device)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for batch in torch.randperm(n, generator=generator).to(device).split(batch_size):
            total += _step(optimizer, weights, x[batch], q[batch], d[batch], y[batch]) * len(batch)
        h_ca = F.linear(x_ca, weights[0], weights[1])
        if not (math.isfinite(total) and bool(h_ca.sum().isfinite())):
            raise ValueError(f"Training diverged in epoch {epoch}: lower the learning rate, now {learning_rate:g}.")
        z_ca = F.linear(h_ca, weights[2], weights[3])
        q_ca, d_ca = torch.full_like(z_ca[:, 0], Q_SOFTMAX), torch.ones_like(z_ca[:, 0])
        if loss == "sdm":
            h = F.linear(x, weights[0], weights[1])
            predictions = F.linear(h, weights[2], weights[3]).argmax(dim=1)
            support = make_support(h, y, predictions)
            match = support.query(h, predictions, exclude=own_entry)
            d = DistanceCDF.fit(match.d_nearest, y, match.q, n_classes).quantile(match.d_nearest).float()
            q = match.q
            if not bool((d > 0).any()):
                # Some class has no training point with q > 0. Then d = 0 everywhere, all gradients are zero, and training
                # would never recover. Use the q and d of the first epoch until each class has such a point. This affects
                # training only, not the calibration losses that choose the best epoch.
                q, d = first
            match_ca = support.query(h_ca, z_ca.argmax(dim=1))
            d_ca = DistanceCDF.fit(match_ca.d_nearest, y_ca, match_ca.q, n_classes).quantile(match_ca.d_nearest).float()
            q_ca = match_ca.q
        calibration_loss = balanced_loss(sdm_losses(z_ca, q_ca, d_ca, y_ca), y_ca, n_classes)
        row = {
            "epoch": epoch,
            "train_loss": total / n,
            "calibration_loss": calibration_loss,
            "calibration_accuracy": float((z_ca.argmax(dim=1) == y_ca).double().mean()),
        }
        history.append(row)
        if calibration_loss < best_loss:
            best_loss = calibration_loss
            for kept, w in zip(best, weights, strict=True):
                kept.copy_(w)
        if on_epoch is not None:
            on_epoch(row)
    if not math.isfinite(best_loss):
        raise ValueError(
            f"Training diverged (no epoch has a finite loss): lower the learning rate, now {learning_rate:g}."
        )
    return Training(ExemplarAdaptor(mean, std, *best), best_loss, history)


def _step(optimizer: torch.optim.Optimizer, weights: list[Tensor], x: Tensor, q: Tensor, d: Tensor, y: Tensor) -> float:
    """One Adam step on the mean SDM loss of a batch; returns that loss.

    Autograd is used for z' only; the gradients of the weights follow by a few products. With fewer classes than rows, z' is
    computed by the product U W (C, D), without a tensor of size (batch, M).
    """
    weight, bias, out_weight, out_bias = weights
    composed = len(out_weight) <= len(x)
    if composed:
        z = F.linear(x, out_weight @ weight, out_weight @ bias + out_bias)
    else:
        h = F.linear(x, weight, bias)
        z = F.linear(h, out_weight, out_bias)
    with torch.enable_grad():  # also if the caller has switched gradients off
        loss = sdm_losses(z.requires_grad_(), q, d, y).mean()
        (g,) = torch.autograd.grad(loss, z)
    g_weight, g_bias, g_out_weight, g_out_bias = (p.grad for p in optimizer.param_groups[0]["params"])
    torch.sum(g, dim=0, out=g_out_bias)
    torch.mv(out_weight.T, g_out_bias, out=g_bias)
    if composed:
        g_direct = g.T @ x
        torch.mm(out_weight.T, g_direct, out=g_weight)
        torch.addmm(torch.outer(g_out_bias, bias), g_direct, weight.T, out=g_out_weight)
    else:
        torch.mm((g @ out_weight).T, x, out=g_weight)
        torch.mm(g.T, h, out=g_out_weight)
    optimizer.step()
    return loss.item()
