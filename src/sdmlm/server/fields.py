"""Checks of the fields of a JSON body. The error for a wrong value names its field."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from sdmlm.server.errors import ApiError, refused

Body = Mapping[str, Any]


def read_json(body: bytes) -> dict[str, Any]:
    """A body as the object it must be."""
    try:
        # Standard JSON only: no NaN, and no half of a surrogate pair, which no tokenizer can read.
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, "The body is not UTF-8: send JSON as UTF-8.", code="invalid_json") from error
    except UnicodeEncodeError as error:
        raise ApiError(
            400, "The body holds half of a surrogate pair, which is not text.", code="invalid_json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not JSON: {_where(error)}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"The body is {_kind(value)}: send a JSON object.", code="invalid_json")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _where(error: Exception) -> str:
    """What is wrong with the JSON, without quoting it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[0].lower()}{error.msg[1:]} (line {error.lineno}, column {error.colno})"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "it holds NaN or an infinite number"


def check_names(body: Body, known: Collection[str], where: str = "") -> None:
    """Refuse unknown fields. `where` is the field that holds them, with a dot."""
    for name in body:
        if name not in known:
            shown = name if len(name) <= 40 else name[:40] + "..."
            raise refused(
                f"{where}{shown}", f"There is no field '{where}{shown}': see the serving guide.", "unknown_field"
            )


def boolean(body: Body, name: str, default: bool, where: str = "") -> bool:
    """true or false."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refused(where + name, f"'{where}{name}' is {_kind(value)} but must be true or false.")
    return value


def whole(body: Body, name: str, low: int, high: int, where: str = "") -> int | None:
    """A whole number from low to high, None if it is missing."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # 1.0 and 1e3 are whole numbers of JSON
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refused(
            where + name, f"'{where}{name}' is {_shown(value)} but must be a whole number from {low} to {high}."
        )
    return value


def number(body: Body, name: str, low: float, high: float, above: bool = False, where: str = "") -> float | None:
    """A number from low (with `above`: above low) to high, None if it is missing."""
    value = body.get(name)
    if value is None:
        return None
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fits or not low <= value <= high or (above and value == low):  # also refuses NaN and infinity
        asked = f"above {low:g} and at most {high:g}" if above else f"a number from {low:g} to {high:g}"
        raise refused(where + name, f"'{where}{name}' is {_shown(value)} but must be {asked}.")
    return float(value)


def choice(body: Body, name: str, options: tuple[str, ...], where: str = "") -> str:
    """One of some words; the first is the default."""
    value = body.get(name)
    if value is None:
        return options[0]
    if value not in options:
        known = ", ".join(map(repr, options))
        raise refused(where + name, f"'{where}{name}' is {_shown(value)} but must be one of {known}.")
    return str(value)


def string(body: Body, name: str, where: str = "") -> str:
    """A string that must be there, and may be empty."""
    value = body.get(name)
    if not isinstance(value, str):
        raise refused(where + name, f"'{where}{name}' is {_kind(value)} but must be a string.")
    return value


def text(body: Body, name: str, where: str = "") -> str:
    """A string that must be there and hold more than white space."""
    value = string(body, name, where)
    if not value.strip():
        raise refused(where + name, f"'{where}{name}' is empty.", "empty")
    return value


def mapping(body: Body, name: str) -> Body:
    """An object, empty if it is missing."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refused(name, f"'{name}' is {_kind(value)} but must be an object.")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return "true or false"
    kinds = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), "something else")


def _shown(value: Any) -> str:
    """The value if it is short, otherwise only its type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float, str)) and len(str(value)) <= 40:
        return repr(value)
    return _kind(value)
