"""The server over HTTP: the official client, streams, every route."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from server_checks import NAME, PROMPTS, Served, ask, chat, metric, user

from sdmlm import Verification
from sdmlm.server import app as server_app

openai = pytest.importorskip("openai")


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
    for path in ("/docs", "/redoc"):  # FastAPI's own, which load things from elsewhere
        assert ask(server.url, path).status == 404


def test_the_real_page_asks_nothing_of_others() -> None:
    for path in server_app.PAGE.glob("*"):
        text = path.read_text(encoding="utf-8")
        assert "https://" not in text.replace("http://www.w3.org/", ""), path.name
