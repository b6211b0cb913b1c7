"""The queue and its thread: what shares a batch, what is let in, who leaves, what fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from sdmlm.server.engine import Engine, QueuedTask
from sdmlm.server.errors import ApiError


@dataclass(frozen=True)
class Number:
    """A task whose result is its value doubled."""

    value: int
    key: str = "a"


class Runner:
    """Runs batches when it is let; remembers them."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.free = threading.Event()
        self.started = threading.Semaphore(0)

    def __call__(self, jobs: Sequence[QueuedTask]) -> list[Any]:
        self.batches.append([job.task.value for job in jobs])
        self.started.release()
        assert self.free.wait(20)
        return [ValueError("odd") if job.task.value == 13 else 2 * job.task.value for job in jobs]


@contextmanager
def engine(max_batch: int = 4, max_queue: int = 8) -> Iterator[tuple[Engine, Runner]]:
    runner = Runner()
    made = Engine(runner, max_batch, max_queue)
    try:
        yield made, runner
    finally:
        runner.free.set()
        made.close(20)
        assert not made.alive


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


async def started(runner: Runner) -> None:
    """Wait for the next batch to begin."""
    assert await asyncio.to_thread(runner.started.acquire, timeout=20)


def test_equal_keys_share_a_batch_in_order() -> None:
    async def work() -> None:
        with engine() as (e, runner):
            first = asyncio.ensure_future(e.do([Number(0)]))
            await started(runner)
            later = [
                asyncio.ensure_future(e.do([Number(v, key)])) for v, key in ((1, "a"), (2, "b"), (3, "a"), (4, "b"))
            ]
            many = asyncio.ensure_future(e.do([Number(v) for v in (5, 6)]))
            await asyncio.sleep(0)
            assert len(e) == 6
            runner.free.set()
            assert await first == [0]
            assert [(await each)[0] for each in later] == [2, 4, 6, 8]
            assert await many == [10, 12]
            assert runner.batches == [[0], [1, 3, 5, 6], [2, 4]]
            assert len(e) == 0

    run(work)


def test_batches_are_bounded() -> None:
    async def work() -> None:
        with engine(max_batch=3) as (e, runner):
            runner.free.set()
            assert await e.do([Number(v) for v in range(8)]) == [2 * v for v in range(8)]
            assert [v for batch in runner.batches for v in batch] == list(range(8))
            assert max(map(len, runner.batches)) == 3

    run(work)


def test_an_idle_engine_waits_a_moment_for_company() -> None:
    async def work() -> None:
        with engine() as (e, runner):
            runner.free.set()
            await asyncio.sleep(0.05)
            await asyncio.gather(*(e.do([Number(v)]) for v in range(4)))
            assert runner.batches == [[0, 1, 2, 3]]

    run(work)


def test_a_full_queue_lets_in_nothing_of_a_request() -> None:
    async def work() -> None:
        with engine(max_queue=3) as (e, runner):
            running = asyncio.ensure_future(e.do([Number(0)]))
            await started(runner)
            waiting = [asyncio.ensure_future(e.do([Number(v)])) for v in (1, 2)]
            await asyncio.sleep(0)
            with pytest.raises(ApiError) as error:
                await e.do([Number(3), Number(4)])
            assert error.value.status == 429
            assert 1 <= int(error.value.headers["Retry-After"]) <= 60
            assert len(e) == 2
            waiting[0].cancel()  # who leaves makes room
            await asyncio.sleep(0)
            last = asyncio.ensure_future(e.do([Number(5), Number(6)]))
            await asyncio.sleep(0)
            runner.free.set()
            assert await running == [0]
            assert await waiting[1] == [4]
            assert await last == [10, 12]
            assert runner.batches == [[0], [2, 5, 6]]

    run(work)


def test_who_leaves_is_not_worked_for() -> None:
    async def work() -> None:
        with engine() as (e, runner):
            running = asyncio.ensure_future(e.do([Number(0)]))
            await started(runner)
            waiting = asyncio.ensure_future(e.do([Number(1), Number(2)]))
            await asyncio.sleep(0)
            waiting.cancel()
            running.cancel()  # its batch runs on, and nobody minds
            await asyncio.sleep(0)
            runner.free.set()
            assert await e.do([Number(3)]) == [6]
            assert runner.batches == [[0], [3]]

    run(work)


def test_one_failure_is_that_of_its_request() -> None:
    async def work() -> None:
        with engine() as (e, runner):
            runner.free.set()
            bad, good = await asyncio.gather(
                e.do([Number(1), Number(13), Number(2)]), e.do([Number(4)]), return_exceptions=True
            )
            assert isinstance(bad, ValueError)
            assert good == [8]

    run(work)


def test_a_runner_that_breaks_leaves_the_engine_whole(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    prompt = "a secret"

    def broken(jobs: Sequence[QueuedTask]) -> list[Any]:
        calls.append(len(jobs))
        if len(calls) == 1:
            raise RuntimeError(prompt)
        return [job.task.value for job in jobs]

    async def work() -> None:
        e = Engine(broken, 4, 4)
        with pytest.raises(ApiError) as error:
            await e.do([Number(1)])
        assert error.value.status == 500
        assert "secret" not in error.value.message
        assert await e.do([Number(2)]) == [2]
        e.close(20)

    run(work)
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


def test_closing_finishes_the_queue_and_lets_in_no_more() -> None:
    async def work() -> None:
        with engine() as (e, runner):
            asked = [asyncio.ensure_future(e.do([Number(v, str(v))])) for v in range(3)]
            await started(runner)
            closing = asyncio.ensure_future(asyncio.to_thread(e.close, 20))
            await asyncio.sleep(0.05)
            with pytest.raises(ApiError) as error:
                await e.do([Number(9)])
            assert error.value.status == 503
            runner.free.set()
            assert await asyncio.gather(*asked) == [[0], [2], [4]]
            await closing
            assert not e.alive

    run(work)
