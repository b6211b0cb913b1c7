"""Tiny SDM language models, trained once for all tests of generation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sdm_lm_checks import PROMPTS
from tiny_sdm_lm import train

from sdmlm import SDMLanguageModel, Verification


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("chat"), chat=True)


@pytest.fixture(scope="module")
def lm(folder: Path) -> SDMLanguageModel:
    return SDMLanguageModel.from_pretrained(folder)


@pytest.fixture(scope="module")
def chat(chat_folder: Path) -> SDMLanguageModel:
    return SDMLanguageModel.from_pretrained(chat_folder)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


@pytest.fixture(scope="module")
def wild(lm: SDMLanguageModel) -> list[Verification]:
    """Answers of every sort: right, wrong, without a tag, with several, spelled in strange tokens, cut off."""
    found: list[Verification] = lm.generate(PROMPTS, temperature=2.0, max_new_tokens=14, progress=False)
    return found
