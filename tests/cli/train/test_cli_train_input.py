"""`sdmlm train` and `sdmlm calibrate`: bad input, whole folders, help."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from cli_checks import fails
from tiny_lm import copy_rows
from train_checks import LAYER, ROWS, SMALL, write_rows

from sdmlm.cli import config_options, main
from sdmlm.finetuning.config import SDMConfig
from sdmlm.storage.output_paths import whole_folder

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
