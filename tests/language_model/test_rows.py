"""Rows from files and from the Hub: what is read, and what is refused in which words."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from sdmlm.language_model.encoding import VerificationTags
from sdmlm.language_model.rows import read_preferences

ROWS: list[dict[str, Any]] = [
    {"prompt": "a=", "chosen": "ä", "rejected": "b", "level": 1},
    {"prompt": [{"role": "user", "content": "b="}], "chosen": "b", "rejected": "c", "level": 2},
]


def write(path: Path, rows: list[dict[str, Any]] | None = None) -> str:
    rows = ROWS if rows is None else rows
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def refused(source: Path | str) -> str:
    with pytest.raises(ValueError) as caught:
        read_preferences(str(source))
    assert str(source) in str(caught.value)
    return str(caught.value)


def test_jsonl_json_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    lines = write(tmp_path / "rows.jsonl")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    same_type = [{**row, "prompt": "a="} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(same_type), tmp_path / "rows.parquet")
    assert read_preferences(lines).rows == ROWS
    assert read_preferences(str(tmp_path / "rows.json")).rows == ROWS
    found = read_preferences(str(tmp_path / "rows.parquet"))
    assert found.rows == same_type
    assert found.sha256 == hashlib.sha256((tmp_path / "rows.parquet").read_bytes()).hexdigest()


def test_blank_lines_line_ends_and_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    text = "\r\n\r\n".join(json.dumps(row) for row in ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\n\n")
    assert read_preferences(str(path)).rows == ROWS


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "prompt": "one\u2028two\x85three"}]
    assert read_preferences(write(tmp_path / "rows.jsonl", rows)).rows == rows


def test_tags_are_those_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b [Yes]"}]
    source = write(tmp_path / "rows.jsonl", rows)
    assert len(read_preferences(source)) == 1
    with pytest.raises(ValueError, match="equal"):
        read_preferences(source, VerificationTags(open="[", close="]", separator=" "))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"\n  \n", "empty"),
        (b'{"prompt": "\xff"}', "not UTF-8 text (byte 12)"),
        (b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt"', "line 2: not JSON"),
        (b"[1, 2]", "line 1: expected an object with prompt, chosen and rejected, found list"),
        (b'{"prompt": "a", "chosen": "b"}', "Row 0: column 'rejected' is missing (found: 'prompt', 'chosen')"),
        (b'{"prompt": "a", "chosen": "b", "rejected": 3}', "'rejected' is int, not text"),
        (b'{"prompt": "", "chosen": "b", "rejected": "c"}', "'prompt' is empty"),
        (b'{"prompt": "a", "chosen": "b", "rejected": " b"}', "'chosen' and 'rejected' are equal"),
        (b'{"prompt": "\\ud800", "chosen": "b", "rejected": "c"}', "line 1: half of a surrogate pair"),
        (b"[" * 100_000, "line 1: not JSON (nested too deeply)"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert said in refused(path)


def test_bad_json_and_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert "one list of objects" in refused(tmp_path / "a.json")
    (tmp_path / "b.json").write_text('[\n{"prompt": }]')
    assert "line 2: not JSON" in refused(tmp_path / "b.json")
    (tmp_path / "b.json").write_text("[" * 200_000)
    assert "nested too deeply" in refused(tmp_path / "b.json")
    (tmp_path / "c.parquet").write_text("no")
    assert "not a readable .parquet file" in refused(tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_text("no")
    assert "unknown kind" in refused(tmp_path / "d.txt")
    assert "is a folder" in refused(tmp_path)


def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: pytest.fail("asked the Hub"))
    for source in (tmp_path / "rows.jsonl", "data/rows.jsonl", "rows", "a/b/c"):
        assert "does not exist" in refused(source)


def test_rows_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        if split == "nope":
            raise ValueError('Unknown split "nope". Should be one of train.\nAnd more.')
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load)
    found = read_preferences("org/name")
    assert found.rows == ROWS
    assert found.sha256 == read_preferences("org/name:test[:10%]").sha256
    assert asked == [("org/name", "train"), ("org/name", "test[:10%]")]
    assert 'Unknown split "nope". Should be one of train' in refused("org/name:nope")
    assert "And more" not in refused("org/name:nope")
