"""The server over HTTP: bad input, and clients that read nothing."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_checks import NAME, Served, ask, chat, user
from starlette.requests import ClientDisconnect

from sdmlm.server.web import LINGER_SECONDS, StreamAnswer

openai = pytest.importorskip("openai")

# Bad input


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/verify", "/v1/feedback"])
def test_bodies_that_are_no_json(server: Served, path: str) -> None:
    for body in (b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000, b'{"a": NaN}'):
        answer = ask(server.url, path, body)
        assert (answer.status, answer.error["code"]) == (400, "invalid_json"), body[:20]


def test_only_json_is_read(server: Served) -> None:
    body = json.dumps({"prompt": "abc=", "completion": "abd", "label": False}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = ask(server.url, "/v1/feedback", body, headers={"Content-Type": kind})
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    assert server.lm.feedback_ids == []


def test_an_error_does_not_hold_up_its_connection(server: Served) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    start = time.monotonic()
    for path in ("/v1/chat/completions", "/nothing") * 4:
        connection.request("POST", path, b"{}", {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status in (400, 404, 405)
        answer.read()
    connection.close()
    assert time.monotonic() - start < 4 * LINGER_SECONDS  # reading on to the end of a body that has ended would wait


def test_routes_and_methods_that_do_not_exist(server: Served) -> None:
    for path, method, status in (("/v1/nothing", "GET", 404), ("/v1/chat/completions", "GET", 405), ("/", "POST", 405)):
        answer = ask(server.url, path, method=method)
        assert answer.status == status
        assert answer.error["type"] == "invalid_request_error"


def test_ten_megabytes_are_refused_unread(server: Served, client: Any) -> None:
    body = json.dumps({"messages": user("a" * 10_000_000)}).encode()
    for headers in ({}, {"Connection": "close"}):  # a client that is still sending gets to see the answer
        for _ in range(3):
            answer = ask(server.url, "/v1/chat/completions", body, headers=headers)
            assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(model=NAME, messages=user("a" * 10_000_000))
    assert error.value.status_code == 413
    connection = socket.create_connection((server.host, server.port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 10000000\r\n\r\n{"
    )
    connection.settimeout(10)
    assert connection.recv(65536).startswith(b"HTTP/1.1 413")  # while nearly all of it has yet to be sent
    connection.close()
    connection = socket.create_connection((server.host, server.port))  # without a length: as soon as it is too much
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    connection.settimeout(10)
    chunk = b"%x\r\n" % 100_000 + b"a" * 100_000 + b"\r\n"
    for _ in range(12):
        connection.sendall(chunk)
    assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    connection.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant"]), "content": st.text(max_size=12)}
)


REQUEST = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=3) | JSON, "max_tokens": st.integers(1, 4)},
    optional={
        "temperature": st.floats(0, 2) | JSON,
        "top_p": st.floats(0, 1) | JSON,
        "n": st.integers(0, 2),
        "seed": st.integers(),
        "stop": st.text(max_size=2) | JSON,
        "stream": st.booleans(),
        "sdm": st.dictionaries(st.sampled_from(["alpha", "on_reject", "budget", "neighbors"]), JSON, max_size=2),
        "user": JSON,
    },
)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=40) | REQUEST.map(lambda value: json.dumps(value).encode()))
def test_nothing_makes_the_server_fail(server: Served, body: bytes) -> None:
    answer = ask(server.url, "/v1/chat/completions", body)
    assert answer.status in (200, 400, 404)
    if answer.status != 200:
        assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_a_500_and_its_words_stay_with_us(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    words = "the client's words"

    async def broken(ask: Any, on_text: Any = None) -> Any:
        if stream:
            on_text(0, "a")
            await asyncio.sleep(0)
        raise RuntimeError(words)

    monkeypatch.setattr(server.model, "generate", broken)
    answer = chat(server.url, "abc=", stream=stream)
    error = answer.events[-1]["error"] if stream else answer.error
    assert (answer.status, error["code"], error["type"]) == (200 if stream else 500, "internal_error", "server_error")
    assert "RuntimeError" in caplog.text
    assert words not in caplog.text + answer.body.decode()


def test_a_client_that_takes_nothing_is_let_go() -> None:
    closed = []

    class Stream:
        async def events(self) -> AsyncIterator[bytes]:
            yield b"x"

        def close(self) -> None:
            closed.append(True)

    async def stuck(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def silent() -> Any:
        await asyncio.sleep(60)

    async def work() -> None:
        with pytest.raises(ClientDisconnect):
            await StreamAnswer(Stream(), 0.05)({"type": "http"}, silent, stuck)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(work(), 20))
    assert closed == [True]


def test_an_empty_completion_can_be_judged(server: Served) -> None:
    answer = ask(server.url, "/v1/verify", {"items": [{"prompt": "abc=", "completion": ""}]})
    assert answer.status == 200
    (found,), v = answer.json["data"], server.lm.verify("abc=", "", progress=False)
    assert (found["text"], found["verdict"], found["q"]) == ("", v.verdict, v.q)
