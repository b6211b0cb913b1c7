"""Requests: every field is honoured or refused by its name, and no body makes anything but an answer or an ApiError."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdmlm.server import protocol
from sdmlm.server.errors import ApiError
from sdmlm.server.fields import read_json
from sdmlm.server.protocol import Ask, GivenAnswer, SdmOptions, read_chat, read_completion, read_feedback, read_verify

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
ANY: dict[str, Any] = {  # a value that asks for something, for fields whose type is not "a string"
    "logprobs": True,
    "top_logprobs": 2,
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "logit_bias": {"5": 1},
    "tools": [{"type": "function"}],
    "n": 2,
}


def chat(**fields: Any) -> Ask:
    return read_chat({**HELLO, **fields}, "tiny")


def refusal(read: Any, body: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        read(body, "tiny")
    assert 400 <= error.value.status < 500
    return error.value


def test_defaults() -> None:
    asked = chat()
    assert asked == Ask(True, ([{"role": "user", "content": "hello"}],), SdmOptions())
    assert (asked.n, asked.temperature, asked.top_p, asked.seed, asked.max_tokens) == (1, 0.0, 1.0, None, None)
    assert asked.sdm == SdmOptions(None, "flag", None, 3)
    assert read_completion({"prompt": "hi"}, "tiny") == Ask(False, ("hi",), SdmOptions())


def test_everything_is_read() -> None:
    asked = chat(
        model="tiny",
        n=3,
        temperature=0.5,
        top_p=0.9,
        seed=-5,
        max_completion_tokens=7,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        sdm={"alpha": 0.9, "on_reject": "search", "budget": 2, "neighbors": 0},
    )
    assert asked == Ask(
        True,
        ([{"role": "user", "content": "hello"}],),
        SdmOptions(0.9, "search", 2, 0),
        3,
        7,
        "max_completion_tokens",
        0.5,
        0.9,
        -5,
        ("a", "b"),
        True,
        True,
    )
    assert asked.buffered
    assert chat(stop="x").stop == ("x",)
    several = read_completion({"prompt": ["a", "b"], "n": 2, "temperature": 1}, "tiny")
    assert several.rows() == ["a", "a", "b", "b"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_every_field_of_openai_is_honoured_or_refused_by_name(kind: str) -> None:
    openai = pytest.importorskip("openai")
    if kind == "chat":
        params, read, base = openai.types.chat.completion_create_params, read_chat, HELLO
    else:
        params, read, base = openai.types.completion_create_params, read_completion, {"prompt": "hi"}
    known = set(typing.get_type_hints(params.CompletionCreateParamsNonStreaming))
    assert {"n", "stop", "temperature", "logprobs", "user"} <= known  # these are the names that we think they are
    honoured = protocol.HONOURED | {"messages", "max_completion_tokens"} | {"prompt"}
    for name in known - honoured:
        error = refusal(read, {**base, name: ANY.get(name, "something")})
        assert (error.param, error.code) == (name, "unsupported_field"), name
        assert f"'{name}'" in error.message
        assert read({**base, name: None}, "tiny") == read(base, "tiny")


@pytest.mark.parametrize(
    "neutral",
    [
        {"frequency_penalty": 0.0},
        {"presence_penalty": 0},
        {"logprobs": False},
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"service_tier": "auto"},
        {"store": False},
        {"logit_bias": {}},
    ],
)
def test_values_that_ask_for_nothing_pass(neutral: dict[str, Any]) -> None:
    assert chat(**neutral) == chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"echo": True}, "echo"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"best_of": True}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 2}, "n"),  # all the same at temperature 0
        ({"n": 1.5}, "n"),
        ({"n": 1e300}, "n"),
        ({"n": 129, "temperature": 1}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 0.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"model": 5}, "model"),
        ({"sdm": 5}, "sdm"),
        ({"sdm": {"beta": 1}}, "sdm.beta"),
        ({"sdm": {"alpha": 0.5}}, "sdm.alpha"),
        ({"sdm": {"alpha": 1.01}}, "sdm.alpha"),
        ({"sdm": {"alpha": "0.9"}}, "sdm.alpha"),
        ({"sdm": {"on_reject": "drop"}}, "sdm.on_reject"),
        ({"sdm": {"on_reject": ["flag"]}}, "sdm.on_reject"),
        ({"sdm": {"budget": 2}}, "sdm.budget"),
        ({"sdm": {"on_reject": "search", "budget": 0}}, "sdm.budget"),
        ({"sdm": {"neighbors": -1}}, "sdm.neighbors"),
        ({"sdm": {"neighbors": True}}, "sdm.neighbors"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "refusal": "y"}]}, "messages[0].refusal"),
        ({"messages": [{"role": "assistant", "content": None, "refusal": 3}]}, "messages[0].refusal"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "x": 1}]}, "messages[0].x"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "messages"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(read_chat, {**HELLO, **fields})
    assert error.param == param
    assert error.body()["error"]["type"] == "invalid_request_error"


def test_a_whole_number_may_be_spelled_with_a_point() -> None:
    """JSON has one kind of number: 2.0 is the whole number 2."""
    asked = chat(n=2.0, temperature=1, seed=-3.0, max_tokens=1e3)
    assert (asked.n, asked.seed, asked.max_tokens) == (2, -3, 1000)
    assert all(isinstance(value, int) for value in (asked.n, asked.seed, asked.max_tokens))


def test_messages() -> None:
    (prompt,) = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
            {"role": "user", "content": "d"},
            {"role": "assistant", "content": None, "refusal": "Rejected."},  # as we withhold an answer
            {"role": "user", "content": "e"},
        ]
    ).prompts
    assert prompt == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "Rejected."},
        {"role": "user", "content": "e"},
    ]


@pytest.mark.parametrize("prompt", [None, "", "  ", 5, [], [1, 2], [[1, 2]], ["a", ""], ["a", 5], {"a": 1}])
def test_prompts_of_completions(prompt: Any) -> None:
    assert refusal(read_completion, {"prompt": prompt}).param == "prompt"


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_a_number_beyond_all_floats_is_refused_like_any_other(name: str) -> None:
    assert refusal(read_chat, {**HELLO, name: 10**400}).param == name
    assert refusal(read_chat, {**HELLO, "sdm": {"alpha": 10**400}}).param == "sdm.alpha"
    assert refusal(read_chat, {**HELLO, name: float("nan")}).param == name


def test_another_model_is_not_found() -> None:
    error = refusal(read_chat, {**HELLO, "model": "gpt-5"})
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")


def test_verify_and_feedback() -> None:
    body = {"prompt": "a", "completion": "b"}
    assert read_verify({**body, "sdm": {"alpha": 0.7}}, "tiny") == ([GivenAnswer("a", "b")], SdmOptions(0.7))
    talk = {**HELLO, "completion": "b"}
    documents, _ = read_verify({"items": [body, talk], "model": "tiny"}, "tiny")
    hello = [{"role": "user", "content": "hello"}]
    assert documents == [GivenAnswer("a", "b", "items[0]."), GivenAnswer(hello, "b", "items[1].")]
    assert read_feedback({**body, "label": False}, "tiny").label is False
    assert read_verify({**body, "completion": ""}, "tiny")[0] == [GivenAnswer("a", "")]  # an answer may be empty
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (read_verify, {"prompt": "a"}, "completion"),
        (read_verify, {**body, "completion": 5}, "completion"),
        (read_verify, {**body, **HELLO}, "prompt"),
        (read_verify, {"completion": "b"}, "prompt"),
        (read_verify, {**body, "label": True}, "label"),
        (read_verify, {"items": []}, "items"),
        (read_verify, {"items": [5]}, "items"),
        (read_verify, {"items": [body], "prompt": "a"}, "prompt"),
        (read_verify, {"items": [body, {"prompt": "a"}]}, "items[1].completion"),
        (read_verify, {"items": [{**body, "x": 1}]}, "items[0].x"),
        (read_verify, {**body, "sdm": {"on_reject": "abstain"}}, "sdm.on_reject"),
        (read_feedback, {**body, "label": "yes"}, "label"),
        (read_feedback, {**body, "label": 1}, "label"),
        (read_feedback, body, "label"),
        (read_feedback, {**body, "label": True, "sdm": {}}, "sdm"),
    ]
    for read, bad, param in wrong:
        assert refusal(read, bad).param == param, bad


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"\xff\xfe{}",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        "{}".encode("utf-16"),
    ],
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError) as error:
        read_json(body)
    assert (error.value.status, error.value.code) == (400, "invalid_json")


def test_half_characters_that_find_each_other_are_text() -> None:
    assert read_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "flag", "tiny"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*protocol.HONOURED, *protocol.NEUTRAL, "messages", "prompt", "completion", "items", "label"})
PARTS = ["role", "content", "type", "text", "prompt", "messages", "completion", *sorted(protocol.SDM_FIELDS)]
OBJECTS = st.dictionaries(st.sampled_from(PARTS), VALUES, max_size=4)
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES | OBJECTS | st.lists(OBJECTS, max_size=3), max_size=5)


def refused_or_none(read: Callable[[], Any]) -> ApiError | None:
    try:
        read()
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("read", [read_chat, read_completion, read_verify, read_feedback])
@pytest.mark.parametrize("base", [{}, HELLO, {"prompt": "a", "completion": "b", "label": True}])
def test_whatever_comes_is_read_or_refused(read: Any, base: dict[str, Any]) -> None:
    @settings(max_examples=60, deadline=None)
    @given(BODIES)
    def check(body: dict[str, Any]) -> None:
        error = refused_or_none(lambda: read({**base, **body}, "tiny"))
        if error is not None:
            assert 400 <= error.status < 500
            json.dumps(error.body(), allow_nan=False)

    check()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_whatever_bytes_come_are_read_or_refused(body: bytes) -> None:
    error = refused_or_none(lambda: read_json(body))
    assert error is None or error.status == 400
