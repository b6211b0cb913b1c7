"""What the tests of `sdmlm train` and `sdmlm calibrate` share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYER = [
    "--exemplar-dim",
    "16",
    "--sdm-epochs",
    "5",
    "--sdm-learning-rate",
    "1e-2",
    "--alpha",
    "0.8",
    "--documents",
    "paper",
]


SMALL = [
    "--num-train-epochs", "2", "--per_device_train_batch_size", "16", "--gradient-accumulation-steps=1",
    "--learning-rate", "3e-3", "--loss", "sdm", "--logging-steps", "1", "--use-cpu", "--gamma-other", "0", *LAYER,
]  # fmt: skip


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = ["--model", "model", "--data", "rows.jsonl", "--calibration", "calibration.jsonl"]
