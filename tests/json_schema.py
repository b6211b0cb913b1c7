"""JSON schemas for tests: values made from them (`values`), and what is wrong with a value (`problems`).

Only the keywords that server/schemas.py uses; any other one is an error here, so that none is overlooked.
"""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
KNOWN = {
    "$ref", "type", "enum", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "anyOf",
    "allOf", "minimum", "maximum", "exclusiveMinimum", "minLength", "pattern", "description", "contentMediaType",
    "contentSchema",
}  # fmt: skip
TYPES = {"string": str, "boolean": bool, "object": dict, "array": list, "null": type(None)}


def is_type(value: Any, kind: str) -> bool:
    """Whether a value has a type of JSON."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "number":
        return number
    if kind == "integer":
        return number and float(value).is_integer()
    return isinstance(value, TYPES[kind])


def same(one: Any, other: Any) -> bool:
    """Equality of JSON, which tells 0 from false."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True) or (
        is_type(one, "number") and is_type(other, "number") and one == other
    )


def problems(value: Any, schema: Schema, defined: dict[str, Schema], at: str = "") -> list[str]:
    """What is wrong with a value; nothing where it is as described."""
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    if "$ref" in schema:
        return problems(value, defined[schema["$ref"].rpartition("/")[2]], defined, at)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(is_type(value, kind) for kind in kinds):
        return [f"{at} is {value!r:.80}, not {kinds}"]
    out = [f"{at} is {value!r:.80}, not one of {schema['enum']}"] if not _among(value, schema) else []
    if any(alternatives := [problems(value, each, defined, at) for each in schema.get("anyOf", [])]):
        out += min(alternatives, key=len)
    for each in schema.get("allOf", []):
        out += problems(value, each, defined, at)
    if is_type(value, "number"):
        out += [f"{at} is {value}" for bad in _beyond(value, schema) if bad]
    if isinstance(value, str):
        short = len(value) < schema.get("minLength", 0) or not re.search(schema.get("pattern", ""), value)
        out += [f"{at} is {value!r:.80}"] if short else []
    if isinstance(value, list):
        fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        out += [] if fits else [f"{at} has {len(value)} items"]
        for n, each in enumerate(value):
            out += problems(each, schema.get("items", {}), defined, f"{at}[{n}]")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        out += [f"{at}.{name} is missing" for name in schema.get("required", []) if name not in value]
        for name, each in value.items():
            if name in properties:
                out += problems(each, properties[name], defined, f"{at}.{name}")
            elif schema.get("additionalProperties") is False:
                out.append(f"{at}.{name} is not described")
    return out


def _among(value: Any, schema: Schema) -> bool:
    return "enum" not in schema or any(same(value, each) for each in schema["enum"])


def _beyond(value: float, schema: Schema) -> list[bool]:
    return [
        value < schema.get("minimum", value),
        value > schema.get("maximum", value),
        "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"],
    ]


def values(schema: Schema, defined: dict[str, Schema]) -> st.SearchStrategy[Any]:
    """Values that a schema allows; half of the optional fields are left out."""
    whole = _values(schema, defined)
    return whole.filter(lambda value: not problems(value, schema, defined))


def _values(schema: Schema, defined: dict[str, Schema]) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return _values(defined[schema["$ref"].rpartition("/")[2]], defined)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "properties" in schema and schema.get("type") == "object":
        required = set(schema["required"])
        fields = {name: _values(each, defined) for name, each in schema["properties"].items()}
        return st.fixed_dictionaries(
            {name: each for name, each in fields.items() if name in required},
            optional={name: each for name, each in fields.items() if name not in required},
        )
    if "anyOf" in schema:
        return st.one_of([_values(each, defined) for each in schema["anyOf"]])
    kinds = schema.get("type", "null")
    return st.one_of([_of_kind(kind, schema, defined) for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def _of_kind(kind: str, schema: Schema, defined: dict[str, Schema]) -> st.SearchStrategy[Any]:
    if kind == "null":
        return st.none()
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(schema.get("minimum"), schema.get("maximum"))
    if kind == "number":
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        return st.floats(low, schema.get("maximum"), exclude_min="exclusiveMinimum" in schema, allow_nan=False)
    if kind == "string":
        return st.text("abc= \u00e9\U0001f600<>|/", min_size=schema.get("minLength", 0), max_size=8)
    items = _values(schema.get("items", {}), defined)
    return st.lists(items, min_size=schema.get("minItems", 0), max_size=schema.get("maxItems", 3))
