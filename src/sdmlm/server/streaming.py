"""Answers as server-sent events: text while it is generated, the evidence on the last chunk of each choice, `[DONE]`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sdmlm.server.answers import ResponseBuilder
from sdmlm.server.engine import ignore_result, report
from sdmlm.server.errors import ApiError, internal
from sdmlm.server.work import Judged

OnText = Callable[[int, str], None]


class AnswerStream:
    """The events of one request. `generate(on_text)` makes the answers; it starts at once.

    `begin` waits for the first text, so that an error before it can still get its own HTTP status. `close` stops the
    generation and must always be called.
    """

    def __init__(self, builder: ResponseBuilder, generate: Callable[[OnText | None], Awaitable[list[Judged]]]) -> None:
        self._builder = builder
        self._pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        on_text = None if builder.ask.buffered else lambda n, text: self._pieces.put_nowait((n, text))
        self._answers: asyncio.Future[list[Judged]] = asyncio.ensure_future(generate(on_text))
        self._answers.add_done_callback(ignore_result)
        self._answers.add_done_callback(lambda _: self._pieces.put_nowait(None))
        self._next: tuple[int, str] | None = None

    async def begin(self) -> None:
        """Wait for the first piece, or the end; raises the error if there was one before."""
        self._next = await self._pieces.get()
        if self._next is None:
            await self._answers

    async def events(self) -> AsyncIterator[bytes]:
        """The bytes to send, after `begin`."""
        builder, shown = self._builder, [0] * len(self._builder.ask.rows())
        try:
            if builder.ask.chat:
                for n in range(len(shown)):
                    yield _event(builder.first(n))
            while self._next is not None:
                n, text = self._next
                shown[n] += len(text)
                yield _event(builder.piece(n, text))
                self._next = await self._pieces.get()
            judged = await self._answers
            for n, each in enumerate(judged):
                rest = "" if builder.withholds(each) else each.verification.text[shown[n] :]
                if rest:
                    yield _event(builder.piece(n, rest))
                yield _event(builder.last(n, each))
            if builder.ask.include_usage:
                yield _event(builder.used(judged))
        except ApiError as error:  # too late for an HTTP error: the status has been sent
            yield _event(error.body())
        except Exception as error:
            report(error)
            yield _event(internal().body())
        finally:
            self.close()
        yield b"data: [DONE]\n\n"

    def close(self) -> None:
        """Stop the generation; to be called when the client reads no more."""
        self._answers.cancel()


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def to_json(value: Any) -> bytes:
    """Compact standard JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
