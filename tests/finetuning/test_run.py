"""A training run before and after training: warnings about settings, threads, rows encoded once, an LM that learned nothing."""

from __future__ import annotations

import io
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer

from sdmlm import SDMTrainer
from sdmlm.cli.layer_tables import show_answers
from sdmlm.cli.main import main
from sdmlm.finetuning import run as run_module
from sdmlm.finetuning.run import prepare_run, warn_about
from sdmlm.finetuning.settings import read_settings
from sdmlm.finetuning.threads import SMALL_MODEL, threads_for
from sdmlm.language_model.encoding import Encoder
from sdmlm.language_model.loading import DEMO_MODEL


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model and rows, as the working directory."""
    monkeypatch.chdir(tmp_path)
    tiny_lm().save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    for name, seed in (("train", 0), ("calibration", 1)):
        rows = copy_rows(48, seed, letters=4)
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def prepared(**settings: Any) -> run_module.TrainingRun:
    given = {"model": "model", "data": "train.jsonl", "calibration": "calibration.jsonl", "output": "out"}
    return prepare_run(read_settings({**given, "use_cpu": True, **settings}))


def said(run: run_module.TrainingRun) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_about(run)
    return [str(warning.message) for warning in caught if "hardly change" in str(warning.message)]


def test_a_short_run_at_a_small_rate_is_warned_about(here: Path) -> None:
    """The rule: learning rate x steps below 0.005, all weights trained, a model below a billion parameters."""
    (message,) = said(prepared(max_steps=50))  # the default rate, 5e-5
    assert message.startswith("50 steps at a learning rate of 5e-05 will hardly change this model")
    assert "--learning-rate 0.0002" in message
    assert said(prepared(max_steps=50, learning_rate=9.9e-5))
    assert not said(prepared(max_steps=50, learning_rate=1e-4))
    assert not said(prepared(max_steps=100))
    assert not said(prepared(num_train_epochs=0))  # nothing is to be trained
    assert not said(prepared(max_steps=50, lora_r=2))


def test_a_large_model_may_need_small_moves(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module.TrainingRun, "parameters", lambda self: 3_000_000_000)
    assert not said(prepared(max_steps=50))


def test_small_models_get_one_thread_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(SMALL_MODEL - 1) as threads:
            assert threads == torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with threads_for(SMALL_MODEL) as threads:
            assert threads == torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with threads_for(1) as threads:  # the user's own choice
            assert threads == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_trainer_opens_demo_by_name(tmp_path: Path) -> None:
    trainer = SDMTrainer("demo", tiny_config(tmp_path), copy_rows(16, 0), copy_rows(16, 1))
    assert trainer.model.config._name_or_path == str(DEMO_MODEL)
    assert len(trainer.processing_class) >= trainer.model.config.vocab_size // 2


def test_rows_are_encoded_and_checked_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the static documents of a run, each is encoded once between the file and the final SDM layer."""
    seen: list[tuple[str, str, bool]] = []
    encode = Encoder.encode

    def counted(self: Encoder, prompt: Any, completion: Any, verified: bool, row: object = None) -> Any:
        if isinstance(row, str) and " of " in row:
            seen.append((row, str(completion), verified))
        return encode(self, prompt, completion, verified, row)

    monkeypatch.setattr(Encoder, "encode", counted)
    checks: list[int] = []
    check_rows = run_module.read_preferences.__globals__["check_rows"]
    for module in ("sdmlm.language_model.rows", "sdmlm.finetuning.training_rows"):
        monkeypatch.setattr(f"{module}.check_rows", lambda rows, *a: checks.append(len(rows)) or check_rows(rows, *a))
    args = ["train", "--model", "model", "--data", "train.jsonl", "--calibration", "calibration.jsonl", "--output", "o"]
    small = "--loss ce --num-train-epochs 1 --learning-rate 3e-3 --exemplar-dim 16 --sdm-epochs 2 --use-cpu --alpha 0.8"
    assert main([*args, *small.split(), "--json"]) == 0
    assert len(seen) == len(set(seen)) == 2 * (48 + 48)
    assert checks == [48, 48]


def shown(**summary: Any) -> str:
    out = io.StringIO()
    show_answers(Console(file=out, width=500), summary)
    return out.getvalue()


def test_an_lm_that_learned_nothing_is_named_as_the_problem() -> None:
    text = shown(answers={"prompts": 40, "right": 0}, training_loss={"first": 4.0, "last": 3.9})
    assert text.startswith("The LM answered 0 of 40 calibration prompts correctly")
    assert "Improve the language model before its SDM layer" in text
    assert "training loss hardly fell, from 4 to 3.9" in text
    assert "--learning-rate" in text
    assert "loss fell, from 4 to 1" in shown(
        answers={"prompts": 40, "right": 1}, training_loss={"first": 4.0, "last": 1.0}
    )
    assert "problem" not in shown(answers={"prompts": 40, "right": 2}, training_loss=None)
    assert shown() == ""  # the record of an older version


def test_train_says_first_that_the_lm_is_the_problem(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["train", "--model", "model", "--data", "train.jsonl", "--calibration", "calibration.jsonl", "--output", "o"]
    small = "--num-train-epochs 1 --learning-rate 1e-9 --exemplar-dim 16 --sdm-epochs 2 --use-cpu --alpha 0.8"
    assert main([*args, *small.split()]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("The LM answered 0 of ")
    assert out.index("Improve the language model") < out.index("The final SDM layer")
    assert "will hardly change this model" in err
    record = json.loads(Path("o/training.json").read_text())
    assert record["summary"]["answers"]["right"] == 0 < record["summary"]["answers"]["prompts"]


def test_arithmetic_rows_come_with_their_reward(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "arithmetic", "--output", "sums", "--train", "4", "--calibration", "4", "--test", "0"]) == 0
    given = "--data sums/train.jsonl --calibration sums/calibration.jsonl --reward sdmlm.tasks.arithmetic:reward"
    assert f"{given} --output runs/lm" in capsys.readouterr().out


def test_the_suggested_command_of_the_demo_s_sentences_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--train", "99", "--calibration", "98", "--test", "0", "--shifted", "0"]
    assert main(["data", "word-ordering", "--sentences", "demo", "--output", "rows", *sizes]) == 0
    (suggested,) = re.findall("Next: sdmlm (train .*)", capsys.readouterr().out)
    assert main([*suggested.split(), "--dry-run"]) == 0
    assert "Steps: 2 per epoch" in capsys.readouterr().out
