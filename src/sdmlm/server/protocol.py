"""Requests in OpenAI's format. Every field is used, or refused by name: nothing is silently ignored.

A field of OpenAI's API that is not supported may be null or have the value that changes nothing (`NEUTRAL`), because some
clients send it. OpenAI samples by default; here temperature is 0, because the SDM layer was fitted over greedy generations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sdmlm.server import fields
from sdmlm.server.errors import ApiError, refused
from sdmlm.server.fields import Body

PlainPrompt = str | list[dict[str, str]]
OnReject = Literal["flag", "abstain", "search"]

MAX_CHOICES = 128
MAX_NEIGHBORS = 100
MAX_BUDGET = 64
INT64 = 2**63

HONOURED = {"model", "n", "stop", "max_tokens", "temperature", "top_p", "seed", "stream", "stream_options", "sdm"}
# Unsupported fields, with the values that have no effect and are therefore allowed.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (),
    "user": (),
    "verbosity": (),
    "web_search_options": (),
}
SDM_FIELDS = {"alpha", "on_reject", "budget", "neighbors"}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Clients send earlier answers back with more fields: those in MESSAGE_EMPTY are allowed if they are null or empty.
MESSAGE_FIELDS = {"role", "content", "refusal"}
MESSAGE_EMPTY = {"name", "tool_calls", "function_call", "audio", "annotations"}


@dataclass(frozen=True)
class SdmOptions:
    """How answers are judged, and what happens to those that are not verified."""

    alpha: float | None = None
    on_reject: OnReject = "flag"
    budget: int | None = None
    neighbors: int = 3


@dataclass(frozen=True)
class Ask:
    """A request for n answers to each prompt."""

    chat: bool
    prompts: tuple[PlainPrompt, ...]
    sdm: SdmOptions
    n: int = 1
    max_tokens: int | None = None
    max_tokens_name: str = "max_tokens"  # as the client called it
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False

    @property
    def buffered(self) -> bool:
        """Whether nothing may be shown before the verdict is known."""
        return self.sdm.on_reject != "flag"

    def rows(self) -> list[PlainPrompt]:
        """The prompt of each choice, in their order."""
        return [prompt for prompt in self.prompts for _ in range(self.n)]


@dataclass(frozen=True)
class GivenAnswer:
    """A prompt with a given answer."""

    prompt: PlainPrompt
    completion: str
    where: str = ""  # before the names of its fields, as in "items[3]."


@dataclass(frozen=True)
class FeedbackRequest:
    """A document with a person's label."""

    document: GivenAnswer
    label: bool


def read_chat(body: Body, model: str) -> Ask:
    """A request to /v1/chat/completions."""
    _check_fields(body, {*HONOURED, "messages", "max_completion_tokens"})
    return _read_ask(body, model, True, (read_messages(body.get("messages"), "messages"),))


def read_completion(body: Body, model: str) -> Ask:
    """A request to /v1/completions."""
    _check_fields(body, {*HONOURED, "prompt"})
    given = body.get("prompt")
    if isinstance(given, list) and given and all(isinstance(p, str) for p in given):
        prompts = tuple(fields.text({"prompt": p}, "prompt") for p in given)
    elif isinstance(given, list):
        raise refused("prompt", "'prompt' must be a string or a list of strings: ids of tokens are not supported.")
    else:
        prompts = (fields.text(body, "prompt"),)
    return _read_ask(body, model, False, prompts)


def _read_ask(body: Body, model: str, chat: bool, prompts: tuple[PlainPrompt, ...]) -> Ask:
    check_model(body, model)
    temperature = fields.number(body, "temperature", 0, 2) or 0.0
    n = fields.whole(body, "n", 1, MAX_CHOICES) or 1
    sdm = read_sdm(body)
    if n > 1 and temperature == 0:
        raise refused("n", f"'n' is {n} but at temperature 0 all answers are the same: give 'temperature' above 0.")
    stream = fields.boolean(body, "stream", False)
    if body.get("stream_options") is not None and not stream:
        raise refused("stream_options", "'stream_options' goes only with 'stream': true.")
    options = fields.mapping(body, "stream_options")
    fields.check_names(options, {"include_usage", "include_obfuscation"}, "stream_options.")
    if fields.boolean(options, "include_obfuscation", False, "stream_options."):
        raise _unsupported("stream_options.include_obfuscation")
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    if name == "max_completion_tokens" and body.get("max_tokens") is not None:
        raise refused("max_tokens", "Give 'max_tokens' or 'max_completion_tokens', not both.")
    return Ask(
        chat=chat,
        prompts=prompts,
        sdm=sdm,
        n=n,
        max_tokens=fields.whole(body, name, 1, INT64),
        max_tokens_name=name,
        temperature=temperature,
        top_p=fields.number(body, "top_p", 0, 1, above=True) or 1.0,
        seed=fields.whole(body, "seed", -INT64, INT64 - 1),
        stop=_read_stop(body.get("stop")),
        stream=stream,
        include_usage=fields.boolean(options, "include_usage", False, "stream_options."),
    )


