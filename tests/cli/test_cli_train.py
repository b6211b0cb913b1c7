"""`sdmlm train` and `sdmlm calibrate`, end to end on a tiny language model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_checks import fails, strict_json
from tiny_lm import copy_rows, tiny_lm, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdmlm.cli import config_options, main
from sdmlm.cli.commands import dry_run
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning import recipe, settings
from sdmlm.finetuning.config import SDMConfig
from sdmlm.finetuning.trainer import SDMTrainer
from sdmlm.language_model.encoding import Encoder
from sdmlm.language_model.sdm_folder import fingerprint
from sdmlm.storage.artifacts import read_metadata, write_metadata
from sdmlm.storage.output_paths import whole_folder
from sdmlm.storage.record import halves

LAYER = ["--exemplar-dim", "16", "--sdm-epochs", "5", "--sdm-learning-rate", "1e-2", "--alpha", "0.8"]
SMALL = [
    "--num-train-epochs", "2", "--per_device_train_batch_size", "16", "--gradient-accumulation-steps=1",
    "--learning-rate", "3e-3", "--logging-steps", "1", "--use-cpu", *LAYER,
]  # fmt: skip
REPOSITORY = Path(__file__).parents[2]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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


ROWS = ["--model", "model", "--data", "rows.jsonl", "--calibration", "calibration.jsonl"]


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


# Settings


def test_options_are_those_of_the_class() -> None:
    fields = {f.name: f for f in dataclasses.fields(SDMConfig)}
    found = config_options.own_fields()
    assert [f.name for f in found] == list(SDMConfig.__annotations__)
    for field in found:
        assert field.default == fields[field.name].default
        assert field.help == fields[field.name].metadata["help"]


def test_every_field_can_be_set() -> None:
    settable = set(recipe.field_types())
    assert {f.name for f in dataclasses.fields(SDMConfig)} - settable == {"output_dir", "resume_from_checkpoint"}


@pytest.mark.parametrize(
    ("annotation", "given", "value"),
    [
        (float, "5e-5", 5e-5),
        (float, 3, 3.0),
        (int, "12", 12),
        (int | None, "none", None),
        (int | None, None, None),
        (bool, "False", False),
        (bool | None, True, True),
        (str, "1", "1"),
        (dict | str | None, '{"a": 1}', {"a": 1}),
        (None | str | list[str], "wandb, tensorboard", ["wandb", "tensorboard"]),
        (None | str | list[str], "wandb", "wandb"),
        (list[str], "a", ["a"]),
        (str | bool, "all", "all"),
    ],
)
def test_values_are_converted(annotation: Any, given: Any, value: Any) -> None:
    found = recipe.typed({"x": given}, {"x": annotation})["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "given", "said"),
    [
        (int, "1.5", "x is '1.5' but must be a whole number."),
        (int, 1.0, "x is 1.0 but must be a whole number."),
        (int, True, "x is True but must be a whole number."),
        (float, "nan", "x is 'nan' but must be a number."),
        (float | None, "much", "x is 'much' but must be a number or none."),
        (bool, "maybe", "x is 'maybe' but must be true or false."),
        (float, None, "x is None but must be a number."),
        (str, False, "x is False but must be text (in YAML, yes, no, on and off need quotes to be text)."),
        (dict | None, "{a}", "x is '{a}' but must be JSON or none."),
        (types.ModuleType | None, "a", "x cannot be set here."),
    ],
)
def test_values_that_do_not_fit_are_refused(annotation: Any, given: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        recipe.typed({"x": given}, {"x": annotation})
    assert str(caught.value) == said


def rehearsal(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    capsys.readouterr()
    assert main(["train", "--dry-run", "--json", *args]) == 0
    return strict_json(capsys.readouterr().out)


def test_options_win_over_the_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.yaml").write_text(
        "# a comment\nmodel: model\ndata: rows.jsonl\ncalibration: calibration.jsonl\nnum_train_epochs: 3\n"
        "learning-rate: 5e-5\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 3\nuse_cpu: yes\n"
    )
    assert rehearsal(capsys, "--recipe", "r.yaml")["steps"] == {
        "batch": 24, "per_epoch": 2, "total": 6, "generations_per_epoch": 6,
    }  # fmt: skip
    changed = rehearsal(capsys, "--recipe", "r.yaml", "--per-device-train-batch-size", "4", "--hard-negatives", "false")
    assert changed["steps"] == {"batch": 12, "per_epoch": 4, "total": 12, "generations_per_epoch": 0}
    other = rehearsal(capsys, "--recipe", "r.yaml", "--data", "calibration.jsonl", "--max-steps", "7")
    assert (other["data"]["train"]["source"], other["steps"]["total"]) == ("calibration.jsonl", 7)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("learning_rat: 1\n", "r.yaml: there is no setting learning_rat (nearest: learning_rate)"),
        ("modle: model\n", "r.yaml: there is no setting modle (nearest: model)"),
        ("output_dir: x\n", "r.yaml: there is no setting output_dir: use --output"),
        ("resume: true\n", "r.yaml: there is no setting resume"),
        ("sdm_epochs: many\n", "r.yaml: sdm_epochs is 'many' but must be a whole number"),
        ("alpha: [1\n", "r.yaml, line 2: not YAML"),
        ("- alpha\n", "r.yaml must hold settings"),
        ("alpha: 0.3\nmodel: m\ndata: d\noutput: o\n", "alpha"),
    ],
)
def test_bad_recipes(here: Path, capsys: pytest.CaptureFixture[str], content: str, said: str) -> None:
    Path("r.yaml").write_text(content)
    assert said in fails(capsys, "train", "--recipe", "r.yaml")
    assert not Path("o").exists()


def test_recipes_of_the_repository_are_the_papers() -> None:
    found = sorted(REPOSITORY.glob("recipes/**/*.yaml"))
    assert found
    kinds: dict[str, Any] = {**settings.OPTIONS, **recipe.field_types()}
    for path in found:
        recipe.typed(recipe.read_recipe(str(path)), kinds, str(path))
    phi = recipe.typed(recipe.read_recipe(str(REPOSITORY / "recipes/phi-3.5-mini/sdm_hn.yaml")), kinds)
    assert 4 * phi["per_device_train_batch_size"] * phi["gradient_accumulation_steps"] == 64
    assert phi["dataloader_drop_last"]  # so 78 steps an epoch, of 5000 rows
    # Where the paper says something, the recipe says what the defaults are.
    apart = {"bf16", "gradient_accumulation_steps", "gradient_checkpointing", "dataloader_drop_last"}
    for name, value in phi.items():
        if name not in apart | set(settings.OPTIONS):
            assert value == recipe.field_default(name), name


# The dry run


def test_dry_run_shows_and_checks_without_weights(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded weights"))
    assert main(["train", *ROWS, "--output", "run", "--dry-run", *SMALL]) == 0
    out = capsys.readouterr().out
    row = json.loads(Path("rows.jsonl").read_text().split("\n")[0])
    assert f"{row['prompt']}[[{row['chosen']}\n<verified><-hYes</verified></s>]]" in out
    assert f"{row['prompt']}{row['rejected']}\n[[<verified><-hNo</verified></s>]]" in out
    assert out.count("<-h") == 4  # the legend and three documents
    words = " ".join(out.split())
    assert "limit 64; 0 rows over it" in words
    assert f"{sum(p.numel() for p in tiny_lm().parameters()):,} parameters" in words
    assert "Steps: 3 an epoch with batches of 16, 6 in all" in words
    assert not Path("run").exists()


def test_dry_run_facts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = rehearsal(capsys, *ROWS, *SMALL)
    encoder = Encoder(tiny_tokenizer())
    lengths, counted = [], []
    for name in ("rows.jsonl", "calibration.jsonl"):
        for row in map(json.loads, Path(name).read_text().splitlines()):
            pair = (
                encoder.encode(row["prompt"], row["chosen"], True),
                encoder.encode(row["prompt"], row["rejected"], False),
            )
            lengths.append(max(len(e.input_ids) for e in pair))
            counted += [sum(label != -100 for label in pair[0].labels)] if name == "rows.jsonl" else []
    assert facts["lengths"]["longest"] == max(lengths)
    total = sum(p.numel() for p in tiny_lm().parameters())
    memory = facts["memory"]
    assert (memory["parameters"], memory["trainable"], memory["optimizer"]) == (total, total, 8 * total)
    assert memory["logits"] == 4 * len(tiny_tokenizer()) * sum(sorted(counted)[-16:])
    # The classes are those that the trainer draws.
    config = SDMConfig(output_dir="x", use_cpu=True, report_to="none", exemplar_dim=16, sdm_epochs=1)
    rows, ca = ([json.loads(x) for x in Path(n).read_text().splitlines()] for n in ("rows.jsonl", "calibration.jsonl"))
    trainer = SDMTrainer(tiny_lm(), config, rows, ca, tiny_tokenizer())
    trainer.begin_epoch(0)
    assert facts["documents"]["train"]["positive"] == sum(d.positive for d in trainer._documents)
    assert facts["documents"]["calibration"]["positive"] == sum(trainer.calibration_positive)
    small = rehearsal(capsys, *ROWS, *SMALL, "--lora-r", "2")["memory"]
    assert small["trainable"] < total / 10
    assert small["gradients"] == 4 * small["trainable"]


def test_rows_over_the_limit_are_counted_then_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"prompt": "ab" * 40 + "=", "chosen": "ab", "rejected": "ba"}
    write_rows(here / "long.jsonl", [*copy_rows(30), long, long])
    args = ["train", "--model", "model", "--data", "long.jsonl", "--output", "run", *SMALL]
    assert main([*args, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert "2 rows over it, 2 of them refused" in " ".join(out.split())
    assert "Row 30 of long.jsonl needs" in err
    assert "Row 30 of long.jsonl needs" in fails(capsys, *args)  # the number in the file, not in a half
    assert main([*args, "--dry-run", "--truncate-prompt"]) == 0
    assert "2 rows over it, 0 of them refused" in " ".join(capsys.readouterr().out.split())


def test_examples_keep_the_terminal_safe() -> None:
    encoder = Encoder(tiny_tokenizer())
    document = encoder.encode("abc" * 300, "a", True)
    text = dry_run.example_text(encoder, document)
    assert "characters ...]" in text.plain
    styles = {text.plain[s.start : s.end]: str(s.style) for s in text.spans}
    assert styles["Yes</verified></s>"] == "bold underline green"
    assert "dim" in styles.values()
    assert dry_run._legible("a\x1b[31m\nb\r") == "a\\x1b[31m\nb\\x0d"


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


# Bad input


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--data", "rows.jsonl", "--output", "o"], "--model is missing"),
        (["--model", "model", "--output", "o"], "--data is missing"),
        (["--model", "model", "--data", "rows.jsonl"], "--output is missing"),
        (["--model", "nope", "--data", "rows.jsonl", "--output", "o"], "The model nope does not exist"),
        (["--model", "model", "--data", "nope.jsonl", "--output", "o"], "nope.jsonl does not exist"),
        (
            [*ROWS, "--output", "o", "--learning-rat", "1"],
            "there is no setting --learning-rat (nearest: --learning-rate)",
        ),
        ([*ROWS, "--output", "o", "--weight_decay", "x"], "weight_decay is 'x' but must be a number"),
        ([*ROWS, "--output", "o", "--seed"], "seed is 'true' but must be a whole number"),
        ([*ROWS, "--output", "o", "stray"], "'stray' belongs to no option"),
        ([*ROWS, "--output", "o", "--loss", "mse"], "loss is 'mse'"),
        ([*ROWS, "--output", "o", "--lora-r", "0"], "lora_r is 0"),
        ([*ROWS, "--output", "o", "--lora-alpha", "8"], "lora_alpha is given without lora_r"),
        ([*ROWS, "--output", "o", "--reward", ".r:f"], "Reward '.r:f': importing '.r' fails"),
        ([*ROWS, "--output", "o", "--report-to", "no_such_logger"], "no_such_logger"),
        ([*ROWS, "--output", "o", "--reward", "nowhere"], "not of the form 'module:function'"),
        ([*ROWS, "--output", "o", "--max-length", "9999"], "only 64 positions"),
        ([*ROWS, "--output", "o", "--recipe", "nope.yaml"], "nope.yaml: No such file"),
        ([*ROWS, "--output", "rows.jsonl"], "rows.jsonl is a file"),
        ([*ROWS, "--output", "model"], "model holds something else than a training run"),
        ([*ROWS, "--output", "model", "--resume"], "model holds something else than a training run"),
    ],
)
def test_bad_input(here: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str) -> None:
    assert said in fails(capsys, "train", *args)
    assert not Path("o").exists()


def test_model_folders_that_lack_something(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*remove: str, damage: bool = False) -> str:
        shutil.rmtree("broken", ignore_errors=True)
        shutil.copytree("model", "broken")
        for pattern in remove:
            for path in Path("broken").glob(pattern):
                path.unlink()
        if damage:
            Path("broken/model.safetensors").write_bytes(b"no tensors")
        first = fails(capsys, "train", "--data", "rows.jsonl", "--model", "broken", "--output", "o", *SMALL)
        assert first == fails(capsys, "calibrate", "broken", "--data", "rows.jsonl", "--output", "o", *LAYER)
        assert not Path("o").exists()
        return first

    assert "broken holds no tokenizer" in said("tokenizer*")
    assert "broken holds no weights" in said("*.safetensors")
    assert "broken holds no config.json" in said("config.json")
    assert "The model of broken could not be loaded" in said(damage=True)
    config = json.loads(Path("model/config.json").read_text())
    for change, message in (
        ({"hidden_size": "x"}, "could not be loaded: Validation error"),
        ({"vocab_size": config["vocab_size"] + 1}, "could not be loaded"),
    ):
        shutil.copytree("model", "other", dirs_exist_ok=True)
        Path("other/config.json").write_text(json.dumps({**config, **change}))
        assert message in fails(capsys, "train", "--data", "rows.jsonl", "--model", "other", "--output", "o", *SMALL)
    assert "is a file" in fails(capsys, "calibrate", "rows.jsonl", "--data", "rows.jsonl", "--output", "o")
    assert "give --output" in fails(capsys, "calibrate", "org/name", "--data", "rows.jsonl")


def test_too_few_rows(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(here / "few.jsonl", copy_rows(2))
    args = ["--model", "model", "--data", "rows.jsonl", "--calibration", "few.jsonl", "--output", "o", *SMALL]
    assert "The calibration rows are too few" in fails(capsys, "train", *args)
    assert "The calibration rows are too few" in fails(
        capsys, "calibrate", "model", "--data", "few.jsonl", "--output", "o"
    )
    assert main(["train", *args, "--dry-run"]) == 2
    assert "The calibration rows are too few" in capsys.readouterr().err


def test_only_the_first_process_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stop:
        main(["train", "--dry-run", "--model", "model"])
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "0")
    assert "--data is missing" in fails(capsys, "train", "--dry-run", "--model", "model")


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"

    def fill(fail: bool) -> None:
        with whole_folder(target) as partial:
            (partial / "x").write_text("x")
            if fail:
                raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fill(fail=True)
    assert list(target.parent.iterdir()) == []
    target.mkdir()
    fill(fail=False)
    assert [p.name for p in target.parent.iterdir()] == ["b"]
    assert (target / "x").exists()


# Help


@pytest.mark.parametrize("command", [[], ["train"], ["calibrate"]])
def test_help_comes_at_once(command: list[str]) -> None:
    code = (
        "import sys\nfrom sdmlm.cli import main\n"
        f"try: main([*{command}, '--help'])\n"
        "finally: print({'torch', 'transformers', 'numpy'} & {*sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"
    if command == ["train"]:
        for field in config_options.own_fields():
            assert f"--{field.name.replace('_', '-')} " in done.stdout
        assert "TrainingArguments" in done.stdout
        assert "--adam-beta1" not in done.stdout
    assert "examples:" in done.stdout


def test_hints_resolve() -> None:
    """The types that values are converted to come from the annotations of TrainingArguments, which must resolve."""
    assert typing.get_type_hints(SDMConfig)["learning_rate"] is float
