"""The server over HTTP: limits, clients that leave, keys and hosts."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_checks import NAME, PROMPTS, Served, ask, chat, metric, served, trained, user, wait_until
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from sdmlm import SDMLanguageModel
from sdmlm.server.app import make_app
from sdmlm.server.model import Model
from sdmlm.server.settings import ServerSettings, Upstream
from sdmlm.server.web import _is_local, route_of

openai = pytest.importorskip("openai")

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
        for path in ("/v1/models", "/v1/sdm", "/metrics", "/openapi.json"):
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
