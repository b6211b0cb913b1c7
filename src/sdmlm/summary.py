"""The summary vector h of a document, from the hidden states of an LM (spec section 1).

h = [state at one position ; mean of the states up to and including it], always float32. "State" means what the
output embedding would receive, so the final norm is already applied. Attention is causal: the states up to a position
do not depend on what follows it, so h may be read from the pass over a longer sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sdmlm.progress import track


def summarize(states: Tensor, at: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """h of each row of `states` (B, L, H), read at position `at` (B,); returns (B, 2H) in float32.

    `attention_mask` (B, L) marks padding with 0, on either side. Without it nothing before `at` is padding.
    """
    positions = torch.arange(states.shape[1], device=states.device)
    counted = positions[None, :] <= at[:, None]
    if attention_mask is not None:
        counted &= attention_mask.bool()
    weights = counted.to(torch.float32)
    weights /= weights.sum(dim=1, keepdim=True)
    with torch.autocast(states.device.type, enabled=False):  # inside an LM's forward pass it would round to bfloat16
        # bmm instead of a masked copy: no second (B, L, H) tensor.
        mean = torch.bmm(weights[:, None, :], states.float()).squeeze(1)
    last = states[torch.arange(states.shape[0], device=states.device), at].float()
    return torch.cat([last, mean], dim=1)


def batches_by_length(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Indices grouped so that rows of like length share a batch of at most `tokens_per_batch` padded tokens."""
    batches: list[list[int]] = []
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens_per_batch:
            batches.append(batch)
            batch = []
        batch.append(index)
    return [*batches, batch] if batch else batches


@torch.inference_mode()
def embed_sequences(
    model: Any,
    sequences: Sequence[Sequence[int]],
    at: Sequence[int] | None = None,
    tokens_per_batch: int = 4096,
    progress: bool = True,
) -> Tensor:
    """h of token sequences under a Hugging Face causal LM, (N, 2H) float32 on the CPU.

    `at` is the position each h is read at (default: the last token). Sequences are sorted by length and padded on the
    right, where causal attention cannot see the padding; the output embedding is never applied.
    """
    was_training = model.training
    model.eval()
    decoder, device = model.get_decoder(), model.device
    ends = [len(s) - 1 for s in sequences] if at is None else list(at)
    kept = [list(s[: end + 1]) for s, end in zip(sequences, ends, strict=True)]
    out: Tensor | None = None
    for batch in track(batches_by_length([len(s) for s in kept], tokens_per_batch), "Reading states", progress):
        longest = max(len(kept[i]) for i in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, i in enumerate(batch):
            ids[row, : len(kept[i])] = torch.tensor(kept[i])
            mask[row, : len(kept[i])] = 1
        ids, mask = ids.to(device), mask.to(device)
        states = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        h = summarize(states, mask.sum(dim=1) - 1, mask).cpu()
        if out is None:
            out = torch.empty(len(kept), h.shape[1])
        out[batch] = h
    model.train(was_training)
    return torch.empty(0, 0) if out is None else out
