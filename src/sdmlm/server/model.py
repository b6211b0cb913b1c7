"""The SDM language model behind the queue: answers, verdicts and feedback for the routes to await."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sdmlm.errors import NoSuchFeedback
from sdmlm.generation.language_model import SDMLanguageModel
from sdmlm.server.engine import Engine, QueuedTask, log
from sdmlm.server.errors import ApiError, refused
from sdmlm.server.info import describe
from sdmlm.server.protocol import Ask, FeedbackRequest, GivenAnswer, PlainPrompt, SdmOptions
from sdmlm.server.settings import ServerSettings
from sdmlm.server.work import Alone, Judge, Judged, Worker, Write
from sdmlm.storage.artifacts import SDM_FOLDER, DamagedError

OnText = Callable[[int, str], None]
MAX_TOKENS = 65_536  # of an answer, if the model itself has no bound


class Model:
    """One model behind one engine. `info` is the information for clients; it is updated after feedback."""

    def __init__(self, lm: SDMLanguageModel, name: str, settings: ServerSettings) -> None:
        self.name, self.alpha, self.tags = name, lm.alpha, lm.tags
        self.fingerprint = "fp_" + str(lm.metadata["fingerprint"])[:12]
        self.created = int(time.time())
        self.max_rows = settings.max_queue
        self._lm, self._worker = lm, Worker(lm, settings.max_prompt_tokens)
        self.info = describe(lm, name)
        self.engine = Engine(self._run, settings.max_batch, settings.max_queue)

    def _run(self, jobs: Sequence[QueuedTask]) -> list[Any]:
        """A batch, over the support with all feedback so far: other servers may share the folder."""
        if self._lm.folder is not None:
            try:
                estimator = self._lm.feedback_store.refresh(self._lm.folder / SDM_FOLDER)
            except (OSError, ValueError) as error:  # go on with what is known
                log.error("%s", error)  # names files, quotes no request
            else:
                if estimator is not None:
                    self._lm.estimator = estimator
                    self.info = describe(self._lm, self.name)
        return self._worker(jobs)

    def max_tokens(self, asked: int | None) -> int:
        """max_new_tokens: as requested, but no more than the context; by default as in the SDM layer's own documents."""
        default = self._lm.sampling().max_new_tokens
        return default if asked is None else min(asked, self._lm.encoder.max_length or MAX_TOKENS)

    async def generate(self, ask: Ask, on_text: OnText | None = None) -> list[Judged]:
        """Answers to a request, in the order of its choices. `on_text(choice, piece)` is called with their text as it comes."""
        rows = ask.rows()
        self.check_rows(len(rows), "n" if ask.n > 1 else "prompt")
        sampling = self._lm.sampling(self.max_tokens(ask.max_tokens), ask.temperature, ask.top_p, ask.stop)
        seed = secrets.randbits(32) if ask.seed is None else ask.seed % 2**64
        alpha, neighbors = self._alpha(ask.sdm), ask.sdm.neighbors
        if ask.sdm.on_reject == "search":
            work = self._worker
            task = Alone(lambda _: work.search(rows, sampling, ask.sdm.budget, seed, alpha, neighbors), rows[0])
            (judged,) = await self.engine.do([task])
            return list(judged)
        return await self.engine.do(
            [
                Write(prompt, sampling, (seed, n), alpha, neighbors, on_text and _listener(on_text, n))
                for n, prompt in enumerate(rows)
            ]
        )

    async def verify(self, documents: Sequence[GivenAnswer], sdm: SdmOptions) -> list[Judged]:
        """Judge given answers."""
        self.check_rows(len(documents), "items")
        alpha = self._alpha(sdm)
        return await self.engine.do([Judge(d.prompt, d.completion, alpha, sdm.neighbors, d.where) for d in documents])

    async def check_prompts(self, prompts: Sequence[PlainPrompt]) -> None:
        """Refuse prompts that are too long to be judged."""
        await self.engine.do([Alone(lambda _: [self._worker.read(p) for p in prompts], prompts[0])])

    async def feedback(self, given: FeedbackRequest) -> tuple[str, int]:
        """Add a judged document to the support; returns its id and the new size of the support."""

        def add(lm: SDMLanguageModel) -> tuple[str, int]:
            with _kept(lm):
                id = lm.feedback(given.document.prompt, given.document.completion, given.label)
            self.info = describe(lm, self.name)
            return id, self.info["support_size"]

        (stored,) = await self.engine.do([Alone(add, given.document.prompt)])
        return stored  # type: ignore[no-any-return]

    async def undo_feedback(self, id: str) -> None:
        """Remove a document of feedback from the support."""

        def remove(lm: SDMLanguageModel) -> None:
            with _kept(lm):
                try:
                    lm.undo_feedback(id)
                except NoSuchFeedback as error:
                    raise ApiError(404, f"There is no feedback '{id[:80]}' to undo.", "id", "not_found") from error
            self.info = describe(lm, self.name)

        await self.engine.do([Alone(remove)])

    def check_rows(self, rows: int, param: str) -> None:
        """Refuse a request that could never fit into the queue."""
        if rows > self.max_rows:
            raise refused(param, f"The request asks for {rows} verdicts but at most {self.max_rows} fit at once.")

    def _alpha(self, sdm: SdmOptions) -> float:
        return self.alpha if sdm.alpha is None else sdm.alpha

    def close(self, seconds: float | None = None) -> None:
        """Finish the queued tasks and stop."""
        self.engine.close(seconds)


@contextlib.contextmanager
def _kept(lm: SDMLanguageModel) -> Iterator[None]:
    """Turn failures to store feedback into errors for the client: feedback is acknowledged only when it is on disk."""
    if lm.folder is None:
        said = "This model has no folder of its own to keep feedback in: serve a saved copy."
        raise ApiError(403, said, code="feedback_disabled")
    try:
        yield
    except DamagedError as error:
        log.error("%s", error)  # names files, quotes no request
        said = "The feedback kept with this model cannot be read: its operator will have to restore it."
        raise ApiError(500, said, code="feedback_not_kept") from error
    except (OSError, ValueError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        said = f"The feedback could not be written: {cause.strerror or type(cause).__name__}."
        raise ApiError(500, said, code="feedback_not_kept") from error


def _listener(on_text: OnText, n: int) -> Callable[[str], None]:
    return lambda piece: on_text(n, piece)
