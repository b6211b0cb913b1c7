"""The server over HTTP: the official client, streams, errors, limits, keys, clients that leave."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_checks import NAME, PROMPTS, Served, ask, chat, metric, served, trained, wait_until
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.routing import Mount
from starlette.testclient import TestClient

from sdmlm import SDMLanguageModel, Verification
from sdmlm.server import app as server_app
from sdmlm.server.app import make_app
from sdmlm.server.model import Model
from sdmlm.server.settings import ServerSettings, Upstream
from sdmlm.server.web import LINGER_SECONDS, StreamAnswer, _is_local, route_of

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = shutil.copytree(trained(), tmp_path_factory.mktemp("served") / "model")
    with served(Path(folder), max_batch=8, max_queue=32, max_concurrent=24, timeout=10.0) as running:
        yield running


@pytest.fixture
def slow(server: Served) -> Iterator[Any]:
    """Slow passes for one test."""
    yield server.slow
    server.slow.seconds = 0.0
    wait_until(lambda: metric(server.url, "sdmlm_requests_in_progress") == 0)


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def expected(server: Served, prompt: str, **options: Any) -> Verification:
    found: Verification = server.lm.generate(user(prompt), progress=False, **options)
    return found


# The official client


def test_chat(server: Served, client: Any) -> None:
    answer = client.chat.completions.create(model=NAME, messages=user("abc="))
    v = expected(server, "abc=")
    choice = answer.choices[0]
    assert choice.message.content == v.text == "abc"
    assert (choice.message.role, choice.message.refusal, choice.finish_reason) == ("assistant", None, "stop")
    evidence = choice.model_extra["sdm"]
    assert evidence["accepted"] is v.accepted is True
    assert evidence["verdict"] == "Yes"
    assert evidence["verified"] is True
    assert [e["id"] for e in evidence["exemplars"]] == [e.id for e in v.exemplars]
    assert evidence["region"]["alpha"] == evidence["alpha"] == server.lm.alpha
    assert set(v.to_dict()) | {"region"} == set(evidence)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (v.prompt_tokens, v.completion_tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (answer.object, answer.model) == ("chat.completion", NAME)
    assert answer.system_fingerprint


def test_options_steer_the_verdict(server: Served, client: Any) -> None:
    def evidence(**sdm: Any) -> dict[str, Any]:
        answer = client.chat.completions.create(model=NAME, messages=user("abc="), extra_body={"sdm": sdm})
        found: dict[str, Any] = answer.choices[0].model_extra["sdm"]
        return found

    assert (evidence(alpha=0.6)["alpha"], evidence(alpha=0.6)["region"]["alpha"]) == (0.6, 0.6)
    assert [len(evidence(neighbors=k)["exemplars"]) for k in (0, 1, 5)] == [0, 1, 5]
    assert evidence(alpha=1.0)["accepted"] is expected(server, "abc=", alpha=1.0).accepted


def test_sampling_settings_are_honoured(server: Served, client: Any) -> None:
    settings: dict[str, Any] = {"temperature": 1.8, "top_p": 0.9, "seed": 11, "max_tokens": 14}
    answer = client.chat.completions.create(model=NAME, messages=user("abc="), n=4, **settings)
    settings["max_new_tokens"] = settings.pop("max_tokens")
    found = server.lm.generate([user("abc=")] * 4, progress=False, **settings)
    assert [c.message.content for c in answer.choices] == [v.text for v in found]
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert len({v.text for v in found}) > 1
    assert [c.finish_reason for c in answer.choices] == [v.finish_reason for v in found]
    assert answer.usage.prompt_tokens == found[0].prompt_tokens  # once, not four times
    assert answer.usage.completion_tokens == sum(v.completion_tokens for v in found)
    short = client.chat.completions.create(model=NAME, messages=user("abc="), max_completion_tokens=2)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 2
    stopped = client.chat.completions.create(model=NAME, messages=user("abc="), stop=["c"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("ab", "stop")
    huge = client.chat.completions.create(model=NAME, messages=user("abc="), max_tokens=10**12, temperature=1.0, seed=1)
    assert huge.choices[0].message.content is not None


def test_samples_without_a_seed_differ(client: Any) -> None:
    answers = {
        client.chat.completions.create(model=NAME, messages=user("abc="), temperature=2.0).choices[0].message.content
        for _ in range(8)
    }
    assert len(answers) > 1


def test_completions(server: Served, client: Any) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPTS[:3], extra_body={"sdm": {"neighbors": 1}})
    found = server.lm.generate(PROMPTS[:3], progress=False)
    assert [c.text for c in answer.choices] == [v.text for v in found]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [c.model_extra["sdm"]["verdict"] for c in answer.choices] == [v.verdict for v in found]
    assert answer.usage.prompt_tokens == sum(v.prompt_tokens for v in found)
    assert answer.object == "text_completion"
    pieces = client.completions.create(model=NAME, prompt="abc=", stream=True)
    chunks = list(pieces)
    assert "".join(c.choices[0].text for c in chunks) == expected(server, "abc=").text
    assert chunks[-1].choices[0].model_extra["sdm"]["verdict"] == "Yes"


def test_models(client: Any) -> None:
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "sdmlm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_reach_the_client_as_its_own(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=NAME, messages=user("abc="), logprobs=True)
    assert (error.value.param, error.value.code, error.value.type) == (
        "logprobs",
        "unsupported_field",
        "invalid_request_error",
    )
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=NAME, messages=user("abc="), extra_body={"sdm": {"alpha": 3}})
    assert error.value.param == "sdm.alpha"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=user("abc="))
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=NAME, messages=user("ab" * 200))
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:  # a stream that cannot begin is an error like any other
        client.chat.completions.create(model=NAME, messages=user("ab" * 200), stream=True)
    assert error.value.code == "context_length_exceeded"


# Streams


def test_streams_bring_the_body_and_then_the_evidence(server: Served, client: Any) -> None:
    """Many sampled answers, with tags of every sort: nothing of a tag leaks, and the pieces are the text."""
    settings: dict[str, Any] = {"temperature": 1.8, "seed": 4, "n": 6}
    stream = client.chat.completions.create(
        model=NAME,
        messages=user("abc="),
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=24,
        **settings,
    )
    texts, evidence, roles = [""] * 6, [None] * 6, [None] * 6
    *chunks, last = list(stream)
    for chunk in chunks:
        (choice,) = chunk.choices
        assert chunk.usage is None
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] = roles[choice.index] or choice.delta.role
        assert evidence[choice.index] is None  # nothing comes after it
        if choice.finish_reason:
            evidence[choice.index] = choice.model_extra["sdm"]
    n = settings.pop("n")
    found = server.lm.generate([user("abc=")] * n, max_new_tokens=24, progress=False, **settings)
    assert texts == [v.text for v in found]
    assert [e["text"] for e in evidence] == texts  # type: ignore[index]
    assert [e["verdict"] for e in evidence] == [v.verdict for v in found]  # type: ignore[index]
    assert set(roles) == {"assistant"}
    assert last.choices == []
    assert last.usage.completion_tokens == sum(v.completion_tokens for v in found)


def test_text_comes_while_it_is_written(server: Served, slow: Any) -> None:
    slow.seconds = 0.05
    connection = socket.create_connection((server.host, server.port))
    body = json.dumps({"messages": user("abc="), "stream": True}).encode()
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    got, times = b"", []
    while b"[DONE]" not in got:
        got += connection.recv(65536)
        times.append(time.monotonic())
    connection.close()
    assert times[-1] - times[0] > 0.15  # several passes lie between the first piece and the end
    assert b"text/event-stream" in got


def test_usage_comes_only_where_asked_for(server: Served) -> None:
    answer = chat(server.url, "abc=", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert all("usage" not in event for event in answer.events)


def rejected_prompt(server: Served, alpha: float) -> str:
    """A prompt whose answer is not verified at this alpha."""
    found = server.lm.generate([user(p) for p in PROMPTS], alpha=alpha, progress=False)
    return next(p for p, v in zip(PROMPTS, found, strict=True) if not v.verified)


@pytest.mark.parametrize("stream", [False, True])
def test_abstain_withholds_what_is_not_verified(server: Served, client: Any, stream: bool) -> None:
    bad = rejected_prompt(server, 1.0)
    v = expected(server, bad, alpha=1.0)
    options = {"extra_body": {"sdm": {"alpha": 1.0, "on_reject": "abstain"}}, "stream": stream}
    answer = client.chat.completions.create(model=NAME, messages=user(bad), **options)
    if stream:
        chunks = list(answer)
        assert not any(c.choices[0].delta.content for c in chunks)
        refusal, evidence = chunks[-1].choices[0].delta.refusal, chunks[-1].choices[0].model_extra["sdm"]
    else:
        assert answer.choices[0].message.content is None
        refusal, evidence = answer.choices[0].message.refusal, answer.choices[0].model_extra["sdm"]
    assert refusal == v.reason
    assert (evidence["text"], evidence["completion"], evidence["generated"]) == (None, None, None)
    assert evidence["verified"] is False
    raw = ask(server.url, "/v1/completions", {"prompt": bad, **options["extra_body"], "stream": stream})  # type: ignore[dict-item]
    (choice,) = (raw.events[-1] if stream else raw.json)["choices"]
    assert (choice["text"], choice["refusal"]) == ("", v.reason)


@pytest.mark.parametrize("stream", [False, True])
def test_abstain_lets_through_what_is_verified(server: Served, stream: bool) -> None:
    answer = chat(server.url, "abc=", stream=stream, sdm={"on_reject": "abstain"})
    if stream:
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in answer.events) == "abc"
    else:
        assert answer.json["choices"][0]["message"] == {"role": "assistant", "content": "abc", "refusal": None}


def test_search(server: Served, client: Any) -> None:
    from sdmlm.generation.search import SearchPolicy

    bad = rejected_prompt(server, 0.97)
    v = expected(server, bad, alpha=0.97, search=SearchPolicy(budget=2))
    sdm = {"alpha": 0.97, "on_reject": "search", "budget": 2}
    for stream in (False, True):
        answer = chat(server.url, bad, sdm=sdm, stream=stream, seed=0)
        choice = (answer.events[-1] if stream else answer.json)["choices"][0]
        assert (choice["sdm"]["text"], choice["sdm"]["tries"]) == (v.text, v.tries)
        assert choice["sdm"]["calibrated"] is False
        if stream:
            assert "".join(e["choices"][0]["delta"].get("content", "") for e in answer.events) == v.text


# Other routes


def test_verify(server: Served, client: Any) -> None:
    one = client.post(
        "/verify", body={"messages": user("abc="), "completion": "abc\n<verified>No</verified>"}, cast_to=object
    )
    assert one["data"][0]["text"] == "abc"
    assert one["data"][0]["verdict"] == "Yes"
    items = [{"prompt": p, "completion": c} for p, c in zip(PROMPTS, ("abc", "h.", "x"), strict=False)]
    answer = ask(server.url, "/v1/verify", {"items": items, "sdm": {"neighbors": 1}}).json
    assert answer["object"] == "list"
    found = server.lm.verify([i["prompt"] for i in items], [i["completion"] for i in items], progress=False)
    assert [d["verdict"] for d in answer["data"]] == [v.verdict for v in found]
    assert [d["q"] for d in answer["data"]] == [v.q for v in found]
    assert [len(d["exemplars"]) for d in answer["data"]] == [1, 1, 1]
    assert answer["data"][0]["region"]["alpha"] == server.lm.alpha


def test_feedback_and_undo(server: Served) -> None:
    size = ask(server.url, "/v1/sdm").json["support_size"]
    given = ask(server.url, "/v1/feedback", {"prompt": "abc=", "completion": "abd", "label": False})
    assert given.status == 200
    assert ask(server.url, "/v1/sdm").json["support_size"] == size + 1 == given.json["support_size"]
    id = given.json["id"]
    assert ask(server.url, f"/v1/feedback/{id.replace(':', '%3A')}", method="DELETE").json["deleted"] is True
    assert ask(server.url, "/v1/sdm").json["support_size"] == size
    again = ask(server.url, f"/v1/feedback/{id}", method="DELETE")
    assert (again.status, again.error["code"]) == (404, "not_found")


def test_facts(server: Served) -> None:
    assert ask(server.url, "/health").json["status"] == "ok"
    assert ask(server.url, "/v1/sdm").json == server.model.info
    before = metric(server.url, 'sdmlm_answers_total{outcome="verified"}')
    chat(server.url, "abc=")
    assert metric(server.url, 'sdmlm_answers_total{outcome="verified"}') == before + 1
    assert metric(server.url, 'sdmlm_requests_total{route="/v1/chat/completions",status="200"}') > 0
    assert metric(server.url, 'sdmlm_request_seconds_count{route="/v1/chat/completions"}') > 0
    assert metric(server.url, "sdmlm_queue_length") == 0


def test_page(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("index.html", "app.js", "style.css", "icon.svg"):
        (tmp_path / name).write_text(name)
    (tmp_path.parent / "secret.txt").write_text("secret")
    monkeypatch.setattr(server_app, "PAGE", tmp_path)
    kinds = {"": "text/html", "app.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
    for name, kind in kinds.items():
        answer = ask(server.url, f"/{name}")
        assert (answer.status, answer.body.decode()) == (200, name or "index.html")
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ("/nothing.js", "/../secret.txt", "/..%2fsecret.txt", "/%2e%2e/secret.txt", "/a/b.js"):
        assert ask(server.url, path).status == 404
    for path in ("/docs", "/redoc", "/openapi.json"):  # FastAPI's own, which load things from elsewhere
        assert ask(server.url, path).status == 404


def test_the_real_page_asks_nothing_of_others() -> None:
    for path in server_app.PAGE.glob("*"):
        text = path.read_text(encoding="utf-8")
        assert "https://" not in text.replace("http://www.w3.org/", ""), path.name


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


# Limits


def test_too_many_requests(server: Served, slow: Any) -> None:
    """32 may wait and 8 run; a request for 30 more is refused, and all that were let in are answered."""
    slow.seconds = 0.3  # long enough for a busy machine; none at the end
    with ThreadPoolExecutor(40) as pool:
        first = [pool.submit(chat, server.url, p, max_tokens=20) for p in PROMPTS[:8]]
        wait_until(lambda: server.slow.passes > 0 and metric(server.url, "sdmlm_queue_length") == 0)
        more = pool.submit(chat, server.url, "abc=", n=30, temperature=1.0)
        wait_until(lambda: metric(server.url, "sdmlm_queue_length") == 30)
        refused = chat(server.url, "abc=", n=30, temperature=1.0)
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        never = chat(server.url, "abc=", n=33, temperature=1.0)
        assert (never.status, never.error["param"]) == (400, "n")
        slow.seconds = 0.0
        assert [f.result().status for f in first] == [200] * 8
        assert len(more.result().json["choices"]) == 30


def test_too_many_in_progress(server: Served, slow: Any) -> None:
    """Bodies that do not come count as well: 24 may be in progress."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 50\r\n\r\n{"
    )
    connections = [socket.create_connection((server.host, server.port)) for _ in range(24)]
    for connection in connections:
        connection.sendall(head)
    wait_until(lambda: metric(server.url, "sdmlm_requests_in_progress") == 24)
    assert chat(server.url, "abc=").status == 429
    for connection in connections:
        connection.close()
    wait_until(lambda: metric(server.url, "sdmlm_requests_in_progress") == 0)
    assert chat(server.url, "abc=").status == 200


