"""Rows of prompt, chosen and rejected, from files or from the Hugging Face Hub (TRL's preference format).

A source is a .jsonl, .json (a list of objects) or .parquet file, or the name of a data set on the Hub: `org/name`, or
`org/name:split` for another split than train. Further columns are passed to the reward.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdmlm.language_model.encoding import VerificationTags, check_rows
from sdmlm.storage.text_files import decode, json_lines, parquet_table, parse_json

PreferenceRow = dict[str, Any]  # prompt, chosen, rejected, and any further columns
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<split>.+))?")


def prompt_key(prompt: Any) -> str:
    """The same text for equal prompts, whether they are strings or conversations."""
    return json.dumps(prompt if isinstance(prompt, str) else [dict(m) for m in prompt], sort_keys=True)


def first_rows(prompts: Iterable[Any]) -> list[int]:
    """The number of the first row with each prompt, ascending."""
    first: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        first.setdefault(prompt_key(prompt), i)
    return list(first.values())


@dataclass(frozen=True)
class PreferenceRows:
    """The rows of a source, with the SHA-256 of the file (for a data set of the Hub: of its rows as JSON lines)."""

    source: str
    rows: list[PreferenceRow]
    sha256: str

    def __len__(self) -> int:
        return len(self.rows)


def read_preferences(source: str, tags: VerificationTags | None = None) -> PreferenceRows:
    """Read and check the rows of a source; any problem is a ValueError that names the source."""
    path = Path(source)
    if path.is_dir():
        raise ValueError(f"{source} is a folder: name a .jsonl, .json or .parquet file of rows.")
    if path.exists():
        if path.suffix not in _READERS:
            raise ValueError(f"{source} is of an unknown kind: rows are read from .jsonl, .json or .parquet files.")
        content = path.read_bytes()
        rows, sha256 = _READERS[path.suffix](source, content), hashlib.sha256(content).hexdigest()
    elif path.suffix in _READERS or not (hub_name := _HUB_NAME.fullmatch(source)):
        raise ValueError(
            f"{source} does not exist: name a .jsonl, .json or .parquet file, or a data set of the Hub as org/name."
        )
    else:
        rows = _read_hub(source, hub_name["name"], hub_name["split"] or "train")
        sha256 = _digest(rows)
    if not rows:
        raise ValueError(f"{source} is empty: it holds no rows.")
    try:
        check_rows(rows, tags)
    except ValueError as error:
        raise ValueError(f"{source}: {error} (Rows count from 0.)") from error
    return PreferenceRows(source, rows, sha256)


def _read_jsonl(source: str, content: bytes) -> list[PreferenceRow]:
    rows = []
    for where, row in json_lines(decode(content, source), source, " with prompt, chosen and rejected"):
        _check_spelling(row, where)
        rows.append(row)
    return rows


def _check_spelling(row: PreferenceRow, where: str) -> None:
    """Refuse half of a surrogate pair: JSON can hold one, but no tokenizer can read it."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff) is not text: remove it.") from error


def _read_json(source: str, content: bytes) -> list[PreferenceRow]:
    rows = parse_json(decode(content, source) or "[]", source)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{source} must hold one list of objects with prompt, chosen and rejected.")
    for number, row in enumerate(rows):
        _check_spelling(row, f"{source}, row {number}")
    return rows


def _read_parquet(source: str, content: bytes) -> list[PreferenceRow]:
    rows: list[PreferenceRow] = parquet_table(content, source).to_pylist()
    return rows


_READERS: dict[str, Callable[[str, bytes], list[PreferenceRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _read_hub(source: str, name: str, split: str) -> list[PreferenceRow]:
    import datasets

    try:
        return [dict(row) for row in datasets.load_dataset(name, split=split)]
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(f"{source} is no file here, and the Hub gave no such rows: {reason}.") from error


def _digest(rows: list[PreferenceRow]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=True, default=str).encode() + b"\n")
    return digest.hexdigest()
