"""training.json as those read it who find a model with one: the report, the card, the searches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdmlm.storage.record import RECORD, halves, held_out, read_record


def write(folder: Path, **changes: Any) -> dict[str, Any]:
    source = {"source": "rows.jsonl", "sha256": "ab", "rows": 8, "used": 4}
    record = {
        "status": "finished",
        "settings": {},
        "data": {"train": source, "calibration": source},
        "config": {"seed": 3},
        "log_history": [],
        **changes,
    }
    (folder / RECORD).write_text(json.dumps(record))
    return record


def test_a_record_is_read_and_none_is_no_error(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    assert write(tmp_path) == read_record(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "3", '"status"', '{"status": "finished"}', "\xff"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"training\.json is damaged.*restore it"):
        read_record(tmp_path)


def test_a_record_of_something_else_is_named(tmp_path: Path) -> None:
    write(tmp_path, status="brewing")
    with pytest.raises(ValueError, match="not a record of sdmlm train"):
        read_record(tmp_path)


def test_only_the_calibration_half_of_a_split_file_is_held_out(tmp_path: Path) -> None:
    rows = [{"prompt": str(i)} for i in range(8)]
    assert held_out(rows, "ab", tmp_path) == rows  # nothing known
    write(tmp_path)
    half = held_out(rows, "ab", tmp_path)
    assert half == halves(rows, 3)[1]
    assert 0 < len(half) < 8
    assert held_out(rows, "cd", tmp_path) == rows  # another file
    (tmp_path / RECORD).write_text("{")
    with pytest.raises(ValueError, match="damaged"):  # rather than rows that the layer has learnt from
        held_out(rows, "ab", tmp_path)
