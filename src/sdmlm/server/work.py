"""The work of the engine's thread with the SDM language model: tasks of the same kind run as one batch.

A task that cannot be answered (its prompt is too long, for example) fails alone. If a batch fails as a whole, its tasks are
tried one by one, so that no request can make others fail.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sdmlm.errors import BadCompletion, BadInput, CompletionTooLong, PromptTooLong
from sdmlm.generation.answers import Sampling
from sdmlm.generation.language_model import SDMLanguageModel
from sdmlm.generation.search import SearchPolicy, prepared_policies
from sdmlm.generation.verification import Verification
from sdmlm.language_model.encoding import PromptIds
from sdmlm.language_model.forward import inner_lm
from sdmlm.server.engine import QueuedTask, report
from sdmlm.server.errors import ApiError, internal, refused
from sdmlm.server.protocol import PlainPrompt

DEFAULT_BUDGET = 4  # further tries of a search


@dataclass(frozen=True)
class Judged:
    """An answer with the region that decided on it."""

    verification: Verification
    region: dict[str, Any]


@dataclass(frozen=True)
class Write:
    """Generate an answer and judge it. Tasks with different seeds, alphas and neighbours may share a batch."""

    prompt: PlainPrompt
    sampling: Sampling
    seeds: tuple[int, ...]
    alpha: float
    neighbors: int
    on_text: Callable[[str], None] | None = field(default=None, compare=False)

    @property
    def key(self) -> Hashable:
        return "write", self.sampling


@dataclass(frozen=True)
class Judge:
    """Judge a given answer."""

    prompt: PlainPrompt
    completion: str
    alpha: float
    neighbors: int
    where: str = field(default="", compare=False)  # before the names of its fields in the request

    @property
    def key(self) -> Hashable:
        return "judge", self.alpha, self.neighbors


@dataclass(frozen=True)
class Alone:
    """A task that shares no batch: feedback, a search. `prompt` is the one that an error is about."""

    function: Callable[[SDMLanguageModel], Any]
    prompt: PlainPrompt = ""

    @property
    def key(self) -> Hashable:
        return "alone", id(self)


class Abandoned(Exception):
    """Raised when nobody waits for any row of the batch any more."""


class Worker:
    """Runs batches on one model. `max_prompt_tokens` bounds prompts below the model's context."""

    def __init__(self, lm: SDMLanguageModel, max_prompt_tokens: int | None = None) -> None:
        self.lm, self._max_prompt_tokens = lm, max_prompt_tokens
        self._jobs: Sequence[QueuedTask] = ()
        inner_lm(lm.model).register_forward_pre_hook(self._check)

    def _check(self, *_: Any) -> None:
        """Called before every pass of the LM: stop if nobody waits any more."""
        if self._jobs and all(job.left for job in self._jobs):
            raise Abandoned

    def __call__(self, jobs: Sequence[QueuedTask]) -> list[Any]:
        """A result, or the error to answer with, for each job of a batch."""
        self._jobs = jobs
        try:
            return self._results(jobs)
        finally:
            self._jobs = ()

    def _results(self, jobs: Sequence[QueuedTask]) -> list[Any]:
        task = jobs[0].task
        if isinstance(task, Alone):
            return [self._one(task, task.function, self.lm)]
        run = self._write if isinstance(task, Write) else self._judge
        results = [self._one(job.task, self.read, job.task.prompt) for job in jobs]
        good = [n for n, ids in enumerate(results) if isinstance(ids, PromptIds)]
        judged = self._together(run, [jobs[n] for n in good], [results[n] for n in good])
        for n, each in zip(good, judged, strict=True):
            results[n] = each
        return results

    def _together(
        self,
        run: Callable[[list[QueuedTask], list[PromptIds]], list[Judged | None]],
        jobs: list[QueuedTask],
        read: list[PromptIds],
    ) -> list[Any]:
        if len(jobs) > 1:
            try:
                return list(run(jobs, read))
            except Abandoned:
                return [None] * len(jobs)
            except BadInput:
                pass  # some row cannot be judged: one by one, only that row fails
            except Exception as error:
                report(error)
        # An answer of which a part was sent cannot start again.
        return [
            internal() if job.partly_sent else self._one(job.task, lambda j, ids: run([j], [ids])[0], job, prompt)
            for job, prompt in zip(jobs, read, strict=True)
        ]

    def _one(self, task: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result, or the error for the client, which names the field to correct."""
        try:
            return function(*arguments)
        except Abandoned:
            return None
        except ApiError as error:
            return error
        except BadInput as error:
            too_long = isinstance(error, (PromptTooLong, CompletionTooLong))
            return refused(_field(task, error), error.named(), "context_length_exceeded" if too_long else None)
        except Exception as error:
            report(error)
            return internal()

    def read(self, prompt: PlainPrompt) -> PromptIds:
        """The ids of a prompt; refused if it is too long."""
        ids: PromptIds = self.lm.read_prompts([prompt])[0]
        length, limit = len(self.lm.encoder.encode_prompt(ids)), self._max_prompt_tokens
        if limit is not None and length > limit:
            raise PromptTooLong(
                0, f" has {length} tokens but this server takes at most {limit} as context: shorten it."
            )
        return ids

    def _write(self, jobs: list[QueuedTask], read: list[PromptIds]) -> list[Judged | None]:
        tasks: list[Write] = [job.task for job in jobs]

        def send(job: QueuedTask, piece: str) -> None:
            job.partly_sent = True
            job.call(job.task.on_text, piece)

        listeners = {n: partial(send, job) for n, job in enumerate(jobs) if job.task.on_text is not None}
        answers = self.lm.write(
            read,
            tasks[0].sampling,
            [task.seeds for task in tasks],
            listeners,
            lambda n: not jobs[n].left,  # stop rows that nobody waits for
            progress=False,
        )
        judged: list[Judged | None] = [None] * len(jobs)
        groups: dict[tuple[float, int], list[int]] = {}
        for n, task in enumerate(tasks):
            if not jobs[n].left:
                groups.setdefault((task.alpha, task.neighbors), []).append(n)
        for (alpha, neighbors), rows in groups.items():
            verifications = self.lm.judge([answers[n] for n in rows], alpha, neighbors, progress=False)
            for n, verification in zip(rows, verifications, strict=True):
                judged[n] = self._judged(verification)
        return judged

    def _judge(self, jobs: list[QueuedTask], read: list[PromptIds]) -> list[Judged | None]:
        tasks: list[Judge] = [job.task for job in jobs]
        verifications = self.lm.verify(
            [task.prompt for task in tasks],
            [task.completion for task in tasks],
            alpha=tasks[0].alpha,
            neighbors=tasks[0].neighbors,
            progress=False,
        )
        return [self._judged(verification) for verification in verifications]

    def search(
        self,
        prompts: list[PlainPrompt],
        sampling: Sampling,
        budget: int | None,
        seed: int,
        alpha: float,
        neighbors: int,
    ) -> list[Judged]:
        """Generate answers until one is verified; with a certified or calibrated policy, if one has these settings."""
        for prompt in prompts:
            self.read(prompt)
        prepared = prepared_policies(self.lm, alpha, sampling)
        fitting = [policy for policy in prepared if budget in (None, policy.budget)]
        policy = fitting[0] if fitting else SearchPolicy(budget=DEFAULT_BUDGET if budget is None else budget)
        verifications = self.lm.generate(
            prompts,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=sampling.stop,
            seed=seed,
            alpha=alpha,
            neighbors=neighbors,
            search=policy,
            progress=False,
        )
        digest = self.lm.digest()
        own = [c for c in self.lm.search_calibrations if fitting and c.matches(policy, alpha, sampling, digest)]
        if not own or self.lm.certificate(alpha) is not None:
            return [self._judged(verification) for verification in verifications]
        return [Judged(verification, own[0].region().to_dict()) for verification in verifications]

    def _judged(self, verification: Verification) -> Judged:
        return Judged(verification, self.lm.estimator.region(verification.alpha).to_dict())


def _field(task: Any, error: BadInput) -> str:
    """The name of the field of the request that an error is about."""
    prompt = "messages" if isinstance(task.prompt, list) else "prompt"
    return getattr(task, "where", "") + ("completion" if isinstance(error, BadCompletion) else prompt)
