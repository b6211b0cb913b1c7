"""training.json, which `sdmlm train` writes beside a model: the settings, the rows and the results of the training."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

RECORD = "training.json"
_PARTS = ("status", "settings", "data", "config", "log_history")


def read_record(folder: str | Path) -> dict[str, Any] | None:
    """The record in a folder; None if there is none (the model was not made by `sdmlm train`)."""
    path = Path(folder) / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in _PARTS if name not in record]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it from a copy or remove it.") from error
    if missing or not isinstance(record, dict) or record["status"] not in ("started", "finished"):
        raise ValueError(f"{path} is damaged or not a record of sdmlm train: restore it from a copy or remove it.")
    return record


def copy_record(folder: str | Path, target: Path) -> None:
    """Copy the record of a model to the folder `target`, unless that already has one."""
    path = Path(folder) / RECORD
    if path.exists() and not (target / RECORD).exists():
        shutil.copy(path, target / RECORD)


def halves(rows: list[dict[str, Any]], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two random halves, each in the order of the file; of an odd number of rows the first half has one more."""
    import numpy as np

    order = np.random.default_rng([seed, 5]).permutation(len(rows))
    cut = (len(rows) + 1) // 2
    first, second = ([rows[i] for i in sorted(part.tolist())] for part in (order[:cut], order[cut:]))
    return first, second


def held_out(rows: list[dict[str, Any]], sha256: str | None, folder: str | Path) -> list[dict[str, Any]]:
    """The rows of a file that the model in a folder was not trained on.

    If `sdmlm train` split this very file, these are its calibration half; of any other file, all rows. If the model was
    trained on all rows of the file, this warns and returns them all.
    """
    record = read_record(folder)
    if record is None or record["data"]["train"]["sha256"] != sha256:
        return rows
    calibration = record["data"]["calibration"]
    if calibration["sha256"] == sha256 and calibration["used"] < calibration["rows"]:
        return halves(rows, int(record["config"]["seed"]))[1]
    warnings.warn("The model was trained on these rows: the calibration will look too good.", stacklevel=2)
    return rows
