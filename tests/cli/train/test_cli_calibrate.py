"""`sdmlm calibrate`, end to end on a tiny language model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_checks import fails, strict_json
from tiny_lm import tiny_lm
from train_checks import LAYER, ROWS, SMALL
from transformers import AutoModelForCausalLM

from sdmlm.cli import main
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.language_model.sdm_folder import fingerprint
from sdmlm.storage.artifacts import read_metadata, write_metadata

# Calibrating


def test_calibrate_a_model_that_was_not_fine_tuned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["calibrate", "model", "--data", "rows.jsonl", *LAYER]
    assert main([*command, "--output", "new"]) == 0
    assert "The final SDM layer" in capsys.readouterr().out
    assert not Path("model/sdm").exists()
    model = AutoModelForCausalLM.from_pretrained("new")
    assert torch.equal(model.lm_head.weight, tiny_lm().lm_head.weight)
    lm = json.loads(Path("new/sdm/lm.json").read_text())
    assert lm["fingerprint"] == fingerprint(tiny_lm().state_dict())
    assert lm["max_new_tokens"] > 8
    assert SDMEstimator.from_pretrained("new/sdm").alpha_ == 0.8
    assert not Path("new.partial").exists()
    assert "new is not empty" in fails(capsys, *command, "--output", "new")


def test_calibrate_in_place_keeps_tags_and_asks_before_replacing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("model", "own")
    command = ["calibrate", "own", "--data", "rows.jsonl", *LAYER]
    tags = '{"yes": "No", "no": "Yes"}'
    assert main([*command, "--verification-tags", tags, "--truncate-prompt", "--json"]) == 0
    facts = strict_json(capsys.readouterr().out)
    assert list(facts["psi"]) == ["Yes", "No"]
    before = Path("own/sdm/config.json").read_bytes()
    assert "give --force to replace it" in fails(capsys, *command)
    assert Path("own/sdm/config.json").read_bytes() == before
    assert main([*command, "--force", "--seed", "7"]) == 0
    lm = json.loads(Path("own/sdm/lm.json").read_text())
    assert (lm["tags"]["yes"], lm["truncate_prompt"]) == ("No", True)
    assert lm["training"] is None  # nobody has fine-tuned this model
    assert (lm["calibrated"]["source"], lm["calibrated"]["rows"]) == ("rows.jsonl", 48)
    assert Path("own/sdm/config.json").read_bytes() != before


def test_calibrate_keeps_what_is_known_of_the_training(
    trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, "copied")
    training = json.loads(Path("copied/sdm/lm.json").read_text())["training"]
    assert main(["calibrate", "copied", "--data", "rows.jsonl", "--force", *LAYER, "--seed", "7"]) == 0
    lm = json.loads(Path("copied/sdm/lm.json").read_text())
    assert lm["training"] == training
    assert training["seed"] != 7
    assert lm["calibrated"]["rows"] == 48


def test_calibrate_again_gives_the_same_layer_where_nothing_is_asked_for(
    trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings of the layer, seed included, are those of training."""
    shutil.copytree(trained, "copied")
    assert main(["calibrate", "copied", "--data", "calibration.jsonl", "--force"]) == 0
    old, new = (SDMEstimator.from_pretrained(folder / "sdm") for folder in (trained, Path("copied")))
    assert new.learning_rate == old.learning_rate == 1e-2
    assert (new.exemplar_dim, new.epochs, new.alpha, new.seed) == (old.exemplar_dim, old.epochs, old.alpha, old.seed)
    x = np.random.default_rng(0).normal(size=(5, 64))
    np.testing.assert_array_equal(new.score(x).p, old.score(x).p)
    # What `sdmlm train` says about a finished run is about the layer that is there.
    capsys.readouterr()
    assert main(["calibrate", "copied", "--data", "calibration.jsonl", "--force", "--alpha", "0.6"]) == 0
    assert main(["train", "--output", "copied", "--resume", "--json"]) == 0
    assert strict_json(capsys.readouterr().out.splitlines()[-1])["alpha"] == 0.6


