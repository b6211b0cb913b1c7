"""Dynamic batching: a bounded queue, and a single thread that uses the model.

The event loop puts tasks into the queue and awaits their results. The thread takes the oldest task and all others with the
same key, up to `max_batch`. If an awaiter is cancelled (its client has disconnected, its time is up), its task leaves the queue;
if the task is already running, `QueuedTask.left` is set, which the code that runs it checks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from sdmlm.server.errors import ApiError, busy, internal

log = logging.getLogger("sdmlm.server")

GATHER_SECONDS = 0.005  # an idle model waits this long for further requests, as those sent together arrive one by one


class Task(Protocol):
    """Tasks with equal keys may be run together."""

    @property
    def key(self) -> Hashable: ...


class QueuedTask:
    """A task in the queue or running. It is made and awaited on the event loop, and runs on the engine's thread."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.left = False  # nobody waits for the result any more
        self.partly_sent = False  # part of the result has been sent to the client
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.future.add_done_callback(ignore_result)

    def leave(self) -> None:
        """To be called when nobody waits any more; does nothing if the result is there."""
        self.left = True
        self.future.cancel()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """From the engine's thread: call a function on the event loop; calls keep their order."""
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has been closed: nobody listens
            self.left = True

    def finish(self, result: Any) -> None:
        """From the engine's thread: set the result, or the exception."""
        self.call(self._finish, result)

    def _finish(self, result: Any) -> None:
        if self.future.done():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


def ignore_result(future: asyncio.Future[Any]) -> None:
    """Done callback that keeps asyncio from logging an exception that nobody awaits (the client left, another row failed)."""
    if future.done() and not future.cancelled():
        future.exception()


class Engine:
    """`run` gets a batch of jobs and returns a result, or an exception, for each of them."""

    def __init__(
        self,
        run: Callable[[Sequence[QueuedTask]], Sequence[Any]],
        max_batch: int,
        max_queue: int,
        name: str = "sdmlm-model",
    ) -> None:
        self._run, self._max_batch, self._max_queue = run, max_batch, max_queue
        self._queue: deque[QueuedTask] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._seconds = 1.0  # of a batch, a moving average
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._queue)

    @property
    def alive(self) -> bool:
        """Whether tasks in the queue will be run."""
        return self._thread.is_alive()

    async def do(self, tasks: Sequence[Any]) -> list[Any]:
        """The results of tasks. Either all of them enter the queue or none."""
        jobs = [QueuedTask(task) for task in tasks]
        self._admit(jobs)
        try:
            return [await job.future for job in jobs]
        finally:
            for job in jobs:
                job.leave()

    def _admit(self, jobs: list[QueuedTask]) -> None:
        with self._changed:
            if self._closing:
                raise ApiError(503, "The server is shutting down.", code="shutting_down")
            if len(self._queue) + len(jobs) > self._max_queue and any(job.left for job in self._queue):
                self._queue = deque(job for job in self._queue if not job.left)
            waiting = len(self._queue)
            if waiting + len(jobs) > self._max_queue:
                raise busy(
                    f"{waiting} answers are already waiting and at most {self._max_queue} may: try again later.",
                    (1 + waiting / self._max_batch) * self._seconds,
                )
            self._queue.extend(jobs)
            self._changed.notify()

    def close(self, seconds: float | None = None) -> None:
        """Refuse new tasks, finish those in the queue, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)

    # On the thread

    def _work(self) -> None:
        while batch := self._next_batch():
            start = time.monotonic()
            for job, result in zip(batch, self._results(batch), strict=True):
                job.finish(result)
            self._seconds += 0.2 * (time.monotonic() - start - self._seconds)

    def _next_batch(self) -> list[QueuedTask]:
        """The oldest job and those that may run with it; empty when the engine is closed and the queue is empty."""
        with self._changed:
            while True:
                if not self._queue:
                    if self._closing:
                        return []
                    self._changed.wait()
                    if self._queue and not self._closing:  # was idle
                        until = time.monotonic() + GATHER_SECONDS
                        while len(self._queue) < self._max_batch and (left := until - time.monotonic()) > 0:
                            self._changed.wait(left)
                waiting = [job for job in self._queue if not job.left]
                batch = [job for job in waiting if job.task.key == waiting[0].task.key][: self._max_batch]
                taken = set(map(id, batch))
                self._queue = deque(job for job in waiting if id(job) not in taken)
                if batch:
                    return batch

    def _results(self, batch: list[QueuedTask]) -> Sequence[Any]:
        try:
            return self._run(batch)
        except Exception as error:
            report(error)
            return [internal()] * len(batch)


def report(error: Exception) -> None:
    """Log where an error happened, without its message, which may quote a request."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s while a request was answered:\n%s", type(error).__name__, frames)
