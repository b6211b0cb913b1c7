"""A minimal HTTP client for an OpenAI-compatible server: it sends JSON, and reads JSON or server-sent events.

h11 implements the protocol; it comes with uvicorn, so the extra `serve` needs no client library. Each request has its own
connection: if the awaiter is cancelled, the connection is closed, and the upstream stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

from sdmlm import __version__
from sdmlm.server.errors import ApiError
from sdmlm.server.settings import Upstream

_READ = 65_536
_MAX_BYTES = 16_000_000  # limit for one response
_THEIR_FAULT, _CLIENTS_FAULT = "The upstream server", (400, 413, 422)


@dataclass
class Reply:
    """A status and headers; the body has not been read yet."""

    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks])


async def ask_json(upstream: Upstream, path: str, payload: dict[str, Any]) -> Any:
    """The JSON that the upstream answers with."""
    async with _post(upstream, path, payload) as reply:
        return _parsed(await reply.body())


async def ask_events(upstream: Upstream, path: str, payload: dict[str, Any]) -> AsyncIterator[Any]:
    """The JSON of each server-sent event, until `[DONE]`."""
    async with _post(upstream, path, payload) as reply:
        buffer = b""
        async for chunk in reply.chunks:
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield _parsed(data)
    raise failed("broke off its answer")


def failed(what: str, code: str = "upstream_error") -> ApiError:
    """An error of the upstream."""
    return ApiError(502, f"{_THEIR_FAULT} {what}.", code=code)


def _parsed(data: bytes) -> Any:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise failed("did not answer in JSON") from error
    if not isinstance(value, dict) or "error" in value:
        raise failed("reported an error")
    return value


@contextlib.asynccontextmanager
async def _post(upstream: Upstream, path: str, payload: dict[str, Any]) -> AsyncIterator[Reply]:
    """A reply with status 200; any other status is raised as the error that our client gets."""
    parts = urlsplit(upstream.url.rstrip("/") + path)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    context = ssl.create_default_context() if secure else None
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
    except (OSError, ssl.SSLError) as error:
        raise failed("cannot be reached", "upstream_unreachable") from error
    try:
        body = json.dumps(payload).encode()
        headers = [
            ("Host", parts.netloc.rpartition("@")[2]),
            ("User-Agent", f"sdmlm/{__version__}"),
            ("Content-Type", "application/json"),
            ("Accept-Encoding", "identity"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        if upstream.api_key is not None:
            headers.append(("Authorization", f"Bearer {upstream.api_key}"))
        connection = h11.Connection(h11.CLIENT)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        for event in (h11.Request(method="POST", target=target, headers=headers), h11.Data(body), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        reply = await _reply(connection, reader)
        if reply.status != 200:
            raise await _refusal(reply)
        yield reply
    except (OSError, h11.RemoteProtocolError, asyncio.IncompleteReadError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise failed("broke off its answer") from error
    finally:
        writer.close()


async def _events(connection: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ))
            continue
        yield event
        if isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
            return


async def _reply(connection: h11.Connection, reader: asyncio.StreamReader) -> Reply:
    events = _events(connection, reader)
    async for event in events:
        if isinstance(event, h11.Response):
            headers = {name.decode().lower(): value.decode("latin-1") for name, value in event.headers}
            return Reply(event.status_code, headers, _data(events))
    raise failed("broke off its answer")


async def _data(events: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    size = 0
    async for event in events:
        if isinstance(event, h11.Data):
            size += len(event.data)
            if size > _MAX_BYTES:
                raise failed("gave an answer that is too large")
            yield bytes(event.data)


async def _refusal(reply: Reply) -> ApiError:
    if reply.status == 429:
        wait = reply.headers.get("retry-after", "1")
        headers = {"Retry-After": wait if wait.isdigit() else "1"}
        return ApiError(429, f"{_THEIR_FAULT} is busy: try again later.", code="upstream_busy", headers=headers)
    if reply.status in _CLIENTS_FAULT:  # what it says about the request is for the client to read
        try:
            said = str(json.loads(await reply.body())["error"]["message"])[:500]
        except (ValueError, KeyError, TypeError, RecursionError):
            said = f"status {reply.status}"
        return ApiError(400, f"{_THEIR_FAULT} refuses this request: {said}", code="upstream_refused")
    return failed(f"answered with status {reply.status}")
