"""Running our own code inside the forward pass of a language model, wrapped or not, on one process or several.

DDP and FSDP handle only what goes through the forward of the module they wrap; only there is a sharded output embedding
complete. So `allow_inside` gives a Hugging Face causal LM one more argument: `model(inside=f)` calls f(lm) instead of its
forward, and returns what f returns. Without the argument nothing changes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Settings of a config that make a pass in training mode random. Those of heads that a causal LM does not have are ignored.
_RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")
_OTHER_HEADS = ("summary_", "classifier_")


def inner_lm(model: Any) -> Any:
    """The Hugging Face causal LM inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def allow_inside(model: Any) -> None:
    """Let `model(inside=f)` run f(lm) in place of the LM's forward. Further calls change nothing."""
    lm = inner_lm(model)
    # Marked on the LM and not on its forward, which Accelerate may have wrapped since (autocast).
    if getattr(lm, "_allows_inside", False):
        return
    if not isinstance(lm.forward, types.MethodType):  # Accelerate has put a hook around it
        raise ValueError(
            "The model is spread over several devices, or partly on disk (device_map): load it onto one device."
        )
    plain = lm.forward.__func__

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, inside: Any = None, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs) if inside is None else inside(self)

    lm.forward = types.MethodType(forward, lm)
    lm._allows_inside = True


def call_inside(model: Any, function: Callable[[Any], Any]) -> Any:
    """function(lm) inside the model's forward pass, or directly for a plain model without `allow_inside`."""
    lm = inner_lm(model)
    if hasattr(lm, "get_decoder") and not getattr(lm, "_allows_inside", False):
        return function(lm)
    return model(inside=function)


def has_dropout(model: Any) -> bool:
    """Whether a forward pass in training mode is random."""
    config = inner_lm(model).config.get_text_config().to_dict()
    named = [
        value
        for key, value in config.items()
        if any(part in key for part in _RANDOM) and not key.startswith(_OTHER_HEADS) and isinstance(value, float)
    ]
    modules = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    return any(p > 0 for p in [*named, *modules])


def states_of(lm: Any, batch: dict[str, Tensor]) -> Tensor:
    """Final-layer states (B, L, H) of a padded batch; the output embedding is not applied."""
    decoder = lm.get_decoder()
    states: Tensor = decoder(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).last_hidden_state
    return states


def logits_and_states_of(lm: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The model's own logits (B, L, V), and its final-layer states."""
    out = type(lm).forward(
        lm,
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        output_hidden_states=True,
        use_cache=False,
    )
    return out.logits, out.hidden_states[-1]
