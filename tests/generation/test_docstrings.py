"""The examples in the docstrings of the public classes run."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from sdmlm.generation import language_model, search, verification


@pytest.mark.parametrize("module", [language_model, search, verification], ids=lambda m: m.__name__)
def test_examples_run(module: object, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/lm").symlink_to(folder)
    failed, attempted = doctest.testmod(module)  # type: ignore[arg-type]
    assert attempted > 0
    assert failed == 0
