"""Batched generation with a key-value cache: greedy or sampled, prompts of different lengths in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdmlm.language_model.encoding import Encoder, Prompt, PromptIds
from sdmlm.language_model.summary import GenerationReader, batches_by_length
from sdmlm.storage.progress import track

_SMALLEST = 1e-30  # lower bound of a temperature or a top_p


def answer_room(encoder: Encoder, max_new_tokens: int) -> int:
    """Tokens to leave for an answer of unknown length.

    A prompt that may be cut makes room for `max_new_tokens`, but keeps at least half of the context: a large bound that
    answers rarely reach must not cut off the question.
    """
    if not encoder.truncate_prompt or encoder.max_length is None:
        return 1
    return max(1, min(max_new_tokens, (encoder.max_length - encoder.suffix_length) // 2))


@torch.no_grad()
def generate(
    model: Any,
    encoder: Encoder,
    prompts: Sequence[Prompt | PromptIds],
    max_new_tokens: int,
    temperature: float = 0.0,
    seeds: Sequence[Sequence[int]] | None = None,
    tokens_per_batch: int = 8192,
    progress: bool = True,
    rows: Sequence[object] | None = None,
    rooms: Sequence[int] | None = None,
    top_p: float = 1.0,
    prefixes: Sequence[Sequence[int]] | None = None,
    should_stop: Callable[[int, list[int]], bool] | None = None,
    reader: GenerationReader | None = None,
) -> list[list[int]]:
    """Generated ids for each prompt, ending with `</verified>`, the end of turn, or at `max_new_tokens`.

    Greedy, or sampled at a `temperature` above 0 with one seed sequence per prompt. Prompts of similar length share a
    batch, padded on the left; a row that has ended is removed from the batch and its cache, so it costs nothing more. `rows`
    names the prompts in error messages (default: by position). Where prompts are cut to fit, `rooms` says how many tokens
    to leave for each completion (default: `answer_room`).

    `top_p` samples among the likeliest tokens that together have that probability. `prefixes` holds the first ids of the answer
    to each prompt: generation continues them, and returns only the new ids. `should_stop(number of the prompt, its ids so
    far)` is called after every token and may end a row. `reader` computes summaries h from the states of each pass.
    """
    if temperature > 0 and seeds is None:
        raise ValueError("Sampling at a temperature needs one seed per prompt.")
    if rooms is None or not encoder.truncate_prompt:
        rooms = [answer_room(encoder, max_new_tokens)] * len(prompts)
    names = range(len(prompts)) if rows is None else rows
    given = [list(start) for start in prefixes] if prefixes is not None else [[] for _ in prompts]
    if encoder.max_length is not None:  # keep BOS and one token of the prompt, however large max_new_tokens is
        left = encoder.max_length - encoder.suffix_length - 2
        rooms = [max(1, min(room, left - len(start))) for room, start in zip(rooms, given, strict=True)]
    ids = [
        encoder.encode_prompt(prompt, room + len(start), row) + start
        for prompt, room, row, start in zip(prompts, rooms, names, given, strict=True)
    ]
    limits = [max_new_tokens] * len(ids)
    if encoder.max_length is not None:
        limits = [min(max_new_tokens, encoder.max_length - encoder.suffix_length - len(i)) for i in ids]
    chances = None
    if temperature > 0 and seeds is not None:
        chances = np.array([np.random.default_rng(s).random(max(limits)) for s in seeds], dtype=np.float32)
    out: list[list[int]] = [[] for _ in ids]
    was_training = model.training
    model.eval()
    try:
        lengths = [len(i) + limit for i, limit in zip(ids, limits, strict=True)]
        for batch in track(batches_by_length(lengths, tokens_per_batch), "Generating", progress):
            with nullcontext() if reader is None else reader.watching(model):
                _generate_batch(
                    model, encoder, batch, ids, limits, temperature, top_p, chances, should_stop, reader, out
                )
    finally:
        model.train(was_training)
    return out


def _generate_batch(
    model: Any,
    encoder: Encoder,
    rows: list[int],
    prompts: list[list[int]],
    limits: list[int],
    temperature: float,
    top_p: float,
    chances: np.ndarray | None,
    should_stop: Callable[[int, list[int]], bool] | None,
    reader: GenerationReader | None,
    out: list[list[int]],
) -> None:
    longest = max(len(prompts[r]) for r in rows)
    ids = torch.tensor([[encoder.pad_id] * (longest - len(prompts[r])) + prompts[r] for r in rows])
    mask = torch.tensor([[0] * (longest - len(prompts[r])) + [1] * len(prompts[r]) for r in rows])
    ids, mask = ids.to(model.device), mask.to(model.device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache, step, every = None, 0, reader is not None and reader.reads_logits
    feed: list[list[int]] = []  # the ids that each row reads next
    rest: dict[int, list[int]] = {}  # rows that have ended, of which the reader has not read everything
    while True:
        answer = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=ids.shape[1] if every and step > 0 else 1,
        )
        cache = getattr(answer, "past_key_values", None)
        if cache is None:
            raise ValueError(f"{type(model).__name__} keeps no key-value cache: generation needs one.")
        if reader is not None:
            reader.see_logits(answer.logits)
            reader.begin(rows, prompts, mask) if step == 0 else reader.step(rows, feed, ids)
        at = min(step, max(limits) - 1)  # rows that have ended may take more steps; their draws are not used
        chance = None if chances is None else torch.from_numpy(chances[rows, at]).to(model.device)
        newest = _pick(answer.logits[:, -1].float(), temperature, chance, top_p).tolist()
        keep_going = []
        for n, (r, token) in enumerate(zip(rows, newest, strict=True)):
            if r not in rest:
                out[r].append(token)
                ended = should_stop is not None and should_stop(r, out[r])
                if not ended and len(out[r]) < limits[r] and not encoder.ends(out[r]):
                    keep_going.append(n)
                    continue
                rest[r] = [] if reader is None else reader.rest(r, out[r])
            elif reader is not None and not rest[r]:
                reader.finish(r)
            if rest[r]:
                keep_going.append(n)
        if not keep_going:
            return
        if len(keep_going) < len(rows):
            keep = torch.tensor(keep_going, device=mask.device)
            rows = [rows[n] for n in keep_going]
            mask, positions = mask[keep], positions[keep]
            cache.reorder_cache(keep)
            if reader is not None:
                reader.keep(keep)
        # One id per pass while any row is being generated. Once all rows have ended, what they have left is read at once.
        width = min((len(rest[r]) if r in rest else 1) for r in rows)
        feed = [rest[r][:width] if r in rest else [out[r][-1]] for r in rows]
        rest = {r: ids[width:] for r, ids in rest.items()}
        ids = torch.tensor(feed, device=mask.device)
        mask = torch.cat([mask, mask.new_ones(len(rows), width)], dim=1)
        positions = positions[:, -1:] + torch.arange(1, 1 + width, device=mask.device)
        step += 1


def _pick(logits: Tensor, temperature: float, chance: Tensor | None, top_p: float = 1.0) -> Tensor:
    """The likeliest token, or the one at which the cumulative probability passes the row's uniform random number."""
    if chance is None:
        return logits.argmax(dim=-1)
    # With the largest logit subtracted and the divisor bounded below, a tiny temperature is greedy instead of infinite.
    p = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, _SMALLEST), dim=-1)
    if top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        # A token stays if the likelier ones have less than top_p together, so the likeliest always stays.
        ordered = torch.where(ordered.cumsum(dim=-1) - ordered < max(top_p, _SMALLEST), ordered, 0.0)
        p = torch.zeros_like(p).scatter_(1, index, ordered)
    cumulative = p.cumsum(dim=-1)
    total = cumulative[:, -1:]  # stay below it despite rounding, so that a token with zero probability is never drawn
    below = torch.minimum(chance[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, below, right=True).squeeze(1)
