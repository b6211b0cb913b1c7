"""Which document stands for a prompt: the sampling policy, batched generation, and the store of hard negatives.

Spec section 7: per prompt the positive with probability gamma_plus; otherwise, from the second epoch on, with gamma_gen
a completion is generated and, if r = 0, with gamma_diversity it is the negative; else the static one is.

All chance is drawn from (seed, epoch, row), never from a running generator: neither the order of the rows, nor how they
are spread over processes, nor a resumed run changes a draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sdmlm.language_model.encoding import Encoder, Messages, Prompt, PromptIds, completion_text
from sdmlm.language_model.summary import GenerationReader, batches_by_length
from sdmlm.rewards import Reward, apply_reward
from sdmlm.storage.progress import track

Row = Mapping[str, Any]
_LEAST = 1e-30  # of a temperature or a top_p


class Draw(NamedTuple):
    """What chance says about one prompt in one epoch."""

    positive: bool
    generate: bool  # the negative is to be a generation, if one with r = 0 comes out


@dataclass(frozen=True)
class NegativePolicy:
    """Probabilities of the policy. Epochs count from 1; before `first_epoch` nothing is generated."""

    gamma_plus: float = 0.5
    gamma_gen: float = 0.5
    gamma_diversity: float = 0.5
    seed: int = 0
    first_epoch: int = 2

    def __post_init__(self) -> None:
        for name in ("gamma_plus", "gamma_gen", "gamma_diversity"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)} but must be a probability between 0 and 1.")

    def draw(self, row: int, epoch: int) -> Draw:
        """The draw of one row: the same whenever and wherever it is asked for."""
        plus, gen, diversity = np.random.default_rng([self.seed, epoch, row]).random(3)
        positive = bool(plus < self.gamma_plus)
        # The coin of gamma_diversity does not look at the generation, so it is tossed first: a generation that it would
        # set aside need not be made. The documents are distributed as in the paper at a fraction of the cost.
        generate = epoch >= self.first_epoch and gen < self.gamma_gen and diversity < self.gamma_diversity
        return Draw(positive, bool(not positive and generate))


def answer_room(encoder: Encoder, max_new_tokens: int) -> int:
    """Tokens to leave for an answer of unknown length. A prompt that may be cut makes room for all that may be generated,
    but keeps half of the context: a bound that no answer reaches must not cost the question."""
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
    begun: Sequence[str] | None = None,
    ends: Callable[[int, list[int]], bool] | None = None,
    reader: GenerationReader | None = None,
) -> list[list[int]]:
    """Generated ids for each prompt, ending with `</verified>`, the end of turn, or at `max_new_tokens`.

    Greedy, or sampled at a `temperature` above 0 with one seed sequence per prompt. Prompts of like length share a
    batch, padded on the left; a row that has ended leaves the batch and its cache, so it costs nothing more. `rows`
    names the prompts in error messages (default: by position). Where prompts are cut to fit, `rooms` says how many tokens
    to leave for each completion (default: `answer_room`).

    `top_p` samples among the likeliest tokens that together have that probability. `begun` is what the answer to each
    prompt begins with: generation goes on from there, and returns only what is new. `ends(number of the prompt, its ids so
    far)` is asked after every token and may end a row. `reader` makes summaries h of the states while they exist.
    """
    if temperature > 0 and seeds is None:
        raise ValueError("Sampling at a temperature needs one seed per prompt.")
    if rooms is None or not encoder.truncate_prompt:
        rooms = [answer_room(encoder, max_new_tokens)] * len(prompts)
    names = range(len(prompts)) if rows is None else rows
    given = [encoder.continuation(text) for text in begun] if begun is not None else [[] for _ in prompts]
    if encoder.max_length is not None:  # BOS and one token of the prompt must stay, however much may be generated
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
                _generate_batch(model, encoder, batch, ids, limits, temperature, top_p, chances, ends, reader, out)
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
    ends: Callable[[int, list[int]], bool] | None,
    reader: GenerationReader | None,
    out: list[list[int]],
) -> None:
    longest = max(len(prompts[r]) for r in rows)
    ids = torch.tensor([[encoder.pad_id] * (longest - len(prompts[r])) + prompts[r] for r in rows])
    mask = torch.tensor([[0] * (longest - len(prompts[r])) + [1] * len(prompts[r]) for r in rows])
    ids, mask = ids.to(model.device), mask.to(model.device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache, step = None, 0
    feed: list[list[int]] = []  # the ids that each row reads next
    rest: dict[int, list[int]] = {}  # rows that have ended, of which the reader has not read everything
    while True:
        answer = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = getattr(answer, "past_key_values", None)
        if cache is None:
            raise ValueError(f"{type(model).__name__} keeps no key-value cache: generation needs one.")
        if reader is not None:
            reader.begin(rows, prompts, mask) if step == 0 else reader.step(rows, feed)
        at = min(step, max(limits) - 1)  # a row of which only the rest is read draws nothing any more
        chance = None if chances is None else torch.from_numpy(chances[rows, at]).to(model.device)
        newest = _pick(answer.logits[:, -1].float(), temperature, chance, top_p).tolist()
        going = []
        for n, (r, token) in enumerate(zip(rows, newest, strict=True)):
            if r not in rest:
                out[r].append(token)
                ended = ends is not None and ends(r, out[r])
                if not ended and len(out[r]) < limits[r] and not encoder.ends(out[r]):
                    going.append(n)
                    continue
                rest[r] = [] if reader is None else reader.rest(r, out[r])
            elif reader is not None and not rest[r]:
                reader.finish(r)
            if rest[r]:
                going.append(n)
        if not going:
            return
        if len(going) < len(rows):
            keep = torch.tensor(going, device=mask.device)
            rows = [rows[n] for n in going]
            mask, positions = mask[keep], positions[keep]
            cache.reorder_cache(keep)
            if reader is not None:
                reader.keep(keep)
        # One token at a time while any row is generated; what all rows have left to read is read at once.
        width = min((len(rest[r]) if r in rest else 1) for r in rows)
        feed = [rest[r][:width] if r in rest else [out[r][-1]] for r in rows]
        rest = {r: ids[width:] for r, ids in rest.items()}
        ids = torch.tensor(feed, device=mask.device)
        mask = torch.cat([mask, mask.new_ones(len(rows), width)], dim=1)
        positions = positions[:, -1:] + torch.arange(1, 1 + width, device=mask.device)
        step += 1


def _pick(logits: Tensor, temperature: float, chance: Tensor | None, top_p: float = 1.0) -> Tensor:
    """The likeliest token, or the one at which the cumulative probability passes a uniform number of the row's own."""
    if chance is None:
        return logits.argmax(dim=-1)
    # Less the largest, and divided by no less than float32 can hold: a tiny temperature is greedy, not infinite.
    p = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, _LEAST), dim=-1)
    if top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        # A token stays while those before it have less than top_p together: the likeliest always does.
        ordered = torch.where(ordered.cumsum(dim=-1) - ordered < max(top_p, _LEAST), ordered, 0.0)
        p = torch.zeros_like(p).scatter_(1, index, ordered)
    cumulative = p.cumsum(dim=-1)
    total = cumulative[:, -1:]  # never reached, where rounding would: the last token with any probability is the last
    below = torch.minimum(chance[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, below, right=True).squeeze(1)


def check_generations(max_new_tokens: int, temperature: float, num_generations: int) -> None:
    """Refuse what no negative can be generated with."""
    for name, value in (("max_new_tokens", max_new_tokens), ("num_generations", num_generations)):
        if value < 1:
            raise ValueError(f"{name} is {value} but must be at least 1.")
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature} but must be at least 0 (0 is greedy).")
    if num_generations > 1 and temperature == 0:
        raise ValueError(
            f"num_generations is {num_generations}, which needs a temperature above 0: greedy generations are all the same."
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """What generating for one row in one epoch gave: the body of a negative, or None where r was 1."""

    epoch: int
    step: int
    row: int
    body: str | None


@dataclass(frozen=True, slots=True)
class Document:
    """The completion that stands for a row in an epoch."""

    row: int
    completion: str | Messages
    positive: bool
    source: Literal["positive", "static", "generated"]


class HardNegatives:
    """Makes hard negatives ahead of the steps that need them, and keeps them with epoch and step.

    `num_generations` above 1 (with a temperature) tries again for a row: its negative is the first with r = 0.
    """

    def __init__(
        self,
        policy: NegativePolicy,
        reward: Reward,
        max_new_tokens: int,
        temperature: float = 0.0,
        num_generations: int = 1,
        tokens_per_batch: int = 8192,
    ) -> None:
        check_generations(max_new_tokens, temperature, num_generations)
        self.policy = policy
        self.reward = reward
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.num_generations = num_generations
        self.tokens_per_batch = tokens_per_batch
        self.attempts: dict[tuple[int, int], Attempt] = {}

    def prepare(
        self,
        model: Any,
        encoder: Encoder,
        rows: Mapping[int, Row] | Sequence[Row],
        ids: Iterable[int],
        epoch: int,
        step: int,
        progress: bool = True,
    ) -> list[Attempt]:
        """Generate for those of the rows `ids` that need it and have not had it in this epoch.

        `rows[i]` is row i. Call it with the rows of one or more coming steps: the more, the better the batches.
        """
        wanted = [
            i for i in dict.fromkeys(ids) if self.policy.draw(i, epoch).generate and (epoch, i) not in self.attempts
        ]
        tries = [i for i in wanted for _ in range(self.num_generations)]
        seeds = [[self.policy.seed, epoch, i, 1 + k] for i in wanted for k in range(self.num_generations)]
        generated = generate(
            model,
            encoder,
            [rows[i]["prompt"] for i in tries],
            self.max_new_tokens,
            self.temperature,
            seeds,
            self.tokens_per_batch,
            progress,
            tries,
            [self._room(encoder, rows[i]) for i in tries] if encoder.truncate_prompt else None,
        )
        bodies = [encoder.read(g)[0] for g in generated]  # the verdict says nothing about the body: r judges it
        every = rows.values() if isinstance(rows, Mapping) else rows
        columns = dict.fromkeys(name for row in every for name in row) if tries else ()
        rewards = apply_reward(self.reward, [rows[i] for i in tries], bodies, encoder.tags, columns)
        for i in wanted:
            self.attempts[epoch, i] = Attempt(epoch, step, i, None)
        for i, body, r in zip(tries, bodies, rewards, strict=True):
            if self.attempts[epoch, i].body is None and r == 0 and self._usable(encoder, rows[i], body):
                self.attempts[epoch, i] = Attempt(epoch, step, i, body)
        return [self.attempts[epoch, i] for i in wanted]

    @staticmethod
    def _room(encoder: Encoder, row: Row) -> int:
        """Tokens of the row's longer static body: with so many left, generation sees the prompt that training sees."""
        bodies = [encoder.tags.strip_suffix(completion_text(row[name])) for name in ("chosen", "rejected")]
        return max(len(encoder.continuation(body + encoder.tags.separator)) for body in bodies)

    @staticmethod
    def _usable(encoder: Encoder, row: Row, body: str) -> bool:
        """The reference itself is never a negative, whatever the reward says; nor is what does not fit."""
        if body.strip() == encoder.tags.strip_suffix(completion_text(row["chosen"])).strip():
            return False
        try:
            encoder.encode(row["prompt"], body, False)
        except ValueError:  # re-encoded, a generation of strange tokens may be longer than it was
            return False
        return True

    def documents(self, rows: Mapping[int, Row] | Sequence[Row], ids: Iterable[int], epoch: int) -> list[Document]:
        """The document of each row in this epoch."""
        return [self._document(rows[i], i, epoch) for i in ids]

    def _document(self, row: Row, i: int, epoch: int) -> Document:
        draw = self.policy.draw(i, epoch)
        if draw.positive:
            return Document(i, row["chosen"], True, "positive")
        if draw.generate:
            if (epoch, i) not in self.attempts:
                raise ValueError(f"Row {i} needs a generation in epoch {epoch}: call prepare before documents.")
            body = self.attempts[epoch, i].body
            if body is not None:
                return Document(i, body, False, "generated")
        return Document(i, row["rejected"], False, "static")

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. The states of several processes may be joined by joining their lists."""
        return {"attempts": [asdict(a) for a in self.attempts.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the place of what is stored."""
        self.attempts = {(a["epoch"], a["row"]): Attempt(**a) for a in state["attempts"]}