def test_time_is_limited() -> None:
    with served(trained(), timeout=0.5) as server:
        server.slow.seconds = 0.2
        answer = chat(server.url, "abcdefgh=")
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        server.slow.seconds = 0.1
        events = chat(server.url, "abc=", stream=True).events  # it had begun: the error comes in the stream
        assert events[-1]["error"]["code"] == "timeout"
        server.slow.seconds = 0.0
        connection = socket.create_connection((server.host, server.port))
        connection.sendall(
            b"POST /v1/verify HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        connection.settimeout(10)
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
        connection.close()
        assert chat(server.url, "abc=").status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_costing(server: Served, slow: Any, stream: bool) -> None:
    slow.seconds = 0.05
    start, left = slow.passes, metric(server.url, "sdmlm_requests_total")
    body = json.dumps({"messages": user("abcdefgh="), "stream": stream}).encode()
    connection = socket.create_connection((server.host, server.port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    wait_until(lambda: slow.passes > start + 2)
    connection.close()
    wait_until(lambda: metric(server.url, "sdmlm_requests_in_progress") == 0)
    assert metric(server.url, "sdmlm_requests_total") > left
    stopped = slow.passes
    time.sleep(0.4)
    assert slow.passes <= stopped + 1
    slow.seconds = 0.0
    assert chat(server.url, "abc=").status == 200


def test_a_client_that_leaves_the_queue_is_not_worked_for(server: Served, slow: Any) -> None:
    slow.seconds = 0.05
    thread = threading.Thread(target=chat, args=(server.url, "abcdefgh="))
    start = slow.passes
    thread.start()
    wait_until(lambda: slow.passes > start)
    body = json.dumps({"messages": user("abc="), "max_tokens": 3}).encode()
    connection = socket.create_connection((server.host, server.port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    wait_until(lambda: metric(server.url, "sdmlm_queue_length") == 1)
    connection.close()
    wait_until(lambda: metric(server.url, 'sdmlm_requests_total{route="/v1/chat/completions",status="499"}') > 0)
    thread.join()
    after = slow.passes
    time.sleep(0.2)
    assert slow.passes == after


# Keys and hosts


def test_keys() -> None:
    with served(trained(), api_key="secret") as server:
        for path in ("/v1/models", "/v1/sdm", "/metrics"):
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "secret"},
                {"Authorization": "Basic secret"},
            ):
                answer = ask(server.url, path, headers=headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
            assert ask(server.url, path, headers={"Authorization": "Bearer secret"}).status == 200
        assert chat(server.url, "abc=").status == 401
        assert ask(server.url, "/health").status == 200
        assert ask(server.url, "/health", headers={"Host": "sdmlm.example"}).status == 200  # behind a proxy
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
        assert client.chat.completions.create(model=NAME, messages=user("abc=")).choices[0].message.content == "abc"
        wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_keys_hold_wherever_the_app_is_mounted() -> None:
    settings = ServerSettings(api_key="secret")
    model = Model(SDMLanguageModel.from_pretrained(trained()), NAME, settings)
    app = make_app(model, settings)
    for mounted, root in ((Starlette(routes=[Mount("/sdm", app)]), ""), (app, "/sdm")):
        client = TestClient(mounted, root_path=root)
        assert client.get("/sdm/v1/models").status_code == 401
        assert client.get("/sdm/metrics").status_code == 401
        assert client.get("/sdm/health").status_code == 200
        assert client.get("/sdm/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
    model.close(20)


def test_feedback_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with served(shutil.copytree(trained(), tmp_path / "model")) as server:

        def full(*_: Any) -> None:
            try:
                raise OSError(28, "No space left on device")
            except OSError as error:
                raise ValueError(f"Could not save to {tmp_path}") from error

        monkeypatch.setattr("sdmlm.generation.feedback.write_artifact", full)
        answer = ask(server.url, "/v1/feedback", {"prompt": "abc=", "completion": "abc", "label": True})
        assert (answer.status, answer.error["code"]) == (500, "feedback_not_kept")
        assert str(tmp_path) not in answer.error["message"]
        assert "No space left" in answer.error["message"]


def test_damaged_feedback_is_not_the_fault_of_who_gives_more(tmp_path: Path) -> None:
    with served(shutil.copytree(trained(), tmp_path / "model")) as server:
        given = {"prompt": "abc=", "completion": "abc", "label": True}
        assert ask(server.url, "/v1/feedback", given).status == 200
        (tmp_path / "model" / "sdm" / "feedback" / "config.json").write_text("{")
        answer = ask(server.url, "/v1/feedback", given)
        assert (answer.status, answer.error["code"]) == (500, "feedback_not_kept")
        assert str(tmp_path) not in answer.error["message"]


def test_an_empty_completion_can_be_judged(server: Served) -> None:
    answer = ask(server.url, "/v1/verify", {"items": [{"prompt": "abc=", "completion": ""}]})
    assert answer.status == 200
    (found,), v = answer.json["data"], server.lm.verify("abc=", "", progress=False)
    assert (found["text"], found["verdict"], found["q"]) == ("", v.verdict, v.q)


def test_a_server_for_this_machine_answers_only_to_its_names(server: Served) -> None:
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "[::1]", "127.0.0.2"):
        assert ask(server.url, "/v1/models", headers={"Host": host}).status == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1"):
        assert ask(server.url, "/v1/models", headers={"Host": host}).status == 421, host
    assert not _is_local("")


def test_feedback_needs_a_key_where_others_can_connect() -> None:
    assert ServerSettings().feedback
    assert not ServerSettings(host="0.0.0.0").feedback
    assert ServerSettings(host="0.0.0.0", api_key="x").feedback
    with served(trained(), host="0.0.0.0") as server:
        url = f"http://127.0.0.1:{server.port}"
        answer = ask(url, "/v1/feedback", {"prompt": "abc=", "completion": "abc", "label": True})
        assert (answer.status, answer.error["code"]) == (403, "feedback_disabled")
        assert ask(url, "/v1/feedback/feedback:1", method="DELETE").status == 403
        assert chat(url, "abc=").status == 200


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"port": 70000}, "port is 70000"),
        ({"port": True}, "port is True"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_queue": 1.5}, "max_queue is 1.5"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"api_key": ""}, "API key"),
        ({"api_key": " x"}, "API key"),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServerSettings(**wrong)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:y/v1", "http://x:0/v1"])
def test_upstreams_are_checked(url: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        Upstream(url, "m")
    with pytest.raises(ValueError, match="--upstream-model"):
        Upstream("http://x/v1", "")


def test_secrets_are_not_shown() -> None:
    assert "hush" not in repr(ServerSettings(api_key="hush", upstream=Upstream("http://x/v1", "m", "hush")))


def test_loopback() -> None:
    assert all(ServerSettings(host=host).loopback for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(ServerSettings(host=host).loopback for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"))


def test_labels_of_routes_are_few() -> None:
    assert route_of("/v1/feedback/abc") == "/v1/feedback/{id}"
    assert route_of("/v1/models/a/b") == "/v1/models/{model}"
    assert route_of("/whatever") == route_of("/v1/x") == "other"
    assert route_of("/v1/sdm") == "/v1/sdm"
