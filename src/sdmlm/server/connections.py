"""Time limits for connections that stay open without progress, such as a request that is never completed or an answer never read.

uvicorn limits only the time between two requests. Here a connection is also closed if the head of a request does not arrive in
time, if the client reads nothing of an answer for some time, and, while the server is stopping, if a body does not arrive.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CHECK_SECONDS = 1.0
HEAD_SECONDS = 30.0  # for the head of a request, or `seconds` if that is less
STOPPING_SECONDS = 5.0  # for a client without progress while the server is stopping


class WatchedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with these limits. `seconds`: how long a client may read nothing of an answer."""

    seconds = 120.0
    _timer: asyncio.TimerHandle | None = None
    _state: tuple[Any, ...] = ()
    _since = 0.0
    _stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self._stopping, self._since = True, self.loop.time()
        super().shutdown()

    def _watch(self) -> None:
        cycle = self.cycle
        waits = cycle is None or cycle.response_complete  # for the head of a request
        unsent = self.transport.get_write_buffer_size()
        state, now = (waits, cycle, unsent), self.loop.time()
        if state != self._state:
            self._state, self._since = state, now
        if now - self._since >= self._allowed(waits, unsent):
            self.transport.abort()
            return
        self._timer = self.loop.call_later(CHECK_SECONDS, self._watch)

    def _allowed(self, waits: bool, unsent: int) -> float:
        """How many seconds the present state may last. The work of the app has its own limits."""
        if self._stopping:
            return STOPPING_SECONDS if waits or unsent or self.cycle.more_body else float("inf")
        if unsent:
            return self.seconds
        return min(HEAD_SECONDS, self.seconds) if waits else float("inf")


def watched(seconds: float) -> type[WatchedProtocol]:
    """The protocol with this limit in seconds."""
    return type("WatchedProtocol", (WatchedProtocol,), {"seconds": seconds})