def read_sdm(body: Body) -> SdmOptions:
    """Our own options."""
    sdm = fields.mapping(body, "sdm")
    fields.check_names(sdm, SDM_FIELDS, "sdm.")
    on_reject = fields.choice(sdm, "on_reject", ("flag", "abstain", "search"), "sdm.")
    budget = fields.whole(sdm, "budget", 1, MAX_BUDGET, "sdm.")
    if budget is not None and on_reject != "search":
        raise refused("sdm.budget", "'sdm.budget' goes only with 'sdm.on_reject': 'search'.")
    neighbors = fields.whole(sdm, "neighbors", 0, MAX_NEIGHBORS, "sdm.")
    return SdmOptions(
        alpha=fields.number(sdm, "alpha", 0.5, 1, above=True, where="sdm."),
        on_reject=on_reject,  # type: ignore[arg-type]
        budget=budget,
        neighbors=3 if neighbors is None else neighbors,
    )


def read_verify(body: Body, model: str) -> tuple[list[GivenAnswer], SdmOptions]:
    """A request to /v1/verify: one document, or several in `items`."""
    check_model(body, model)
    sdm = read_sdm(body)
    if sdm.on_reject != "flag":
        raise refused("sdm.on_reject", "'sdm.on_reject' does not go with given completions: nothing is withheld here.")
    if "items" not in body:
        fields.check_names(body, {"model", "prompt", "messages", "completion", "sdm"})
        return [read_document(body)], sdm
    fields.check_names(body, {"model", "items", "sdm"})
    items = body["items"]
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise refused("items", "'items' must be a list of objects with a prompt and a completion, and not be empty.")
    for n, item in enumerate(items):
        fields.check_names(item, {"prompt", "messages", "completion"}, f"items[{n}].")
    return [read_document(item, f"items[{n}].") for n, item in enumerate(items)], sdm


def read_feedback(body: Body, model: str) -> FeedbackRequest:
    """A request to /v1/feedback."""
    check_model(body, model)
    fields.check_names(body, {"model", "prompt", "messages", "completion", "label"})
    if not isinstance(body.get("label"), bool):
        raise refused("label", "'label' must be true (the completion follows the instructions) or false.")
    return FeedbackRequest(read_document(body), bool(body["label"]))


def read_document(body: Body, where: str = "") -> GivenAnswer:
    """A prompt (or messages) with a completion, in a body or in an item of a list."""
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise refused(f"{where}prompt", f"Give either '{where}prompt' or '{where}messages'.")
    if body.get("prompt") is not None:
        return GivenAnswer(fields.text(body, "prompt", where), fields.string(body, "completion", where), where)
    messages = read_messages(body["messages"], f"{where}messages")
    return GivenAnswer(messages, fields.string(body, "completion", where), where)


def read_messages(messages: Any, name: str) -> list[dict[str, str]]:
    """A conversation that ends with something to answer."""
    if not isinstance(messages, list) or not messages:
        raise refused(name, f"'{name}' must be a list of messages with a role and content, and not be empty.")
    read = [_read_message(message, f"{name}[{n}]") for n, message in enumerate(messages)]
    if read[-1]["role"] == "assistant":
        raise refused(name, f"'{name}' ends with an assistant message: end with what is to be answered.")
    if not read[-1]["content"].strip():
        raise refused(name, f"'{name}' ends without text: write something to answer.", "empty")
    return read


def _read_message(message: Any, name: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise refused(name, f"'{name}' must be an object with a role and content.")
    fields.check_names(message, MESSAGE_FIELDS | MESSAGE_EMPTY, f"{name}.")
    for field in sorted(MESSAGE_EMPTY):
        if message.get(field) not in (None, []):
            raise _unsupported(f"{name}.{field}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(ROLES)
        raise refused(f"{name}.role", f"'{name}.role' must be one of {known}.")
    content, refusal = message.get("content"), message.get("refusal")
    if refusal is not None and (role != "assistant" or not isinstance(refusal, str)):
        raise refused(f"{name}.refusal", f"'{name}.refusal' must be a string, of an assistant message.")
    if content is None and refusal is not None:  # an answer of ours that was withheld, sent back
        content = refusal
    return {"role": ROLES[role], "content": _read_content(content, f"{name}.content")}


def _read_content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise refused(name, f"'{name}' must be a string, or a list of parts of text.")
    parts = []
    for n, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise refused(f"{name}[{n}]", f"'{name}[{n}]' must be {{'type': 'text', 'text': ...}}: only text is read.")
        fields.check_names(part, {"type", "text"}, f"{name}[{n}].")
        parts.append(part["text"])
    return "".join(parts)


def _read_stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(s, str) and s for s in stops):
        raise refused("stop", "'stop' must be a string or a list of at most 4 strings, none of them empty.")
    return tuple(stops)


def check_model(body: Body, model: str) -> None:
    """The model may be omitted; any other name than ours is refused."""
    asked = body.get("model")
    if asked is None or asked == model:
        return
    if not isinstance(asked, str):
        raise refused("model", "'model' must be a string.")
    shown = asked if len(asked) <= 80 else asked[:80] + "..."
    raise ApiError(404, f"There is no model '{shown}' here, only '{model}'.", "model", "model_not_found")


def _check_fields(body: Body, honoured: set[str]) -> None:
    fields.check_names(body, {*honoured, *NEUTRAL})
    for name, neutral in NEUTRAL.items():
        if body.get(name) is not None and not _among(body[name], neutral):
            raise _unsupported(name)


def _among(value: Any, neutral: Sequence[Any]) -> bool:
    """Whether a value is among others, where 0 is not false and 1 is not true."""
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral)


def _unsupported(name: str) -> ApiError:
    return refused(name, f"'{name}' is not supported by this server: leave it out.", "unsupported_field")
