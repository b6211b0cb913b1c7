"""Which document represents a prompt in an epoch: the sampling policy and the store of hard negatives.

The policy (docs/method.md, section 6): with probability gamma_plus a prompt is represented by its positive, otherwise by a
negative. From the second epoch on, with probability gamma_gen, a completion is generated for the negative; if it is wrong
(r = 0), it is used with probability gamma_diversity. In all other cases the negative is the static one of the data.

Random numbers depend only on (seed, epoch, row). So the order of the rows, their distribution over processes, and resuming
do not change them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from sdmlm.language_model.decoding import generate
from sdmlm.language_model.encoding import Encoder, Messages, completion_text
from sdmlm.rewards import Reward, apply_reward

Row = Mapping[str, Any]


class Draw(NamedTuple):
    """The random choice for one prompt in one epoch."""

    positive: bool
    generate: bool  # the negative is a generation, if that has r = 0


@dataclass(frozen=True)
class NegativePolicy:
    """Probabilities of the policy. Epochs count from 1; before `first_epoch` nothing is generated."""

    gamma_plus: float = 0.5
    gamma_gen: float = 0.5
    gamma_diversity: float = 0.5
    seed: int = 0
    first_epoch: int = 2
    gamma_other: float = 0.0  # that a negative is the right answer to another prompt; not in the paper
    gamma_revise: float = 0.0  # that a negative is followed by the right answer; not in the paper

    def __post_init__(self) -> None:
        for name in ("gamma_plus", "gamma_gen", "gamma_diversity", "gamma_other", "gamma_revise"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)} but must be a probability between 0 and 1.")

    def draw(self, row: int, epoch: int) -> Draw:
        """The draw of one row in one epoch; always the same."""
        plus, gen, diversity = np.random.default_rng([self.seed, epoch, row]).random(3)
        positive = bool(plus < self.gamma_plus)
        # Whether gamma_diversity keeps a generation does not depend on the generation, so it is drawn first: generations
        # that would not be used are not made. The documents have the paper's distribution, at a fraction of the cost.
        generate = epoch >= self.first_epoch and gen < self.gamma_gen and diversity < self.gamma_diversity
        return Draw(positive, bool(not positive and generate))

    def revise(self, row: int, epoch: int) -> bool:
        """Whether the negative of a row is followed by the right answer. It does not change the other draws."""
        if self.gamma_revise == 0 or epoch < self.first_epoch or self.draw(row, epoch).positive:
            return False
        return bool(np.random.default_rng([self.seed, epoch, row, 0, 1]).random() < self.gamma_revise)

    def other(self, row: int, epoch: int, rows: int) -> int | None:
        """Which other row's right answer is the negative of a row, if any. It does not change the other draws."""
        if self.gamma_other == 0 or rows < 2 or self.draw(row, epoch).positive:
            return None
        rng = np.random.default_rng([self.seed, epoch, row, 1])
        if rng.random() >= self.gamma_other:
            return None
        return int((row + 1 + rng.integers(rows - 1)) % rows)


def check_generations(max_new_tokens: int, temperature: float, num_generations: int) -> None:
    """Refuse settings with which no negative can be generated."""
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
    """The result of generating for one row in one epoch.

    `body` is the negative, None if no generation can be one. `right` says whether the first generation was
    a right answer (r = 1, or the reference itself); state files of older versions do not have it.
    """

    epoch: int
    step: int
    row: int
    body: str | None
    right: bool = False


@dataclass(frozen=True, slots=True)
class EpochDocument:
    """The completion that represents a row in an epoch; `correction` is the right answer that follows a negative."""

    row: int
    completion: str | Messages
    positive: bool
    source: Literal["positive", "static", "generated", "other"]
    correction: str | Messages | None = None


