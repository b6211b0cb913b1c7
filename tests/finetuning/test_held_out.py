"""Which calibration rows a certificate may use: each prompt once, and none that chose the checkpoint."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_sdm_lm import OWN, calibration_rows, marked_rows, train
from trainer_checks import make

from sdmlm import SDMConfig, SDMLanguageModel
from sdmlm.finetuning.calibration import CalibrationRun, calibrate
from sdmlm.finetuning.held_out import evaluated_rows, part_rows
from sdmlm.generation.certification import certify_lm, new_rows
from sdmlm.language_model.answer_rule import load_certificate
from sdmlm.language_model.rows import read_preferences


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30), st.integers(0, 5))
def test_a_prompt_is_used_once_and_stands_on_one_side(prompts: list[str], seed: int) -> None:
    args = SDMConfig(None, certificate_share=0.5, seed=seed, report_to="none")
    fitted, held_out = part_rows(prompts, args)
    assert sorted(prompts[i] for i in [*fitted, *held_out]) == sorted(set(prompts))
    evaluated = evaluated_rows(prompts, args)
    assert {prompts[i] for i in evaluated} == {prompts[i] for i in fitted}
    assert len(evaluated) == sum(prompts[i] in {prompts[j] for j in fitted} for i in range(len(prompts)))


def test_conversations_are_prompts_too() -> None:
    one, other = [{"role": "user", "content": "hi"}], [{"content": "hi", "role": "user"}]
    fitted, held_out = part_rows([one, other, "hi"], SDMConfig(None, report_to="none"))
    assert len(fitted) + len(held_out) == 2


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a layer of the paper, and no record of its training."""
    return train(tmp_path_factory.mktemp("paper"))


def rows_file(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def calibrated(model: Path, data: str, output: Path) -> list[str]:
    """What `sdmlm calibrate` warns about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrate(CalibrationRun(str(model), data, str(output), changes={**OWN, "alpha": 0.8, "use_cpu": True}))
    return [str(one.message) for one in caught]


def test_rows_that_repeat_a_prompt_change_nothing(paper: Path, tmp_path: Path) -> None:
    rows = calibration_rows()
    for name, given_rows in (("once", rows), ("twice", [*rows, *rows])):
        calibrated(paper, rows_file(tmp_path / f"{name}.jsonl", given_rows), tmp_path / name)
    once, twice = (load_certificate(tmp_path / name / "sdm") for name in ("once", "twice"))
    assert once is not None
    assert once.certified
    assert once == twice


def record(model: Path, sha256: str, rows: int, **config: Any) -> None:
    of = {"source": "rows.jsonl", "sha256": sha256, "rows": rows, "used": rows}
    values = {
        "status": "finished",
        "settings": {},
        "data": {"train": {**of, "sha256": "other"}, "calibration": of},
        "config": {"load_best_model_at_end": True, "seed": 0, **config},
        "log_history": [],
    }
    (model / "training.json").write_text(json.dumps(values))


def test_a_certificate_says_if_its_rows_chose_the_checkpoint(paper: Path, tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.jsonl", calibration_rows())
    sha256, n = read_preferences(data).sha256, len(calibration_rows())
    seed = json.loads((paper / "sdm" / "lm.json").read_text())["training"]["seed"]
    own = {**OWN, "alpha": 0.8, "seed": seed}

    def outcome(name: str, **config: Any) -> tuple[bool, bool]:
        record(paper, sha256, n, **config)
        said = any("checkpoint was chosen with" in text for text in calibrated(paper, data, tmp_path / name))
        certificate = load_certificate(tmp_path / name / "sdm")
        assert certificate is not None
        return said, "with which the checkpoint was chosen" in certificate.source

    try:
        assert outcome("by all rows", documents="paper") == (True, True)
        assert outcome("by others", **own) == (False, False)  # the same rows are held out again
        assert outcome("by another split", **{**own, "seed": seed + 1}) == (True, True)
        assert outcome("not chosen", documents="paper", load_best_model_at_end=False) == (False, False)
    finally:
        (paper / "training.json").unlink()


def test_settings_of_the_papers_layer_change_nothing(paper: Path, tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.jsonl", calibration_rows())
    changes = {**OWN, "alpha": 0.8, "use_cpu": True, "sdm_epochs": 7, "exemplar_dim": 8}
    with pytest.warns(UserWarning, match="sdm_epochs, exemplar_dim changes nothing here"):
        calibrate(CalibrationRun(str(paper), data, str(tmp_path / "x"), changes=changes))


def test_known_and_repeated_prompts_are_left_out_of_a_new_certificate(tmp_path: Path) -> None:
    lm = SDMLanguageModel.from_pretrained(train(tmp_path, **OWN), device="cpu")
    known, fresh = calibration_rows(), marked_rows(40, seed=9)
    prompts = {row["prompt"] for row in known}
    fresh = [row for row in fresh if row["prompt"] not in prompts]
    some = [row for row in known if row["prompt"] in {p.split("=")[0] + "=" for p in prompts}][:4]
    with pytest.warns(UserWarning, match="rows are left out: their prompts stand in other rows, or are known"):
        kept = new_rows(lm, [*fresh, *some, *fresh[:5]])
    assert {row["prompt"] for row in fresh} <= {row["prompt"] for row in kept}
    assert len({row["prompt"] for row in kept}) == len(kept) < len(fresh) + len(some)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        once = certify_lm(lm, fresh, alpha=0.8, save=False, progress=False)
        thrice = certify_lm(lm, [*fresh, *fresh, *fresh], alpha=0.8, save=False, progress=False)
    assert (once.prompts, once.right) == (thrice.prompts, thrice.right)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    make(tmp_path, documents="paper", gamma_other=0.0).train()
    for changes in ({"gamma_other": 0.5, "documents": "paper"}, {"gamma_other": 0.0, "documents": "own"}):
        with pytest.raises(ValueError, match="was written with other settings: resume with the same documents"):
            make(tmp_path, **changes).train(resume_from_checkpoint=True)
    cross_entropy = {"documents": "paper", "gamma_other": 0.0, "loss": "ce"}
    with pytest.raises(ValueError, match="was written with loss='sdm', not 'ce': resume with the same loss"):
        make(tmp_path, **cross_entropy).train(resume_from_checkpoint=True)
    for state in tmp_path.glob("checkpoint-*/sdm_state.json"):  # as they were before
        values = json.loads(state.read_text())
        state.write_text(json.dumps({k: v for k, v in values.items() if k not in ("evaluated", "gamma_other", "loss")}))
    with pytest.raises(ValueError, match="was written with loss='sdm'"):
        make(tmp_path, **cross_entropy).train(resume_from_checkpoint=True)
    make(tmp_path, documents="paper", gamma_other=0.0).train(resume_from_checkpoint=True)
