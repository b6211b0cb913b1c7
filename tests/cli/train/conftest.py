"""A tiny model with rows, and a run over them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_lm import copy_rows, tiny_lm, tiny_tokenizer
from train_checks import ROWS, SMALL, write_rows

from sdmlm.cli import main


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and rows whose prompts all differ."""
    folder = tmp_path_factory.mktemp("train")
    tiny_lm().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = list({row["prompt"]: row for row in copy_rows(200)}.values())
    write_rows(folder / "rows.jsonl", rows[:48])
    write_rows(folder / "calibration.jsonl", rows[48:96])
    return folder


@pytest.fixture
def here(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, with links to the model and the rows."""
    for path in base.iterdir():
        if not path.name.startswith("out"):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(base: Path) -> Path:
    """The folder of a run that was never interrupted; its JSON summary lies beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        script = base / "out.txt"
        with script.open("w") as file, pytest.MonkeyPatch.context() as inner:
            inner.setattr(sys, "stdout", file)
            assert main(["train", *ROWS, "--output", "out", "--json", *SMALL]) == 0
    return base / "out"
