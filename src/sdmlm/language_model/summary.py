"""The summary vector h of a document, from the hidden states of an LM (docs/method.md, section 3).

h = [state at one position ; mean of the states up to and including it], always float32. A "state" is the input of the
output embedding, so the final norm is already applied. Attention is causal: the states up to a position do not depend on
later tokens, so h may be read from a pass over a longer sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def summarize(states: Tensor, at: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """h of each row of `states` (B, L, H), read at position `at` (B,); returns (B, 2H) in float32.

    `attention_mask` (B, L) marks padding with 0, on either side. Without it there must be no padding before `at`.
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
    """Indices in batches of rows of similar length, each of at most `tokens_per_batch` tokens including padding."""
    batches: list[list[int]] = []
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens_per_batch:
            batches.append(batch)
            batch = []
        batch.append(index)
    return [*batches, batch] if batch else batches


class GenerationReader:
    """h of documents from the states of their own generation, by running sums and without a second pass.

    A document is the prompt and the generated text, up to and including `<verified>` (`open_ids`). When a row has ended,
    `document(row, generated ids)` gives the ids of its document, or None if no h is wanted. If these ids begin with those that
    the LM has read, `rest` gives the ids that it still has to read (a tag that it did not write). If they do not, because the
    text has other ids when it is encoded again, there is no h, and the caller needs a pass over the document.
    """

    longest_rest = 32  # for a longer rest, a pass over the document is cheaper than single steps
    reads_logits = False  # whether the logits of every id that the LM reads are needed

    def __init__(self, open_ids: Sequence[int], document: Callable[[int, list[int]], Sequence[int] | None]) -> None:
        self._open, self._document = list(open_ids), document
        self._states: Tensor | None = None
        self._logits: Tensor | None = None
        self._fed: dict[int, list[int]] = {}
        self._sums: Tensor | None = None
        self._at_tag: dict[int, tuple[int, Tensor, Tensor]] = {}  # row -> ids fed, their summed states, the last state
        self._ended: dict[int, list[int]] = {}  # row -> generated ids of rows that wrote a tag
        self.h: dict[int, Tensor] = {}  # row -> (2H,) on the LM's device

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Keep the final-layer states of each pass of the model; at the end, `h` is complete."""

        def keep(module: Any, args: Any, output: Any) -> None:
            self._states = output.last_hidden_state

        handle = model.get_decoder().register_forward_hook(keep)
        try:
            yield
            self.end()
        finally:
            handle.remove()
            self._states = self._sums = self._logits = None

    def see_logits(self, logits: Tensor) -> None:
        """Take the logits (B, width, V) of the newest pass."""
        self._logits = logits

    def begin(self, rows: Sequence[int], prompts: Sequence[list[int]], mask: Tensor) -> None:
        """To be called after the pass over the prompts of a batch; `mask` (B, L) marks padding with 0."""
        assert self._states is not None
        self._sums = torch.bmm(mask[:, None, :].float(), self._states.float()).squeeze(1)
        self._fed |= {r: list(prompts[r]) for r in rows}
        self._look(rows)

    def step(self, rows: Sequence[int], newest: Sequence[list[int]], ids: Tensor) -> None:
        """To be called after a pass over the next ids of each row, which are given as lists and as a tensor."""
        assert self._states is not None
        assert self._sums is not None
        self._sums = self._sums + self._states.float().sum(dim=1)
        for r, fed in zip(rows, newest, strict=True):
            self._fed[r] += fed
        self._look(rows)

    def keep(self, index: Tensor) -> None:
        """Keep only these rows of the batch."""
        assert self._sums is not None
        self._sums = self._sums[index]

    def _look(self, rows: Sequence[int]) -> None:
        assert self._states is not None
        assert self._sums is not None
        for n, r in enumerate(rows):
            fed = self._fed[r]
            if fed[-1] == self._open[-1] and fed[-len(self._open) :] == self._open:
                self._note_tag(r, n)

    def _note_tag(self, row: int, place: int) -> None:
        """The newest ids of a row are the tag: keep what its summary needs."""
        assert self._states is not None
        assert self._sums is not None
        self._at_tag[row] = len(self._fed[row]), self._sums[place], self._states[place, -1].float()

    def rest(self, row: int, generated: list[int]) -> list[int]:
        """The ids that the LM still has to read for h, when a row has ended."""
        fed = self._fed[row]
        if self._at_tag.get(row, (0,))[0] > len(fed) - len(generated) + 1:  # it wrote a tag, so nothing is missing
            self._ended[row] = generated
            return []
        ids = self._document(row, generated)
        if ids is None:
            return []
        ids = list(ids)
        if len(ids) <= len(fed):
            self._finish(row, ids)
            return []
        rest = ids[len(fed) :]
        return rest if ids[: len(fed)] == fed and len(rest) <= self.longest_rest else []

    def _finish(self, row: int, ids: list[int]) -> None:
        n, total, last = self._at_tag.get(row, (0, None, None))
        if n == len(ids) and self._fed[row][:n] == ids and total is not None and last is not None:
            self.h[row] = self._summary(row, n, total, last)

    def _summary(self, row: int, length: int, total: Tensor, last: Tensor) -> Tensor:
        return torch.cat([last, total / length])

    def finish(self, row: int) -> None:
        """To be called when the LM has read the rest of a row."""
        self._finish(row, self._fed[row])

    def end(self) -> None:
        """Read the rows that wrote a tag, all at once: between two passes of the LM this takes several times as long."""
        for row, generated in self._ended.items():
            self._finish(row, list(self._document(row, generated) or ()))
        self._ended.clear()
