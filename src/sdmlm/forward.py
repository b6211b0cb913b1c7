"""Running our own code inside the forward pass of a language model, wrapped or not, on one process or several.

DDP and FSDP see only what goes through the forward of the module they wrap; a sharded output embedding exists nowhere else.
So `allow_inside` gives a Hugging Face causal LM one more argument: `model(inside=f)` calls f(lm) where its forward would
run, and returns what f returns. Without the argument nothing changes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from sdmlm.encoding import IGNORED, Encoded, collate
from sdmlm.progress import track
from sdmlm.summary import batches_by_length, summarize


def inner_lm(model: Any) -> Any:
    """The Hugging Face causal LM inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def allow_inside(model: Any) -> None:
    """Let `model(inside=f)` run f(lm) in place of the LM's forward; done once, however often it is called."""
    lm = inner_lm(model)
    if getattr(lm.forward, "_allows_inside", False):
        return
    plain = lm.forward.__func__

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, inside: Any = None, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs) if inside is None else inside(self)

    forward._allows_inside = True  # type: ignore[attr-defined]
    lm.forward = types.MethodType(forward, lm)


def has_dropout(model: Any) -> bool:
    """Whether a forward pass in training mode is random."""
    lm = inner_lm(model)
    config = lm.config.get_text_config().to_dict()
    named = [v for k, v in config.items() if ("dropout" in k or "pdrop" in k) and isinstance(v, float)]
    modules = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    return any(p > 0 for p in [*named, *modules])


def states_of(lm: Any, batch: dict[str, Tensor]) -> Tensor:
    """Final-layer states (B, L, H) of a padded batch; the output embedding is not applied."""
    decoder = lm.get_decoder()
    states: Tensor = decoder(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).last_hidden_state
    return states


@dataclass
class CountedStates:
    """The states that predict a counted token, of the documents this process has read: what a loss needs later."""

    states: Tensor  # (T, H)
    targets: Tensor  # (T,)
    documents: Tensor  # (T,): which document each belongs to


def read_documents(
    model: Any,
    documents: Sequence[Encoded],
    pad_id: int,
    tokens_per_batch: int,
    rank: int = 0,
    world: int = 1,
    keep_states: bool = False,
    progress: bool = False,
) -> tuple[Tensor, CountedStates | None]:
    """h of every document (N, 2H) on every process, from one pass, in evaluation mode.

    The batches are shared out over the processes; each makes the same number of calls, which FSDP needs. With
    `keep_states` the states at counted positions come along, so that a loss can be taken without a second pass.
    """
    batches = batches_by_length([len(d.input_ids) for d in documents], tokens_per_batch)
    own = batches[rank::world]
    calls = -(-len(batches) // world)
    found: list[tuple[list[int], Tensor]] = []
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for n in track(range(calls), "Reading documents", progress):
                members = own[n] if n < len(own) else batches[0][:1]  # the last round may have nothing left for us
                batch = collate([documents[i] for i in members], pad_id)
                batch = {name: t.to(model.device) for name, t in batch.items()}
                states = model(inside=lambda lm, batch=batch: states_of(lm, batch))
                if n >= len(own):
                    continue
                found.append((members, summarize(states, batch["verified_at"], batch["attention_mask"]).cpu()))
                if keep_states:
                    labels = batch["labels"][:, 1:]
                    row, position = (labels != IGNORED).nonzero(as_tuple=True)
                    where = torch.tensor(members, device=row.device)[row]
                    kept.append((states[row, position].cpu(), labels[row, position].cpu(), where.cpu()))
    finally:
        model.train(was_training)
    everything = gather_object(found) if world > 1 else found
    h = torch.empty(len(documents), everything[0][1].shape[1])
    for members, part in everything:
        h[members] = part
    if not keep_states:
        return h, None
    if not kept:
        empty = torch.empty(0, dtype=torch.long)
        return h, CountedStates(torch.empty(0, h.shape[1] // 2), empty, empty)
    return h, CountedStates(*(torch.cat(parts) for parts in zip(*kept, strict=True)))
