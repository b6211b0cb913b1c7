"""What the tests of `sdmlm replicate` share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_lm import copy_rows, tiny_lm, tiny_tokenizer

from sdmlm.tasks import word_ordering

RECIPE = """\
setting: {label}
model: model
data: train.jsonl
calibration: calibration.jsonl
output: elsewhere
task: word_ordering
reward: sdmlm.tasks.word_ordering:reward
tests:
  test: test.jsonl
  shifted: shifted.jsonl
loss: {loss}
hard_negatives: {negatives}
num_train_epochs: {epochs}
per_device_train_batch_size: 12
gradient_accumulation_steps: 1
learning_rate: 3.0e-3
exemplar_dim: 8
sdm_epochs: 3
sdm_learning_rate: 1.0e-2
alpha: 0.8
logging_steps: 1
use_cpu: true
seed: {seed}
"""


SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"label": "Nothing", "loss": "ce", "negatives": "false", "epochs": 0, "seed": 3},
    "sdm_hn": {"label": "SDM + HN", "loss": "sdm", "negatives": "true", "epochs": 2, "seed": 3},
}


def rows() -> list[dict[str, str]]:
    plain = {row["prompt"]: row for row in copy_rows(300)}.values()
    tagged = [{k: v if k == "prompt" else f"<sentence>{v}</sentence>" for k, v in row.items()} for row in plain]
    return [{**row, "sentence": str(word_ordering.answer(row["chosen"]))} for row in tagged]


def write_rows(path: str, some: list[dict[str, str]]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in some))


def make(folder: Path) -> None:
    """Model, rows and recipes, in the working directory."""
    tiny_lm(max_position_embeddings=96).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    every = rows()
    for name, start, end in (("train", 0, 36), ("calibration", 36, 72), ("test", 72, 84), ("shifted", 84, 94)):
        write_rows(str(folder / f"{name}.jsonl"), every[start:end])
    (folder / "tiny").mkdir()
    for name, setting in SETTINGS.items():
        (folder / "tiny" / f"{name}.yaml").write_text(RECIPE.format(**setting))


def kept(folder: Path) -> dict[str, int]:
    """Every file below the runs of a folder with its time of change."""
    return {str(p): p.stat().st_mtime_ns for p in folder.glob("*/**/*") if p.is_file()}
