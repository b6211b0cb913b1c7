"""JSON schemas of the requests and responses of the server, for its OpenAPI description.

Where possible they are made from the code that reads or writes the fields (`protocol.NEUTRAL`, the fields of `Verification`), so
that they cannot differ. Rules that a schema cannot express are in the descriptions.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from sdmlm.estimator.explain import Exemplar
from sdmlm.generation.measured import Measured
from sdmlm.generation.verification import Verification
from sdmlm.server import protocol
from sdmlm.server.answers import TEXT_FIELDS
from sdmlm.server.metrics import OUTCOMES

Schema = dict[str, Any]
PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def ref(name: str) -> Schema:
    """A reference to one of `SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: Schema, optional: Schema | None = None, **more: Any) -> Schema:
    """An object with these fields and no others."""
    properties = {**required, **(optional or {})}
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
        **more,
    }


def array(items: Schema, **more: Any) -> Schema:
    """A list."""
    return {"type": "array", "items": items, **more}


def const(value: Any) -> Schema:
    """One value."""
    return {"enum": [value]}


def or_null(schema: Schema) -> Schema:
    """The same, or null."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def of_type(hint: Any) -> Schema:
    """The schema of an annotated value. A number that is not finite goes out as null."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for each in get_args(hint) for kind in _kinds(of_type(each))]
        return {"type": [*dict.fromkeys(kinds)]}
    if get_origin(hint) is tuple:
        return array(of_type(get_args(hint)[0]))
    if dataclasses.is_dataclass(hint):
        return ref(getattr(hint, "__name__", ""))
    return {"type": ["number", "null"] if hint is float else PLAIN[hint]}


def _kinds(schema: Schema) -> list[str]:
    kinds = schema["type"]
    return [kinds] if isinstance(kinds, str) else kinds


def of_dataclass(cls: type, without: tuple[str, ...] = ()) -> Schema:
    """The fields of a dataclass."""
    return {name: of_type(hint) for name, hint in get_type_hints(cls).items() if name not in without}


STRING, FLAG, WHOLE = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
NUMBER = {"type": ["number", "null"]}
TEXT = {"type": "string", "pattern": r"\S", "description": "More than white space."}
COUNT = {"type": "integer", "minimum": 0}
ANSWER = {"type": "string", "description": "The answer to judge; may be empty."}

# Requests

SDM = record(
    {},
    {
        "alpha": {"type": ["number", "null"], "exclusiveMinimum": 0.5, "maximum": 1},
        "on_reject": {
            "enum": ["flag", "abstain", "search", None],
            "description": "What to do with unverified answers.",
        },
        "budget": {
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": protocol.MAX_BUDGET,
            "description": "Further tries.",
        },
        "neighbors": {"type": ["integer", "null"], "minimum": 0, "maximum": protocol.MAX_NEIGHBORS},
    },
    description="budget is only allowed with on_reject: search.",
    anyOf=[
        {"properties": {"budget": {"type": "null"}}},
        {"properties": {"on_reject": const("search")}, "required": ["on_reject"]},
    ],
)
SDM_GIVEN = record(
    {},
    {
        "alpha": SDM["properties"]["alpha"],
        "on_reject": {"enum": ["flag", None]},
        "budget": {"type": "null"},
        "neighbors": SDM["properties"]["neighbors"],
    },
)
PART = record({"type": const("text"), "text": STRING})
CONTENT = {"anyOf": [STRING, array(ref("Part"), minItems=1)]}
EMPTY = {name: {"anyOf": [{"type": "null"}, array({}, maxItems=0)]} for name in sorted(protocol.MESSAGE_EMPTY)}
MESSAGE = {
    "anyOf": [
        record(
            {"role": {"enum": ["system", "developer", "user"]}, "content": CONTENT},
            {"refusal": {"type": "null"}, **EMPTY},
        ),
        record({"role": const("assistant"), "content": CONTENT}, {"refusal": or_null(STRING), **EMPTY}),
        record(
            {"role": const("assistant"), "refusal": STRING},
            {"content": {"type": "null"}, **EMPTY},
            description="An answer that was withheld, sent back.",
        ),
    ]
}
MESSAGES = array(
    ref("Message"), minItems=1, description="The last message is not an assistant's, and has more than white space."
)
LIMIT = {"type": ["integer", "null"], "minimum": 1, "maximum": protocol.INT64}
NO_LIMIT = {"properties": {"max_tokens": {"type": "null"}}}
ASK = {
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": protocol.MAX_CHOICES},
    "stop": {
        "anyOf": [
            {"type": "null"},
            {"type": "string", "minLength": 1},
            array({"type": "string", "minLength": 1}, maxItems=4),
        ]
    },
    "max_tokens": LIMIT,
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2, "description": "0 by default."},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "seed": {"type": ["integer", "null"], "minimum": -protocol.INT64, "maximum": protocol.INT64 - 1},
    "stream": or_null(FLAG),
    "stream_options": or_null(record({}, {"include_usage": or_null(FLAG), "include_obfuscation": {"enum": [False, None]}})),
    "sdm": or_null(ref("Sdm")),
    **{name: {"enum": [None, *values]} for name, values in protocol.NEUTRAL.items()},
}  # fmt: skip
RULES = [
    {  # several answers need random sampling
        "anyOf": [
            {"properties": {"n": {"enum": [None, 1]}}},
            {"properties": {"temperature": {"type": "number", "exclusiveMinimum": 0}}, "required": ["temperature"]},
        ]
    },
    {
        "anyOf": [
            {"properties": {"stream_options": {"type": "null"}}},
            {"properties": {"stream": const(True)}, "required": ["stream"]},
        ]
    },
]


def requests(model: str) -> dict[str, Schema]:
    """The schemas of bodies; `model` is the only model name that is accepted."""
    name = {"enum": [model, None], "description": "May be left out; any other name is answered with 404."}
    prompt = {
        "properties": {"messages": {"type": "null"}, "prompt": {"type": "string"}},
        "required": ["prompt"],
    }
    messages = {
        "properties": {"prompt": {"type": "null"}, "messages": {"type": "array"}},
        "required": ["messages"],
    }
    given = {"prompt": or_null(TEXT), "messages": or_null(MESSAGES)}
    either = {"anyOf": [prompt, messages], "description": "Either prompt or messages."}
    one = record({"completion": ANSWER}, {**given, "model": name, "sdm": or_null(ref("SdmOfGiven"))}, **either)
    tokens = {"anyOf": [NO_LIMIT, {"properties": {"max_completion_tokens": {"type": "null"}}}]}
    return {
        "ChatRequest": record(
            {"messages": MESSAGES},
            {**ASK, "model": name, "max_completion_tokens": LIMIT},
            allOf=[*RULES, tokens],
            description="n above 1 needs a temperature above 0; stream_options are only allowed with stream.",
        ),
        "CompletionRequest": record(
            {"prompt": {"anyOf": [TEXT, array(TEXT, minItems=1)]}}, {**ASK, "model": name}, allOf=RULES
        ),
        "Document": record({"completion": ANSWER}, given, **either),
        "VerifyRequest": {
            "anyOf": [
                one,
                record(
                    {"items": array(ref("Document"), minItems=1)},
                    {"model": name, "sdm": or_null(ref("SdmOfGiven"))},
                ),
            ]
        },
        "FeedbackRequest": record(
            {"completion": ANSWER, "label": {**FLAG, "description": "Whether the completion follows the prompt."}},
            {**given, "model": name},
            **either,
        ),
    }


# Responses

EVIDENCE = of_dataclass(Verification, without=("yes",)) | {
    **{name: or_null(STRING) for name in TEXT_FIELDS},  # null if an answer is withheld
    "verified": FLAG,
    "outcome": {"enum": [name.replace("_", " ") for name in OUTCOMES]},
    "region": ref("Region"),
}
CHOICE = {"index": COUNT, "logprobs": {"type": "null"}}
END = {"finish_reason": STRING, "sdm": ref("Evidence")}
FRAME = {"id": STRING, "created": WHOLE, "model": STRING, "system_fingerprint": STRING}


def chunk(kind: str, said: Schema, refusal: Schema | None = None) -> Schema:
    """One event of a stream: text, or the end of a choice with its evidence, or, as the last, the usage."""
    text = record({**CHOICE, **said, "finish_reason": {"type": "null"}})
    end = record({**CHOICE, **said, **END}, refusal)
    return record(
        {**FRAME, "object": const(kind), "choices": array({"anyOf": [text, end]})}, {"usage": or_null(ref("Usage"))}
    )


MODEL_CARD = record({"id": STRING, "object": const("model"), "created": WHOLE, "owned_by": STRING})
CALIBRATION = {
    **{name: array(WHOLE) for name in ("label", "prediction")},
    **{name: array(NUMBER) for name in ("q", "d", "q_prime", "probability")},
    "accepted": array(FLAG),
}

SCHEMAS: dict[str, Schema] = {
    "Sdm": SDM,
    "SdmOfGiven": SDM_GIVEN,
    "Part": PART,
    "Message": MESSAGE,
    "Exemplar": record(of_dataclass(Exemplar), description="A known document near the answer."),
    "Region": record(
        {"alpha": {"type": "number"}, "q_min": NUMBER, "psi": array(NUMBER)},
        description="The high-reliability region; null means that no value reaches the threshold.",
    ),
    "Evidence": record(EVIDENCE, description="What the SDM layer says about an answer: the fields of Verification."),
    "Usage": record({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT}),
    "ChatAnswer": record(
        {**FRAME, "object": const("chat.completion"), "choices": array(ref("ChatChoice")), "usage": ref("Usage")}
    ),
    "ChatChoice": record(
        {
            **CHOICE,
            **END,
            "message": record({"role": const("assistant"), "content": or_null(STRING), "refusal": or_null(STRING)}),
        }
    ),
    "ChatChunk": chunk(
        "chat.completion.chunk",
        {"delta": record({}, {"role": const("assistant"), "content": STRING, "refusal": STRING})},
    ),
    "CompletionAnswer": record(
        {**FRAME, "object": const("text_completion"), "choices": array(ref("CompletionChoice")), "usage": ref("Usage")}
    ),
    "CompletionChoice": record({**CHOICE, **END, "text": STRING}, {"refusal": STRING}),
    "CompletionChunk": chunk("text_completion", {"text": STRING}, {"refusal": STRING}),
    "Verdicts": record({"object": const("list"), "model": STRING, "data": array(ref("Evidence"))}),
    "Feedback": record({"id": STRING, "object": const("feedback"), "support_size": COUNT}),
    "FeedbackUndone": record({"id": STRING, "object": const("feedback"), "deleted": const(True)}),
    "ModelCard": MODEL_CARD,
    "Models": record({"object": const("list"), "data": array(ref("ModelCard"))}),
    "Measured": record(of_dataclass(Measured), description="Counts over one test set."),
    "Certificate": record(
        {
            **{name: {"type": "number"} for name in ("alpha", "delta", "epsilon", "least_usual")},
            "certified": FLAG,
            "least_certainty": NUMBER,
            **dict.fromkeys(("prompts", "right", "accepted", "accepted_right", "needed"), COUNT),
            **dict.fromkeys(("source", "says"), STRING),
        },
        description="The rule that decides which answers are verified.",
    ),
    "Info": record(
        {
            "model": STRING,
            "alpha": {"type": "number"},
            "tags": record(dict.fromkeys(("open", "close", "yes", "no", "separator"), STRING)),
            "classes": array(STRING),
            "region": ref("Region"),
            "regions": array(ref("Region")),
            "calibration": record(CALIBRATION),
            "support_size": COUNT,
            "max_new_tokens": WHOLE,
            "max_length": or_null(WHOLE),
            "chat": FLAG,
            "examples": array(STRING),
            "control_tokens": array(STRING),
            "measured": array(ref("Measured")),
            "certificate": or_null(ref("Certificate")),
            "documents": {**STRING, "description": "The kind of documents that the SDM layer was fitted on."},
        }
    ),
    "Health": record({"status": {"enum": ["ok", "failed"]}, "version": STRING}),
    "Error": record(
        {
            "error": record(
                {"message": STRING, "type": STRING, "param": or_null(STRING), "code": or_null(STRING)},
                description="param names the field to correct.",
            )
        }
    ),
}
