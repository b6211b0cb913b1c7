"""What `sdmlm replicate` refuses, and what it says then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_checks import fails
from replicate_checks import kept, rows, write_rows

from sdmlm.cli import main

# Refusals


def test_a_test_set_that_the_reward_cannot_judge_is_refused_at_once(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(
        "def reward(prompts, completions, sentence, level, **columns):\n    return [1] * len(prompts)\n"
    )
    recipe = Path("tiny/sdm_hn.yaml").read_text()
    Path("tiny/sdm_hn.yaml").write_text(recipe.replace("sdmlm.tasks.word_ordering:reward", "mine:reward"))
    # The recipe that comes first has another reward, and the same rows.
    assert "level" in fails(capsys, "replicate", "tiny", "--output", "out", "--dry-run")
    for name in ("train", "calibration", "shifted"):
        lines = [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]
        write_rows(f"{name}.jsonl", [{**row, "level": "1"} for row in lines])
    said = fails(capsys, "replicate", "tiny/sdm_hn.yaml", "--output", "out", "--dry-run")
    assert said.startswith("sdmlm: test.jsonl: Reward reward cannot be called with the columns")
    assert not Path("out").exists()


def test_a_folder_of_another_recipe_is_refused_and_left_alone(
    here: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole / "tiny-sdm_hn" / "seed-0", "out/tiny-sdm_hn/seed-0")
    before = kept(here / "out")
    command = ["replicate", "tiny/sdm_hn.yaml", "--output", "out", "--seeds", "0"]
    recipe = Path("tiny/sdm_hn.yaml").read_text()
    for old, new, said in (
        ("alpha: 0.8", "alpha: 0.9", "alpha was 0.8 and is 0.9 in tiny/sdm_hn.yaml"),
        ("sdm_epochs: 3\n", "", "sdm_epochs was 3 and is 200"),
        ("loss: sdm", "loss: sdm\ndata_seed: 5", "data_seed was None and is 5"),
        ("model: model", "model: ./model", "model was 'model' and is './model'"),
    ):
        Path("tiny/sdm_hn.yaml").write_text(recipe.replace(old, new))
        message = fails(capsys, *command)
        assert "out/tiny-sdm_hn/seed-0 holds a run of another recipe" in message
        assert said in message
    Path("tiny/sdm_hn.yaml").write_text(recipe)
    for name in ("train", "calibration", "test"):
        lines = Path(f"{name}.jsonl").read_text()
        Path(f"{name}.jsonl").write_text(lines + lines.split("\n")[0].replace("a", "b") + "\n")
        assert f"made with other rows than {name}.jsonl holds now" in fails(capsys, *command)
        Path(f"{name}.jsonl").write_text(lines)
    # Runs of one setting may differ in the seed alone.
    beside = [*command[:-1], "1"]
    Path("tiny/sdm_hn.yaml").write_text(recipe.replace("sdm_epochs: 3\n", "sdm_epochs: 4\n"))
    assert "seed-0 is a run of another recipe (sdm_epochs differs from tiny/sdm_hn.yaml)" in fails(capsys, *beside)
    Path("tiny/sdm_hn.yaml").write_text(recipe)
    for name in ("train", "test"):
        lines = Path(f"{name}.jsonl").read_text()
        Path(f"{name}.jsonl").write_text(lines + lines.split("\n")[0].replace("a", "b") + "\n")
        assert f"made with other rows than {name}.jsonl holds now" in fails(capsys, *beside)
        Path(f"{name}.jsonl").write_text(lines)
    assert kept(here / "out") == before
    Path("out/tiny-none/seed-0").mkdir(parents=True)
    Path("out/tiny-none/seed-0/notes.txt").write_text("mine")
    refused = fails(capsys, "replicate", "tiny/none.yaml", "--output", "out", "--seeds", "0")
    assert "holds something else than a training run" in refused
    # Where rows lie and what a setting is called may change; so may the test sets.
    for name in ("train", "calibration", "test", "shifted"):
        Path(f"{name}.jsonl").unlink()
    Path("tiny/sdm_hn.yaml").write_text(recipe.replace("train.jsonl", "t.jsonl").replace("SDM + HN", "Name"))
    assert main([*command, "--dry-run"]) == 0
    assert "trained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("task: word_ordering\n", "", "names no task"),
        (
            "task: word_ordering",
            "task: crosswords",
            "Task 'crosswords' (known here: arithmetic, word_ordering): there is no module",
        ),
        ("tests:\n  test: test.jsonl\n  shifted: shifted.jsonl\n", "", "names no tests"),
        ("test: test.jsonl", "a/b: test.jsonl", "tests must be `name: rows`"),
        ("test: test.jsonl", "test: [test.jsonl]", "tests must be `name: rows`"),
        ("test: test.jsonl", "test: nowhere.jsonl", "nowhere.jsonl does not exist"),
        ("shifted: shifted.jsonl", "shifted: bare.jsonl", "bare.jsonl: row 0 has no text in its column 'sentence'"),
        ("shifted: shifted.jsonl", "shifted: long.jsonl", "Row 0 of long.jsonl needs"),
        ("model: model\n", "", "names no model"),
        ("model: model", "model: nomodel", "nomodel does not exist"),
        ("model: model", "model: bare", "bare holds no tokenizer"),
        ("alpha: 0.8", "alpha: 0.3", "alpha"),
        ("data: train.jsonl", "data: few.jsonl", "The train rows are too few"),
        ("reward: sdmlm.tasks.word_ordering:reward", "reward: nomodule:f", "there is no module 'nomodule'"),
        ("alpha: 0.8", "alfa: 0.8", "tiny/sdm_hn.yaml: there is no setting alfa (nearest: alpha)"),
    ],
)
def test_everything_is_checked_before_the_first_run(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, old: str, new: str, said: str
) -> None:
    first = rows()[0]
    write_rows("bare.jsonl", [{k: v for k, v in first.items() if k != "sentence"}])
    write_rows("few.jsonl", rows()[:3])
    write_rows("long.jsonl", [{**first, "prompt": "a" * 90}])
    shutil.copytree("model", "bare", ignore=shutil.ignore_patterns("tokenizer*", "special*", "chat*"))
    monkeypatch.setattr("sdmlm.finetuning.run.load_lm", lambda *a, **k: pytest.fail("began to train"))
    recipe = Path("tiny/sdm_hn.yaml").read_text()
    assert old in recipe
    Path("tiny/sdm_hn.yaml").write_text(recipe.replace(old, new))
    assert said in fails(capsys, "replicate", "tiny", "--output", "out")
    assert not Path("out").exists()


def test_bad_arguments_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("x")
    Path("empty").mkdir()
    shutil.copytree("tiny", "other/tiny")
    Path("strict.yaml").write_text(Path("tiny/none.yaml").read_text().replace("alpha: 0.8", "alpha: 0.9"))
    for args, said in (
        (["nowhere", "--output", "out"], "nowhere does not exist"),
        (["empty", "--output", "out"], "empty holds no recipe"),
        (["tiny", "--output", "file"], "file is a file"),
        (["tiny", "--output", "out", "--seeds", "0", "0"], "each once"),
        (["tiny", "--output", "out", "--seeds", "-1"], "whole numbers from 0 on"),
        (["tiny/none.yaml", "other/tiny/none.yaml", "--output", "out"], "Two recipes would be run in out/tiny-none"),
        (["tiny", "strict.yaml", "--output", "out"], "would have alpha 0.8 and 0.9"),
    ):
        assert said in fails(capsys, "replicate", *args)
    assert not Path("out").exists()


def test_train_passes_over_what_only_replicate_reads(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", "tiny/sdm_hn.yaml", "--dry-run"]) == 0
    assert "word_ordering" not in capsys.readouterr().err
