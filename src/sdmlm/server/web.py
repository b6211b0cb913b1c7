"""HTTP handling for all routes: body limits, API keys, clients that disconnect, response headers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sdmlm.server.engine import ignore_result, report
from sdmlm.server.errors import ApiError, internal
from sdmlm.server.metrics import Metrics
from sdmlm.server.settings import ServerSettings
from sdmlm.server.streaming import AnswerStream, to_json

T = TypeVar("T")
LEFT = 499  # status in the metrics for a client that disconnected; never sent
ALL_READ = "sdmlm.all_read"  # key in a scope: whether its body was read completely
LINGER_BYTES, LINGER_SECONDS = 64_000_000, 5.0
ROUTES = {
    "/", "/health", "/metrics", "/openapi.json", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/verify", "/v1/feedback", "/v1/sdm",
}  # fmt: skip
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class JSONAnswer(Response):
    """A value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class ErrorAnswer(JSONAnswer):
    """An error in OpenAI's format.

    It is sent at once, and then the rest of the request's body is read and dropped, within bounds: if the connection were
    closed while the client is still sending, many clients would report a broken pipe instead of the error.
    """

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, error.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        read, more = 0, not scope.get(ALL_READ, False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while more and read < LINGER_BYTES:
                    message = await receive()
                    read += len(message.get("body", b""))
                    more = message.get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class StreamAnswer(StreamingResponse):
    """Server-sent events. The generation stops if the client disconnects, or reads nothing for `seconds`."""

    def __init__(self, stream: AnswerStream, seconds: float) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(stream.events(), headers=headers, media_type="text/event-stream")
        self._stream, self._seconds = stream, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            async with asyncio.timeout(self._seconds):
                await send(message)

        try:
            await super().__call__(scope, receive, sending)
        except TimeoutError as error:
            raise ClientDisconnect from error
        finally:
            self._stream.close()


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The body; refused as soon as it is known to be too large, too slow, or not declared as JSON.

    Only application/json is accepted, to stop other sites' pages from posting here: a browser sends other content types
    without asking, but JSON only after a CORS preflight request, which this server never grants.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "Send the header 'Content-Type: application/json'.", code="unsupported_media_type")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large(limit)
    except TimeoutError as error:
        raise ApiError(408, f"The body did not arrive within {seconds:g} s.", code="timeout") from error
    return bytes(body)


def too_large(limit: int) -> ApiError:
    """A body beyond the limit."""
    return ApiError(413, f"The body is larger than the {limit:,} bytes that this server takes.", code="body_too_large")


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is stopped if the client disconnects before it is there (ClientDisconnect)."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait({task, gone})
        ignore_result(task)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class GuardMiddleware:
    """The ASGI layer around the app: metrics, API keys, hosts, headers, and unexpected errors."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), LEFT

        async def receiving() -> Message:
            message = await receive()
            scope[ALL_READ] = not message.get("more_body", False)
            return message

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            if error := self._refusal(scope):
                await ErrorAnswer(error)(scope, receiving, sending)
            else:
                await self._app(scope, receiving, sending)
        except ClientDisconnect:
            pass
        except Exception as error:
            report(error)
            if status == LEFT:  # otherwise a response has begun and can only be aborted
                await ErrorAnswer(internal())(scope, receiving, sending)
        finally:
            self._metrics.request(route_of(_route_path(scope)), status, time.perf_counter() - start)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, key = Headers(scope=scope), self._settings.api_key
        if key is None:
            # Against DNS rebinding: another site can point its name at this machine to read our answers. So without an
            # API key, only this machine's own names are accepted as host.
            if self._settings.loopback and not _is_local(headers.get("host", "")):
                return ApiError(421, "This server answers only to localhost.", code="misdirected_request")
            return None
        path = _route_path(scope)
        if path.count("/") == 1 and path not in ("/metrics", "/openapi.json"):  # the page with its files, and /health
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
        if scheme.lower() == "bearer" and same:
            return None
        said = "The API key is wrong." if given else "This server needs an API key: send it as a bearer token."
        return ApiError(401, said, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _route_path(scope: Scope) -> str:
    """The path within the app, which may be mounted below another path."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def route_of(path: str) -> str:
    """The path as a label for metrics: one of a few, so that requests cannot create new ones."""
    if path in ROUTES:
        return path
    if path.startswith("/v1/feedback/"):
        return "/v1/feedback/{id}"
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"


def _is_local(host: str) -> bool:
    name, _, port = host.rpartition(":")
    name = (name if port.isdigit() else host).strip("[]").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
