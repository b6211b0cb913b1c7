"""`sdmlm train`, end to end on a tiny language model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_checks import fails, strict_json
from tiny_lm import copy_rows, tiny_lm
from train_checks import ROWS, SMALL, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdmlm.cli import main
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning.trainer import SDMTrainer
from sdmlm.language_model.sdm_folder import fingerprint
from sdmlm.storage.record import halves

# Training


def test_the_trained_folder_is_an_sdm_lm_with_a_record(trained: Path) -> None:
    names = {p.name for p in trained.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "sdm", "training.json"} <= names
    assert any(name.startswith("checkpoint-") for name in names)
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert fingerprint(model.state_dict()) == json.loads((trained / "sdm" / "lm.json").read_text())["fingerprint"]
    assert not torch.equal(model.lm_head.weight, tiny_lm().lm_head.weight)
    assert AutoTokenizer.from_pretrained(trained).eos_token == "</s>"

    record = strict_json((trained / "training.json").read_text())
    assert record["status"] == "finished"
    for name in ("train", "calibration"):
        source = {"train": "rows.jsonl", "calibration": "calibration.jsonl"}[name]
        content = (trained.parent / source).read_bytes()
        expected = {"source": source, "sha256": hashlib.sha256(content).hexdigest(), "rows": 48, "used": 48}
        assert record["data"][name] == expected
    assert record["config"]["sdm_epochs"] == 5
    assert record["config"]["per_device_train_batch_size"] == 16
    assert record["settings"]["learning_rate"] == 3e-3
    assert sum("eval_loss" in row for row in record["log_history"]) == 4


def test_json_goes_to_stdout_alone_and_tells_the_saved_region(trained: Path) -> None:
    summary = strict_json((trained.parent / "out.txt").read_text())
    estimator = SDMEstimator.from_pretrained(trained / "sdm")
    calibration = estimator.layers_[0].calibration
    found = list(summary["calibration"]["classes"].items())
    assert [name for name, _ in found] == ["No", "Yes"]
    for c, (_, row) in enumerate(found):
        assert row["mean_q"] == pytest.approx(float(calibration.q[calibration.labels == c].double().mean()))
    inside = estimator.region_.contains(calibration.q_prime, calibration.p, calibration.predictions)
    assert summary["calibration"]["accepted"] == int(inside.sum())
    history = strict_json((trained / "training.json").read_text())["log_history"]
    losses = {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row}
    assert summary["best"]["loss"] == min(losses.values()) == losses[summary["best"]["step"]]
    assert summary["steps"] == 6


def test_a_finished_run_shows_its_summary_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in trained.rglob("*")}
    assert main(["train", "--output", str(trained), "--resume"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "finished already",
        "6 steps on 48 rows, calibrated on 48",
        "Best evaluation",
        "mean q",
        "psi",
        "Next:",
    ):
        assert words in out
    assert "alpha 0.8: q'min" in out
    assert "of 24 calibration points" in out
    assert {p: p.stat().st_mtime_ns for p in trained.rglob("*")} == before


def test_an_interrupted_run_goes_on_to_the_same_weights(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, calls = SDMTrainer.compute_loss, 0

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:  # in the second epoch, after a checkpoint
            raise KeyboardInterrupt
        return plain(self, *args, **kwargs)

    command = ["train", *ROWS, "--output", "run", *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(SDMTrainer, "compute_loss", interrupted)
        assert main(command) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sdmlm: ")]
    assert said == ["sdmlm: stopped; sdmlm train --output run --resume goes on from the last checkpoint."]
    assert strict_json((here / "run" / "training.json").read_text())["status"] == "started"
    assert not (here / "run" / "sdm").exists()

    assert "already holds a training run (started)" in fails(capsys, *command)
    assert "learning_rate was 0.003 and is now 0.1" in fails(capsys, *command, "--resume", "--learning-rate", "0.1")
    assert "sdm_rounds was 1 and is now 2" in fails(capsys, *command, "--resume", "--sdm-rounds", "2")
    fewer = write_rows(here / "other.jsonl", copy_rows(48, seed=9))
    changed = fails(capsys, "train", "--output", "run", "--resume", "--data", str(fewer))
    assert "The train rows (other.jsonl)" in changed.replace(str(here) + "/", "")

    # What the run was told when it began need not be said again; how much is logged may change.
    calls = 100
    with monkeypatch.context() as patch:
        patch.setattr(SDMTrainer, "compute_loss", interrupted)
        assert main(["train", "--output", "run", "--resume", "--logging-steps", "2"]) == 0
    assert calls == 102  # steps 5 and 6: the first four came from the checkpoint
    assert (here / "run" / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    resumed, whole = (SDMEstimator.from_pretrained(p / "sdm") for p in (here / "run", trained))
    assert resumed.loss_ == whole.loss_


def test_without_calibration_rows_the_rows_are_halved(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["train", "--model", "model", "--data", "rows.jsonl", "--output", "halves", "--json", *SMALL, "--loss", "ce"]
    assert main([*args, "--num-train-epochs", "1", "--lora-r", "2"]) == 0
    out, err = capsys.readouterr()
    assert "rows.jsonl is split at random (seed 42), 24 rows for training and 24 for calibration" in err
    summary = strict_json(out)
    assert [summary["data"][name]["used"] for name in ("train", "calibration")] == [24, 24]
    assert (here / "halves" / "adapter_model.safetensors").exists()  # --lora-r
    assert (here / "halves" / "sdm" / "config.json").exists()


def test_halves_are_disjoint_complete_and_seeded() -> None:
    rows = [{"prompt": str(i)} for i in range(11)]
    first, second = halves(rows, seed=1)
    assert (len(first), len(second)) == (6, 5)
    assert sorted(first + second, key=lambda r: int(r["prompt"])) == rows
    assert halves(rows, seed=1) == (first, second)
    assert halves(rows, seed=2) != (first, second)


def test_prompts_in_both_sets_are_remarked_upon(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["train", "--model", "model", "--data", "rows.jsonl", "--calibration", "rows.jsonl", "--dry-run", *SMALL]
    assert main(args) == 0
    assert "48 prompts stand both" in capsys.readouterr().err
