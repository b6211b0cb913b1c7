"""training.json, which `sdmlm train` writes beside a model: what was asked for, on which rows, and what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORD = "training.json"
_PARTS = ("status", "settings", "data", "config", "log_history")


def read_record(folder: str | Path) -> dict[str, Any] | None:
    """The record of a folder; None where there is none, because the model was made in another way."""
    path = Path(folder) / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in _PARTS if name not in record]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it from a copy or remove it.") from error
    if missing or not isinstance(record, dict) or record["status"] not in ("started", "finished"):
        raise ValueError(f"{path} is damaged or not a record of sdmlm train: restore it from a copy or remove it.")
    return record
