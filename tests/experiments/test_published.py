"""The published figures are those of the paper's source, where that is at hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sdmlm.experiments import published as paper
from sdmlm.experiments.runs import DATASETS, SETTINGS

SOURCE = Path(__file__).parents[3] / "shared" / "paper" / "sdm_language_models.tex"
MODELS = {
    "": "none",
    "Finetuned": "ce",
    "FinetunedHardNegatives": "ce_hn",
    "SDMFinetuned": "sdm",
    "SDMFinetunedHardNegatives": "sdm_hn",
    "SDMFinetunedHardNegativesAdditionalRun": "sdm_hn_rerun",
}
TESTS = {"Harvard": "harvard", "Wikipedia": "test", "WikipediaCVS": "shifted"}
WORDS = {r"\allRejected": "R", r"$\infty$": "∞", r"$\estimatorNoReject$": "no-reject", r"$\sdmHR$": "HR"}


def published(label: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The lines of the table with this label, as (test set, setting) and cells."""
    text = SOURCE.read_text(encoding="utf-8")
    table = next(t for t in re.split(r"\\begin\{table", text) if rf"\label{{tab:{label}}}" in t)
    found = {}
    for line in table.split("\n"):
        match = re.match(r"\s*\$\\datasetLMOrder(\w+)\$\s*&\s*\$\\modelPhiThreeFiveInstruct(\w*)\$\s*&(.*)\\\\", line)
        if match:
            cells = [re.sub(r"^\\colorbox\{\w+\}\{(.*)\}$", r"\1", cell.strip()) for cell in match[3].split("&")]
            cells = [WORDS.get(cell, cell) for cell in cells]
            names: tuple[str, ...] = (TESTS[match[1]], MODELS[match[2]])
            if cells[0] in ("no-reject", "HR"):
                names = (*names, cells.pop(0))
            found[names] = tuple(cells)
    return found


@pytest.mark.shared
@pytest.mark.skipif(not SOURCE.exists(), reason="the paper's source is not here")
def test_figures_are_those_of_the_source() -> None:
    assert published("experiments-verification-results-abbreviated") == paper.SELECTIVE
    assert published("experiments-generation-results") == paper.GENERATION
    assert published("experiments-verification-results") == paper.FULL
    calibration = published("experiments-verification-results-calibration")
    assert {names[1:]: cells for names, cells in calibration.items()} == paper.CALIBRATION
    assert {names[0] for names in calibration} == {"test"}


def test_every_setting_and_test_set_is_there() -> None:
    pairs = {(dataset, setting) for dataset in DATASETS for setting in SETTINGS}
    assert set(paper.SELECTIVE) == set(paper.GENERATION) == pairs
    assert set(paper.CALIBRATION) == {(setting,) for setting in SETTINGS}
    tuned = {pair for pair in pairs if pair[1] != "none"}
    assert set(paper.FULL) == {(*pair, estimator) for pair in tuned for estimator in ("no-reject", "HR")}
    for table, width in ((paper.SELECTIVE, 2), (paper.GENERATION, 2), (paper.FULL, 10), (paper.CALIBRATION, 9)):
        assert {len(cells) for cells in table.values()} == {width}


def test_the_two_tables_of_the_region_agree() -> None:
    for (dataset, setting), (accuracy, share) in paper.SELECTIVE.items():
        if setting != "none":  # there everything is rejected, and the longer table leaves it out
            assert paper.FULL[dataset, setting, "HR"][-2:] == (accuracy, share)
