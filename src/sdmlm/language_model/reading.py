"""Reading documents with a language model: batches of similar length, the summaries h, the states that a loss needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sdmlm.language_model.encoding import IGNORED, Encoded, collate
from sdmlm.language_model.forward import call_inside, states_of
from sdmlm.language_model.summary import batches_by_length, summarize
from sdmlm.storage.progress import track


def embed_sequences(
    model: Any,
    sequences: Sequence[Sequence[int]],
    at: Sequence[int] | None = None,
    tokens_per_batch: int = 4096,
    progress: bool = True,
) -> Tensor:
    """h of token sequences under a Hugging Face causal LM, (N, 2H) float32 on the CPU.

    `at` is the position at which each h is read (default: the last token). Tokens after it are not used.
    """
    ends = [len(ids) - 1 for ids in sequences] if at is None else list(at)
    documents = [
        Encoded(list(ids[: end + 1]), [IGNORED] * (end + 1), end) for ids, end in zip(sequences, ends, strict=True)
    ]
    if not documents:
        return torch.empty(0, 0)
    return read_documents(model, documents, 0, tokens_per_batch, progress=progress)[0]


def over_documents(
    model: Any,
    documents: Sequence[Encoded],
    pad_id: int,
    tokens_per_batch: int,
    inside: Callable[..., Any],
    rank: int = 0,
    world: int = 1,
    progress: bool = False,
) -> list[Any]:
    """The results of `inside(lm, batch, numbers of its documents)` for the batches of this process, in evaluation mode.

    The batches do not depend on the number of processes. Each process makes the same number of calls, which FSDP needs: a
    process that has no batch left reads a document again and drops the result.
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
                answer = call_inside(model, partial(inside, batch=batch, numbers=numbers))
                if n < len(own):
                    answers.append(answer)
    finally:
        model.train(was_training)
    return answers


@dataclass
class CountedStates:
    """The states that predict a token with a loss, of the documents that this process has read."""

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

    With `keep_states`, also the states at positions with a loss, so that the loss can be computed without a second pass.
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

    answers = over_documents(model, documents, pad_id, tokens_per_batch, inside, rank, world, progress)
    everything = [(numbers, h) for numbers, h, *_ in answers]
    if world > 1:
        from accelerate.utils import gather_object

        everything = gather_object(everything)
    out = torch.empty(len(documents), everything[0][1].shape[1])
    for numbers, h in everything:
        out[numbers] = h
    if not answers:
        empty = torch.empty(0, dtype=torch.long)
        return out, CountedStates(torch.empty(0, out.shape[1] // 2), empty, empty)
    return out, CountedStates(*(torch.cat(parts) for parts in zip(*(kept for _, _, *kept in answers), strict=True)))
