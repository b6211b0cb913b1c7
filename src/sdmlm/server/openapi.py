"""The OpenAPI description of the server, at /openapi.json: every route, every status, every field."""

from __future__ import annotations

from typing import Any

from sdmlm import __version__
from sdmlm.server.schemas import SCHEMAS, Schema, ref, requests
from sdmlm.server.settings import ServerSettings

ERRORS = {
    400: "A field is wrong, unknown or not supported; the body is not JSON; the prompt is longer than the context.",
    401: "The API key is missing or wrong.",
    403: "This server does not take feedback.",
    404: "There is no such model, feedback or path.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    421: "The Host header does not name this machine, which a local server without a key requires.",
    429: "Too many requests are waiting or in progress: try again after Retry-After seconds.",
    500: "A bug of the server, or feedback that could not be stored.",
    502: "The upstream server is down, or its answer is invalid or too long to judge.",
    503: "The server is shutting down, or its model has failed.",
    504: "The answer was not ready in time.",
}
BODY = (400, 404, 408, 413, 415, 429, 500, 503, 504)


def describe_api(model: str, settings: ServerSettings) -> dict[str, Any]:
    """The OpenAPI document of a server with this model and these settings."""
    key = settings.api_key is not None
    upstream = (502,) if settings.upstream else ()
    answers = (*BODY, *upstream)
    feedback = BODY if settings.feedback else (*BODY, 403)
    name = {"name": "name", "in": "path", "required": True, "schema": {"enum": [model]}}
    id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    undo = [code for code in feedback if code not in (408, 413, 415)]  # it has no body
    paths: dict[str, Any] = {
        "/v1/chat/completions": {
            "post": _ask("An answer to a conversation, with its verdict.", "ChatRequest", "ChatAnswer", answers)
        },
        "/v1/completions": {
            "post": _ask("An answer to a prompt, with its verdict.", "CompletionRequest", "CompletionAnswer", answers)
        },
        "/v1/verify": {"post": _post("Verdicts on given answers.", "VerifyRequest", "Verdicts", BODY)},
        "/v1/feedback": {
            "post": _post(
                "Add an answer with a person's verdict to the support.", "FeedbackRequest", "Feedback", feedback
            )
        },
        "/v1/feedback/{id}": {
            "delete": {**_route("Remove feedback.", "FeedbackUndone", undo), "parameters": [id]},
        },
        "/v1/models": {"get": _route("The model of this server, as a list of one.", "Models")},
        "/v1/models/{name}": {
            "get": {**_route("The model with this name.", "ModelCard", (404,)), "parameters": [name]},
        },
        "/v1/sdm": {"get": _route("Data of the page: regions, calibration points, examples.", "Info")},
        "/health": {"get": _route("Whether the model can work.", "Health")},
        "/metrics": {"get": _route("Metrics in the format of Prometheus.", None)},
    }
    paths["/health"]["get"]["responses"]["503"] = _json("The model has failed.", ref("Health"))
    for path, methods in paths.items():
        for route in methods.values():
            if path != "/health" and key:
                route["security"] = [{"key": []}]
                route["responses"]["401"] = _error(401)
            elif not key and settings.loopback:
                route["responses"]["421"] = _error(421)
    schemes = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if key else {}
    return {
        "openapi": "3.2.0",  # the first with `itemSchema`, for streams
        "info": {
            "title": "sdmlm",
            "version": __version__,
            "summary": "OpenAI's API; every answer comes with a verdict and its evidence.",
        },
        "paths": paths,
        "components": {"schemas": {**SCHEMAS, **requests(model)}, **schemes},
    }


def _json(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _error(code: int) -> dict[str, Any]:
    answer = _json(ERRORS[code], ref("Error"))
    if code == 429:
        wait = {"description": "Seconds to wait.", "required": True, "schema": {"type": "integer", "minimum": 0}}
        answer["headers"] = {"Retry-After": wait}
    return answer


def _route(summary: str, answer: str | None, errors: Any = ()) -> dict[str, Any]:
    """A route without a body; `answer` None is plain text."""
    plain = {"description": summary, "content": {"text/plain": {"schema": {"type": "string"}}}}
    good = plain if answer is None else _json(summary, ref(answer))
    return {"summary": summary, "responses": {"200": good, **{str(code): _error(code) for code in sorted(errors)}}}


def _post(summary: str, body: str, answer: str, errors: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": ref(body)}}
    return {**_route(summary, answer, errors), "requestBody": {"required": True, "content": content}}


def _ask(summary: str, body: str, answer: str, errors: Any) -> dict[str, Any]:
    """A route whose answer may also be a stream."""
    route = _post(summary, body, answer, errors)
    chunk = {"anyOf": [ref(answer.replace("Answer", "Chunk")), ref("Error")]}
    data = {
        "type": "string",
        "anyOf": [{"contentMediaType": "application/json", "contentSchema": chunk}, {"enum": ["[DONE]"]}],
        "description": "A chunk; the evidence is on the last one of each choice. The last event of all is [DONE].",
    }
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    route["responses"]["200"]["content"]["text/event-stream"] = {"itemSchema": event}
    return route
