"""The documents of one optimizer step as padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from sdmlm.finetuning.negatives import EpochDocument
from sdmlm.language_model.encoding import IGNORED, Encoded, collate


def padded_batches(
    rows: Sequence[Sequence[int]], documents: Sequence[EpochDocument], encoded: Sequence[Encoded], pad_id: int
) -> list[dict[str, Tensor]]:
    """A padded batch for each list of row numbers, with `rows` and `reward` of its documents.

    The documents of a step are distributed over its batches by length: less padding, and the same sum of gradients.
    """
    numbers = [number for batch in rows for number in batch]
    if len(rows) > 1:  # a single batch has the same padding in any order
        numbers.sort(key=lambda i: len(encoded[i].input_ids))
    remaining, batches = iter(numbers), []
    for size in map(len, rows):
        members = list(islice(remaining, size))
        chosen = [encoded[i] for i in members]
        if not chosen:  # nothing left for this process: it must take part in the step, with a document without a loss
            first = encoded[0]
            chosen = [Encoded(first.input_ids, [IGNORED] * len(first.labels), first.verified_at)]
        batch = collate(chosen, pad_id)
        batch["rows"] = torch.tensor(members or [-1])
        batch["reward"] = torch.tensor([int(documents[i].positive) for i in batch["rows"].tolist()])
        batches.append(batch)
    return batches