class HardNegatives:
    """Generates hard negatives before the steps that need them, and stores them with epoch and step.

    With `num_generations` above 1 (and a temperature), the negative of a row is its first generation with r = 0.
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
        rows: Sequence[Row],
        ids: Iterable[int],
        epoch: int,
        step: int,
        progress: bool = True,
    ) -> list[Attempt]:
        """Generate for those of the rows `ids` that need it and have no generation yet in this epoch.

        Call it with the rows of one or more steps ahead: more rows make better batches.
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
        columns = dict.fromkeys(name for row in rows for name in row) if tries else ()
        rewards = apply_reward(self.reward, [rows[i] for i in tries], bodies, encoder.tags, columns)
        for i, body, r in zip(tries, bodies, rewards, strict=True):
            known = self.attempts.get((epoch, i))
            if known is None:
                right = r == 1 or self._is_reference(encoder, rows[i], body)
                known = self.attempts[epoch, i] = Attempt(epoch, step, i, None, right)
            if known.body is None and r == 0 and self._usable(encoder, rows[i], body):
                self.attempts[epoch, i] = replace(known, body=body)
        return [self.attempts[epoch, i] for i in wanted]

    @staticmethod
    def _room(encoder: Encoder, row: Row) -> int:
        """Tokens of the row's longer static body. With this room, generation gets the same cut prompt as training."""
        bodies = [encoder.tags.strip_suffix(completion_text(row[name])) for name in ("chosen", "rejected")]
        return max(len(encoder.continuation(body + encoder.tags.separator)) for body in bodies)

    @staticmethod
    def _is_reference(encoder: Encoder, row: Row, body: str) -> bool:
        return body.strip() == encoder.tags.strip_suffix(completion_text(row["chosen"])).strip()

    @staticmethod
    def _usable(encoder: Encoder, row: Row, body: str) -> bool:
        """Whether a body can be a negative: not the reference, whatever the reward says, and not too long."""
        if HardNegatives._is_reference(encoder, row, body):
            return False
        try:
            encoder.encode(row["prompt"], body, False)
        except ValueError:  # when it is encoded again, a generation of unusual tokens may be longer than it was
            return False
        return True

    def documents(
        self,
        rows: Sequence[Row],
        ids: Iterable[int],
        epoch: int,
        encoder: Encoder | None = None,
    ) -> list[EpochDocument]:
        """The document of each row in this epoch; answers to other prompts (gamma_other) need the encoder."""
        documents = [self._document(rows[i], i, epoch) for i in ids]
        return documents if encoder is None else self._with_others(encoder, rows, documents, epoch)

    def _with_others(
        self,
        encoder: Encoder,
        rows: Sequence[Row],
        documents: list[EpochDocument],
        epoch: int,
    ) -> list[EpochDocument]:
        """Replace some negatives by right answers to other prompts, if the reward calls them wrong for this prompt."""
        others = {n: self.policy.other(d.row, epoch, len(rows)) for n, d in enumerate(documents)}
        bodies = {
            n: encoder.tags.strip_suffix(completion_text(rows[other]["chosen"]))
            for n, other in others.items()
            if other is not None
        }
        asked = [rows[documents[n].row] for n in bodies]
        rewards = apply_reward(self.reward, asked, list(bodies.values()), encoder.tags) if bodies else []
        for (n, body), row, r in zip(bodies.items(), asked, rewards, strict=True):
            if r == 0 and self._usable(encoder, row, body):
                documents[n] = EpochDocument(documents[n].row, body, False, "other")
        return documents

    def _document(self, row: Row, i: int, epoch: int) -> EpochDocument:
        draw = self.policy.draw(i, epoch)
        correction = row["chosen"] if self.policy.revise(i, epoch) else None
        if draw.positive:
            return EpochDocument(i, row["chosen"], True, "positive")
        if draw.generate:
            if (epoch, i) not in self.attempts:
                raise ValueError(f"Row {i} needs a generation in epoch {epoch}: call prepare before documents.")
            body = self.attempts[epoch, i].body
            if body is not None:
                return EpochDocument(i, body, False, "generated", correction)
        return EpochDocument(i, row["rejected"], False, "static", correction)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values for JSON. States of several processes are joined by joining their lists."""
        return {"attempts": [asdict(a) for a in self.attempts.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what is stored by a state of `state_dict`."""
        self.attempts = {(a["epoch"], a["row"]): Attempt(**a) for a in state["attempts"]}


def generate_negatives(
    accelerator: Accelerator,
    store: HardNegatives,
    model: Any,
    encoder: Encoder,
    rows: Sequence[Row],
    epoch: int,
    step: int,
    progress: bool = False,
) -> list[Attempt]:
    """Fill the store for all rows of an epoch; returns the attempt of each prompt that drew a generation.

    The prompts are distributed over the processes, except under FSDP, where all processes take part in every forward pass:
    there each makes all generations.
    """
    numbers = range(len(rows))
    rank, world = accelerator.process_index, accelerator.num_processes
    own = numbers if accelerator.distributed_type == DistributedType.FSDP else numbers[rank::world]
    attempts = [asdict(a) for a in store.prepare(model, encoder, rows, own, epoch, step, progress)]
    if world > 1:
        attempts = gather_object(attempts)
        store.load_state_dict({"attempts": [*store.state_dict()["attempts"], *attempts]})
    return [Attempt(**a) for a in attempts]
