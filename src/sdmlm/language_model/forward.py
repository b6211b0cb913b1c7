"""Running our own code inside the forward pass of a language model, wrapped or not, on one process or several.

DDP and FSDP see only what goes through the forward of the module they wrap; a sharded output embedding exists nowhere else.
So `allow_inside` gives a Hugging Face causal LM one more argument: `model(inside=f)` calls f(lm) where its forward would
run, and returns what f returns. Without the argument nothing changes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from sdmlm.language_model.encoding import IGNORED, Encoded, collate
from sdmlm.language_model.summary import batches_by_length, summarize
from sdmlm.storage.progress import track

# Settings of a config that make a pass in training mode random; those of heads that a causal LM has not are no matter.
_RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")
_OTHER_HEADS = ("summary_", "classifier_")


def inner_lm(model: Any) -> Any:
    """The Hugging Face causal LM inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def allow_inside(model: Any) -> None:
    """Let `model(inside=f)` run f(lm) in place of the LM's forward; done once, however often it is called."""
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


def over_documents(
    model: Any,
    documents: Sequence[Encoded],
    pad_id: int,
    tokens_per_batch: int,
    inside: Callable[[Any, dict[str, Tensor], Tensor], Any],
    rank: int = 0,
    world: int = 1,
    progress: bool = False,
) -> list[Any]:
    """What `inside(lm, batch, numbers of its documents)` gives for the batches of this process, in evaluation mode.

    The batches are the same however many processes share them, and each process makes the same number of calls, which
    FSDP needs: one that has no batch left repeats a document and drops the answer.
    """
    batches = batches_by_length([len(d.input_ids) for d in documents], tokens_per_batch)
    own = batches[rank::world]
    answers = []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for n in track(range(-(-len(batches) // world)), "Reading documents", progress):
                members = own[n] if n < len(own) else batches[0][:1]
                batch = collate([documents[i] for i in members], pad_id)
                batch = {name: t.to(model.device) for name, t in batch.items()}
                numbers = torch.tensor(members, device=model.device)
                answer = model(inside=lambda lm, batch=batch, numbers=numbers: inside(lm, batch, numbers))
                if n < len(own):
                    answers.append(answer)
    finally:
        model.train(was_training)
    return answers


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
) -> tuple[Tensor, CountedStates]:
    """h of every document (N, 2H) on every process, from one pass, in evaluation mode.

    With `keep_states` the states at counted positions come along, so that a loss can be taken without a second pass.
    """

    def inside(lm: Any, batch: dict[str, Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
        states = states_of(lm, batch)
        h = summarize(states, batch["verified_at"], batch["attention_mask"])
        labels = batch["labels"][:, 1:]
        row, position = (labels != IGNORED).nonzero(as_tuple=True)
        if not keep_states:
            row, position = row[:0], position[:0]
        kept = states[row, position], labels[row, position], numbers[row]
        return tuple(t.cpu() for t in (numbers, h, *kept))

    found = over_documents(model, documents, pad_id, tokens_per_batch, inside, rank, world, progress)
    everything = [(numbers, h) for numbers, h, *_ in found]
    if world > 1:
        everything = gather_object(everything)
    out = torch.empty(len(documents), everything[0][1].shape[1])
    for numbers, h in everything:
        out[numbers] = h
    if not found:
        empty = torch.empty(0, dtype=torch.long)
        return out, CountedStates(torch.empty(0, out.shape[1] // 2), empty, empty)
    return out, CountedStates(*(torch.cat(parts) for parts in zip(*(kept for _, _, *kept in found), strict=True)))
