"""The OpenAPI description: every answer is as described, what it allows is accepted, what it forbids is refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_schema import problems, values
from server_checks import NAME, Answer, Served, ask, metric, served, trained
from tiny_sdm_lm import train

from sdmlm import SDMLanguageModel
from sdmlm.server.info import describe
from sdmlm.server.openapi import describe_api
from sdmlm.server.schemas import SCHEMAS, requests
from sdmlm.server.settings import ServerSettings, Upstream

DEFINED = {**SCHEMAS, **requests(NAME)}
BODIES = {
    "/v1/chat/completions": "ChatRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/verify": "VerifyRequest",
    "/v1/feedback": "FeedbackRequest",
}
ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 200),
    st.floats(-2, 3),
    st.text("ab ", max_size=3),
    st.just([]),
    st.just({}),
)
quietly = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = shutil.copytree(trained(), tmp_path_factory.mktemp("openapi") / NAME)
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def described(server: Served) -> Any:
    answer = ask(server.url, "/openapi.json")
    assert answer.status == 200
    return answer.json


def as_described(described: Any, path: str, method: str, answer: Answer) -> None:
    """The answer is one that the description allows."""
    responses = described["paths"][path][method]["responses"]
    assert str(answer.status) in responses, (answer.status, answer.body[:300])
    content = responses[str(answer.status)]["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in content
    if kind == "text/event-stream":
        chunk = content[kind]["itemSchema"]["properties"]["data"]["anyOf"][0]["contentSchema"]
        assert answer.events
        for event in answer.events:
            assert problems(event, chunk, described["components"]["schemas"]) == []
    elif kind == "application/json":
        assert problems(answer.json, content[kind]["schema"], described["components"]["schemas"]) == []
    for name, header in responses[str(answer.status)].get("headers", {}).items():
        assert name.lower() in answer.headers or not header["required"]


def modest(body: Any) -> Any:
    """The same request with less to do, and with the one rule that no schema can say: the last message is to be answered."""
    small = dict(body)
    if isinstance(small.get("n"), int | float):
        small["n"] = min(small["n"], 3)
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(small.get(name), int | float):
            small[name] = min(small[name], 4)
    if isinstance(small.get("sdm"), dict) and isinstance(small["sdm"].get("budget"), int):
        small["sdm"] = {**small["sdm"], "budget": 1}
    if isinstance(small.get("messages"), list):
        small["messages"] = [*small["messages"], {"role": "user", "content": "abc="}]
    if isinstance(small.get("items"), list):
        small["items"] = [modest(item) for item in small["items"]]
    return small


@pytest.mark.parametrize("path", BODIES)
def test_what_is_described_is_accepted(server: Served, described: Any, path: str) -> None:
    seen = Counter()

    @quietly
    @given(values(DEFINED[BODIES[path]], DEFINED).map(modest))
    def check(body: Any) -> None:
        answer = ask(server.url, path, body)
        seen[answer.status] += 1
        as_described(described, path, "post", answer)
        if answer.status != 200:  # the other rule
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        elif path == "/v1/feedback":
            undone = ask(server.url, f"{path}/{answer.json['id']}", method="DELETE")
            assert undone.status == 200
            as_described(described, "/v1/feedback/{id}", "delete", undone)

    check()
    assert seen[200] > 5, seen


@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_described_is_refused(server: Served, described: Any, path: str) -> None:
    """One field is replaced, added or left out."""
    schema, seen = DEFINED[BODIES[path]], Counter()

    @quietly
    @given(values(schema, DEFINED).map(modest), st.data())
    def check(body: Any, data: Any) -> None:
        wrong = copy.deepcopy(body)
        where = wrong
        if isinstance(wrong.get("sdm"), dict) and data.draw(st.booleans()):
            where = wrong["sdm"]
        name = data.draw(st.sampled_from(sorted({*where, "surplus", "n", "sdm", "messages", "prompt", "alpha"})))
        if name in where and data.draw(st.booleans()):
            del where[name]
        else:
            where[name] = data.draw(ANY)
        answer = ask(server.url, path, wrong)
        as_described(described, path, "post", answer)
        if problems(wrong, schema, DEFINED):
            assert 400 <= answer.status < 500, wrong
            seen["refused"] += 1

    check()
    assert seen["refused"] > 5


def test_all_other_routes_are_as_described(server: Served, described: Any) -> None:
    for path in ("/v1/models", "/v1/sdm", "/health", "/metrics"):
        as_described(described, path, "get", ask(server.url, path))
    as_described(described, "/v1/models/{name}", "get", ask(server.url, f"/v1/models/{NAME}"))
    missing = ask(server.url, "/v1/models/other")
    assert missing.status == 404
    as_described(described, "/v1/models/{name}", "get", missing)
    as_described(described, "/v1/feedback/{id}", "delete", ask(server.url, "/v1/feedback/none", method="DELETE"))
    for path, (method, *_) in ((path, [*methods]) for path, methods in described["paths"].items()):
        other = "PUT" if method != "put" else "GET"
        assert ask(server.url, path.replace("{name}", NAME).replace("{id}", "x"), method=other).status == 405


def test_a_certified_model_is_as_described(tmp_path: Path) -> None:
    """Its layers are averaged, so q is no whole number."""
    own = {"documents": "own", "summary": "states+likelihood", "certificate_share": 0.5, "certificate_epsilon": 0.05}
    info = describe(SDMLanguageModel.from_pretrained(train(tmp_path, **own)), NAME)
    assert info["certificate"] is not None
    assert any(q != int(q) for q in info["calibration"]["q"])
    schemas = describe_api(NAME, ServerSettings())["components"]["schemas"]
    assert problems(json.loads(json.dumps(info)), schemas["Info"], schemas) == []


def test_every_route_is_described(server: Served, described: Any) -> None:
    from sdmlm.server.app import make_app

    page = {"/", "/{name}", "/openapi.json"}
    app: Any = make_app(server.model, ServerSettings())
    routes = {(route.path.replace(":path", ""), m.lower()) for route in app.routes for m in route.methods}
    written = {(path, method) for path, methods in described["paths"].items() for method in methods}
    assert {(path, method) for path, method in routes if path not in page and method != "head"} == written


def test_the_settings_show() -> None:
    def statuses(path: str, method: str = "post", **chosen: Any) -> set[str]:
        return set(describe_api(NAME, ServerSettings(**chosen))["paths"][path][method]["responses"])

    chat, feedback = "/v1/chat/completions", "/v1/feedback"
    assert {"401", "502"}.isdisjoint(statuses(chat))
    assert "421" in statuses(chat)
    assert "401" in statuses(chat, api_key="k")
    assert "502" in statuses(chat, upstream=Upstream("http://x/v1", "m"))
    assert "403" not in statuses(feedback)
    assert "403" in statuses(feedback, host="0.0.0.0")
    assert "401" not in statuses("/health", "get", api_key="k")
    secured = describe_api(NAME, ServerSettings(api_key="k"))
    assert secured["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert "k" not in secured["paths"]["/health"]["get"]
    json.dumps(secured, allow_nan=False)


def test_the_checker_sees_what_is_wrong() -> None:
    schema = DEFINED["ChatRequest"]
    good = {"messages": [{"role": "user", "content": "a"}]}
    assert problems(good, schema, DEFINED) == []
    for bad in (
        {},
        {**good, "x": 1},
        {**good, "n": 2},
        {**good, "temperature": 3},
        {**good, "seed": 0.5},
        {**good, "logprobs": 0},
        {**good, "stream": 1},
        {**good, "stream_options": {}},
        {**good, "sdm": {"budget": 3}},
        {**good, "sdm": {"alpha": 0.5}},
        {**good, "max_tokens": 3, "max_completion_tokens": 3},
        {"messages": []},
        {"messages": [{"role": "user"}]},
    ):
        assert problems(bad, schema, DEFINED), bad


@pytest.mark.skipif(shutil.which("schemathesis") is None, reason="needs schemathesis on the PATH (docs/serving.md)")
def test_schemathesis(server: Served) -> None:
    hooks = Path(__file__).resolve().parents[2] / "benchmarks" / "schemathesis_hooks.py"
    command = ["schemathesis", "run", f"{server.url}/openapi.json", "--exclude-checks", "positive_data_acceptance"]
    options = [
        "-n",
        "10",
        "--seed",
        "1",
        "--max-time",
        "60",
        "--phases",
        "coverage,fuzzing",
        "--no-color",
        "--suppress-health-check",
        "all",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"SCHEMATHESIS_HOOKS": str(hooks)}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert metric(server.url, 'sdmlm_requests_total{route="/v1/verify",status="500"}') == 0