def test_rows_that_were_trained_on_do_not_calibrate(
    trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, "copied")
    assert main(["calibrate", "copied", "--data", "rows.jsonl", "--force"]) == 0
    assert "trained on these rows: the calibration will look too good" in capsys.readouterr().err
    assert main(["train", "--model", "model", "--data", "rows.jsonl", "--output", "split", *SMALL]) == 0
    capsys.readouterr()
    assert main(["calibrate", "split", "--data", "rows.jsonl", "--output", "again", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "rows.jsonl was split for training: only the 24 rows are used that were held out" in err
    assert strict_json(out)["data"]["rows"] == 24
    search = ["--data", "rows.jsonl", "--search", "resample", "--budget", "1", "--json"]
    assert main(["calibrate-search", "again", *search]) == 0  # the same half


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--per-device-train-batch-size", "0", "per_device_train_batch_size is 0 but must be at least 1"),
        ("--gradient-accumulation-steps", "0", "gradient_accumulation_steps is 0"),
        ("--learning-rate", "-1", "learning_rate is -1.0 but must be above 0"),
        ("--num-train-epochs", "-1", "num_train_epochs is -1.0 but must be at least 0"),
        ("--num-generations", "3", "num_generations is 3"),
        ("--epochs", "2", "there is no setting --epochs (nearest: --num-train-epochs)"),
        ("--lr", "1", "there is no setting --lr (nearest: --learning-rate)"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_numbers_that_cannot_be_meant(
    here: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str, dry: bool
) -> None:
    command = ["train", *ROWS, "--output", "new", option, value, *(["--dry-run"] if dry else [])]
    assert message in fails(capsys, *command)
    assert not Path("new").exists()


def test_resuming_what_is_not_there_or_with_other_rows(
    trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing holds no run to resume" in fails(capsys, "train", "--output", "nothing", "--resume")
    shutil.copytree(trained, "copied")
    other = fails(capsys, "train", "--output", "copied", "--resume", "--data", "calibration.jsonl")
    assert "rows (calibration.jsonl) have changed since this run began" in other
    assert main(["train", "--output", "copied", "--resume", "--data", "rows.jsonl"]) == 0


def test_the_reward_decides_what_is_a_negative(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "myreward.py").write_text(
        "def right(prompts, completions, **columns):\n    print('chatter')\n    return [1] * len(completions)\n"
    )
    command = ["calibrate", "model", "--data", "rows.jsonl", "--output", "new", "--reward", "myreward:right", *LAYER]
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    strict_json(out)
    assert "chatter" in err
    assert "sdmlm: No generation over the calibration rows was wrong" in err
    negatives = {row["rejected"] for row in map(json.loads, Path("rows.jsonl").read_text().splitlines())}
    estimator = SDMEstimator.from_pretrained("new/sdm")
    layer = estimator.layers_[0]
    texts = [estimator.documents_[i] for i, y in zip(layer.support_ids, layer.support.labels, strict=True) if y == 0]
    assert texts
    assert {text.partition("=")[2].partition("\n")[0] for text in texts} <= negatives


def test_calibrate_again_takes_over_the_reward_and_the_room_for_answers(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "kind.py").write_text("def right(prompts, completions, **columns):\n    return [1] * len(completions)\n")
    command = ["calibrate", "model", "--data", "rows.jsonl", *LAYER]
    assert main([*command, "--output", "first", "--reward", "kind:right", "--max-new-tokens", "5"]) == 0
    assert main(["calibrate", "first", "--data", "rows.jsonl", "--output", "again"]) == 0
    before, after = (read_metadata(Path(name, "sdm", "lm.json")) for name in ("first", "again"))
    assert (
        (after["reward"], after["max_new_tokens"]) == (before["reward"], before["max_new_tokens"]) == ("kind:right", 5)
    )
    assert before["estimator_sha256"] == after["estimator_sha256"]
    write_metadata(Path("again/sdm/lm.json"), {**after, "reward": None})
    message = fails(capsys, "calibrate", "again", "--data", "rows.jsonl", "--force")
    assert "fitted with a reward that has no name: give one (--reward)" in message
