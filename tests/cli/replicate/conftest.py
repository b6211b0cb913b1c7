"""Recipes with a tiny model, and a whole replication of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from replicate_checks import make

from sdmlm.cli import main


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicate")
    make(folder)
    return folder


@pytest.fixture(scope="module")
def whole(base: Path) -> Path:
    """A replication that was never interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["replicate", "tiny", "--output", "whole", "--seeds", "0", "1"]) == 0
    return base / "whole"


@pytest.fixture
def here(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own with copies of the small files and a link to the model."""
    for path in base.iterdir():
        if path.name == "model":
            (tmp_path / path.name).symlink_to(path)
        elif path.name == "tiny":
            shutil.copytree(path, tmp_path / path.name)
        elif path.is_file():
            shutil.copy(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
