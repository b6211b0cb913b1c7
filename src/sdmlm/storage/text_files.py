"""Reading files from users (text, JSON, Parquet). A file that cannot be read raises a ValueError that names file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Unicode categories Cc, Cf, Cs, Zl and Zp, and letters and marks that are not visible.
_HIDDEN = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\xad\\u034f\\u0600-\\u0605\\u061c\\u06dd\\u070f\\u0890\\u0891\\u08e2\\u115f\\u1160\\u17b4\\u17b5"
    "\\u180b-\\u180f\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb\\ud800-\\udfff"
    "\\U000110bd\\U000110cd\\U00013430-\\U0001343f\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a\\U000e0000-\\U000e0fff]"
)


def decode(content: bytes, source: object) -> str:
    """The text of a file in UTF-8, without the byte order mark that some editors put at its start."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text (byte {error.start}): convert it to UTF-8.") from error


def visible(text: str, keep: str = "\n\t") -> str:
    """Text from outside, safe to show: characters that control a terminal or hide text become escapes like \\x1b.

    These are the control characters (C0 except those in `keep`, DEL, C1), the invisible format characters (bidirectional
    controls, zero-width and tag characters), line separators, blank fillers and halves of surrogate pairs.
    """
    return _HIDDEN.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def parse_json(text: str, source: object, line: int | None = None) -> Any:
    """The value of a JSON text; `line` is its line number if the text is a single line of the source."""
    try:
        return json.loads(text)
    except RecursionError as error:
        where = source if line is None else f"{source}, line {line}"
        raise ValueError(f"{where}: not JSON (nested too deeply).") from error
    except ValueError as error:  # also for a number with more digits than Python reads
        at = line or getattr(error, "lineno", 1)
        raise ValueError(f"{source}, line {at}: not JSON ({getattr(error, 'msg', error)}).") from error


def json_lines(text: str, source: object, fields: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(location, object) for each line that is not blank; `fields` says in the error message what an object must hold."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where, value = f"{source}, line {number}", parse_json(line, source, number)
            if not isinstance(value, dict):
                raise ValueError(f"{where}: expected an object{fields}, found {type(value).__name__}.")
            yield where, value


def parquet_table(file: Path | bytes, source: object) -> Any:
    """The pyarrow table of a file, given by its path or its contents."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            'Reading .parquet needs pyarrow: install the extra parquet (in a clone: pip install -e ".[parquet]").'
        ) from error
    try:
        return pyarrow.parquet.read_table(pyarrow.BufferReader(file) if isinstance(file, bytes) else file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} is not a readable .parquet file: {error}.") from error
