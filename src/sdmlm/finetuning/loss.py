"""The SDM next-token loss (equation 1 of the paper; docs/method.md, section 4).

For a token of document n with logits z and base b_n the loss is -log_b softmax_b(z) = crossentropy(z ln b_n) / ln b_n,
summed over the tokens that count and divided by their number; b_n = e gives cross-entropy. No gradient flows through b.

There are two forms with the same value and gradient: from logits, and from hidden states. With contrastive masking most
positions have no loss. The second form applies the output embedding only to those that have one, chunk by chunk, and
computes the gradients of a chunk before the next, so the logits of all positions are never in memory together.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from sdmlm.language_model.encoding import IGNORED
from sdmlm.language_model.forward import inner_lm

CHUNK_NUMEL = 2**24  # logits of one chunk: 64 MiB in float32


def sdm_next_token_loss(logits: Tensor, labels: Tensor, base: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Loss of logits (B, L, V) and unshifted labels (B, L) with one base per document (B,).

    The sum is divided by `num_items`, the tokens with a loss in the global batch; default: those in this batch.
    """
    logits, labels = logits[:, :-1], labels[:, 1:]
    log_base = base.detach().float().log()[:, None]
    tokens = F.cross_entropy(
        (logits.float() * log_base[..., None]).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(labels.shape)
    return (tokens / log_base).sum() / _divisor(labels, num_items)


def _divisor(shifted_labels: Tensor, num_items: Tensor | int | None) -> Tensor | int:
    # A batch in which no token counts has loss 0, not nan.
    return (shifted_labels != IGNORED).sum().clamp_min(1) if num_items is None else num_items


@dataclass(frozen=True)
class LogitTransform:
    """How a model changes the logits of its output embedding: cap * tanh(scale * x / cap), or scale * x without a cap."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.softcap is None else torch.tanh(x / self.softcap) * self.softcap

    def backward(self, z: Tensor, grad: Tensor) -> Tensor:
        """Gradient with respect to x, from the transformed z; `grad` is overwritten."""
        if self.softcap is not None:
            grad *= 1 - (z / self.softcap).square()
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


def sdm_loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    base: Tensor,
    num_items: Tensor | int | None = None,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    chunk: int | None = None,
) -> Tensor:
    """`sdm_next_token_loss` of final-layer hidden states (B, L, H) under an output embedding (V, H).

    `chunk` tokens are processed at a time (default: as many as have logits of 64 MiB).
    """
    shifted = labels[:, 1:]
    row, position = (shifted != IGNORED).nonzero(as_tuple=True)
    loss: Tensor = _LinearSDMLoss.apply(  # type: ignore[no-untyped-call]
        hidden[row, position],
        weight,
        bias,
        shifted[row, position],
        base.detach().float().log()[row],
        transform or LogitTransform(),
        chunk or max(1, CHUNK_NUMEL // weight.shape[0]),
        torch.is_grad_enabled(),
    )
    return loss / _divisor(shifted, num_items)


def output_head(model: Any) -> tuple[torch.nn.Linear, LogitTransform]:
    """The output embedding of a Hugging Face causal LM, and how the model changes its logits, for the function above.

    The factor is looked up under the names that it has in configs, and the result is compared with the model's own logits
    on a short input. A model that does something else is refused: use its logits with `sdm_next_token_loss`.
    """
    head = model.get_output_embeddings()
    name = type(model).__name__
    if type(head) is not torch.nn.Linear:  # a subclass or wrapper (LoRA, 4-bit) does more than multiply and add
        kind = f"{type(head).__module__}.{type(head).__name__}"
        raise ValueError(f"The output embedding of {name} is {kind}, not torch.nn.Linear: use the plain loss.")
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    named = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
    scales = [1.0, *(s for key in named if (v := getattr(config, key, None)) for s in (float(v), 1 / float(v)))]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids = torch.arange(8, device=head.weight.device)[None] % head.weight.shape[0]
            hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            own = model(input_ids=ids, use_cache=False).logits.float()
            ours = F.linear(hidden, head.weight, head.bias).float()
    finally:
        model.train(was_training)
    error, transform = min(
        (((t := LogitTransform(scale, softcap))(ours) - own).abs().max().item(), n, t) for n, scale in enumerate(scales)
    )[::2]
    if error > 0.02 * own.abs().max().item():  # well above bfloat16's rounding
        raise ValueError(f"{name} changes its logits in a way that sdmlm does not know: use the plain loss.")
    return head, transform


def shared_logit_transform(accelerator: Accelerator, model: Any) -> LogitTransform | None:
    """How the model changes its logits; None if only the model itself can apply its output embedding.

    The main process determines it and sends it to the others, which may hold no weights yet (FSDP, memory-efficient
    loading).
    """
    transform: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            transform = [output_head(inner_lm(model))[1]]
        except ValueError as error:
            warnings.warn(f"{error} The loss is taken from full logits, which costs memory.", stacklevel=3)
    if accelerator.num_processes > 1:
        broadcast_object_list(transform)
    return transform[0]  # type: ignore[no-any-return]


class _LinearSDMLoss(torch.autograd.Function):
    """Sum of the token losses. Gradients are computed in the forward pass, chunk by chunk, and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        log_base: Tensor,
        transform: LogitTransform,
        chunk: int,
        grad_enabled: bool,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = (grad_enabled and n for n in ctx.needs_input_grad[:3])
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Summed over chunks in float32: in bfloat16 small terms would be lost.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias and bias is not None else None
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            h, target, log_b = hidden[part], targets[part, None], log_base[part, None]
            raw = F.linear(h, weight, bias)  # under autocast in the lower precision, as are the products below
            z = transform(raw.float())
            log_p = torch.log_softmax(z * log_b, dim=1)
            total -= (log_p.gather(1, target) / log_b).sum()
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            # d/dz of crossentropy(z ln b) / ln b is softmax(z ln b) - onehot: ln b cancels.
            grad = log_p.exp_().scatter_add_(1, target, torch.full_like(log_b, -1.0))
            grad = transform.backward(z, grad)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.to(raw.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None and raw.dtype == torch.float32:
                grad_weight.addmm_(grad.T, h)
            elif grad_weight is not None:
                grad_weight += grad.T @ h
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # In place: these are large and used once (autograd itself refuses a second pass over changed tensors).
        grads = (None if g is None else g.mul_(grad_output) for g in ctx.saved_tensors)
        return (*grads, None, None, None, None, None)
