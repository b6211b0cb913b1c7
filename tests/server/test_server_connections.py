"""Connections that hold a place without using it are cut off; all others are not."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import server_checks
from server_checks import Served, ask, chat, served, trained

from sdmlm.server import connections

LIMIT = 2.0  # seconds
HEAD = b"POST /v1/verify HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    patch = pytest.MonkeyPatch()
    patch.setattr(connections, "CHECK_SECONDS", 0.05)
    patch.setattr(connections, "HEAD_SECONDS", 0.5)
    made = connections.WatchedProtocol.connection_made

    def with_a_small_buffer(self: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        made(self, transport)

    patch.setattr(connections.WatchedProtocol, "connection_made", with_a_small_buffer)
    patch.setattr(server_checks, "watched", lambda _: connections.watched(LIMIT))
    with served(trained()) as running:
        yield running
    patch.undo()


def opened(server: Served, data: bytes) -> socket.socket:
    """A connection with a small buffer, over which this was sent."""
    connection = socket.socket()
    connection.settimeout(20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((server.host, server.port))
    connection.sendall(data)
    return connection


def rest(connection: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    with connection:
        out = b""
        try:
            while part := connection.recv(65536):
                out += part
        except ConnectionResetError:
            pass
        return out


@pytest.mark.parametrize("data", [b"", b"POST /v1/ver", HEAD])
def test_half_a_head(server: Served, data: bytes) -> None:
    assert rest(opened(server, data)) == b""


def test_half_a_head_after_a_request(server: Served) -> None:
    """uvicorn's own limit between two requests ends with the first byte of the next one."""
    connection = opened(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while b'"version"' not in answer:
        answer += connection.recv(65536)
    connection.sendall(b"GET /he")
    assert rest(connection) == b""


def test_a_head_that_trickles_in(server: Served) -> None:
    connection = opened(server, b"GET /")
    try:
        for _ in range(200):
            connection.sendall(b"x")
            time.sleep(0.05)
    except (ConnectionResetError, BrokenPipeError):
        pass
    else:
        pytest.fail("it was never cut off")
    connection.close()


def large(server: Served) -> bytes:
    """A request with an answer larger than the system's buffers."""
    items = [{"prompt": "abc=", "completion": "abc"}] * 200
    body = json.dumps({"items": items, "sdm": {"neighbors": 48}}).encode()
    assert len(ask(server.url, "/v1/verify", body).body) > 500_000
    return HEAD + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_an_answer_that_nobody_takes(server: Served) -> None:
    connection = opened(server, large(server))
    time.sleep(3 * LIMIT)
    answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert len(answer) < 500_000  # what lay in the system's buffers


class Pretended:
    """A loop and a transport whose time and buffer a test sets."""

    def __init__(self) -> None:
        self.now, self.unsent, self.aborted = 0.0, 0, False

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, function: Any) -> Any:
        return self

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(
    ("unsent", "stopping", "cut_after"),
    [
        ([9_000_000 - 1000 * n for n in range(400)], False, None),  # taken slowly
        ([9_000_000 - 1000 * min(n, 50) for n in range(400)], False, 50 + 120),  # and then no more
        ([0] * 400, False, None),  # the answer is not there yet: the app has a limit of its own
        ([5000] * 400, True, 5),
        ([0] * 400, True, None),
    ],
)
def test_how_long_an_answer_may_lie(unsent: list[int], stopping: bool, cut_after: int | None) -> None:
    pretended: Any = Pretended()
    protocol: Any = object.__new__(connections.watched(120.0))
    protocol.loop = protocol.transport = pretended
    protocol.cycle = SimpleNamespace(response_complete=False, more_body=False)
    protocol._stopping = stopping
    for n, size in enumerate(unsent):
        pretended.now, pretended.unsent = float(n), size
        protocol._watch()
        if pretended.aborted:
            assert n == cut_after
            return
    assert cut_after is None


def test_an_answer_may_take_longer_than_a_head(server: Served) -> None:
    server.slow.seconds = 0.3
    try:
        start = time.monotonic()
        assert chat(server.url, "abc=", max_tokens=2).status == 200
        assert time.monotonic() - start > 0.5
    finally:
        server.slow.seconds = 0.0
