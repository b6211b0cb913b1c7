"""`sdmlm replicate`, end to end on a tiny language model."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_checks import fails, strict_json
from replicate_checks import RECIPE, SETTINGS, kept, rows
from tiny_lm import process_group, tiny_lm, tiny_tokenizer

from sdmlm.cli import main
from sdmlm.evaluation.lm_evaluation import read_evaluation
from sdmlm.experiments import evaluate as evaluation
from sdmlm.experiments.runs import Run, read_runs
from sdmlm.finetuning.trainer import SDMTrainer
from sdmlm.generation.language_model import SDMLanguageModel
from sdmlm.tasks import arithmetic

# Running


def test_every_run_has_its_model_and_evaluations_and_no_checkpoints(whole: Path) -> None:
    assert {p.name for p in whole.iterdir()} == {
        "tiny-none", "tiny-sdm_hn", "tables.csv", "tables.json", "tables.md", "tables.tex", "training.csv",
        "report.html",
    }  # fmt: skip
    for name in ("tiny-none", "tiny-sdm_hn"):
        for seed in (0, 1):
            folder = whole / name / f"seed-{seed}"
            record = strict_json((folder / "training.json").read_text())
            assert (record["status"], record["settings"]["seed"], record["config"]["seed"]) == ("finished", seed, seed)
            assert {p.name for p in (folder / "evaluations").iterdir()} == {"test.json", "shifted.json"}
            assert (folder / "model.safetensors").exists()
            assert not list(folder.glob("checkpoint-*"))
    assert strict_json((whole / "tiny-none" / "seed-0" / "training.json").read_text())["summary"]["steps"] == 0


def test_what_is_stored_is_what_the_saved_model_says(whole: Path, base: Path) -> None:
    folder = whole / "tiny-sdm_hn" / "seed-1"
    found, facts = read_evaluation(folder / "evaluations" / "test.json")
    assert {name: facts[name] for name in ("family", "setting", "label", "seed", "test")} == {
        "family": "tiny", "setting": "sdm_hn", "label": "SDM + HN", "seed": 1, "test": "test",
    }  # fmt: skip
    lm, some = SDMLanguageModel.from_pretrained(folder), rows()[72:84]
    for n, (row, said) in enumerate(zip(some, lm.generate([row["prompt"] for row in some]), strict=True)):
        assert found.generated[n] == said.generated
        assert found.y[n] == int(said.text.strip() == row["chosen"])
        assert found.prediction[n] == int(said.verdict == "Yes")
        assert (found.accepted[n], found.accepted_lower[n]) == (said.accepted, said.accepted_lower)
        assert (found.q[n], found.alpha) == (said.q, said.alpha)
        assert found.probability[n] == pytest.approx(said.probability)
        at = [alpha for alpha, *_ in found.regions if found.accepted_at(alpha)[n]]
        assert (max(at) if at else None) == said.highest_alpha


def test_tables_are_those_of_the_runs(whole: Path) -> None:
    data = strict_json((whole / "tables.json").read_text())
    assert {name: len(lines) for name, lines in data["tables"].items()} == {
        "selective": 4, "generation": 4, "full": 12, "calibration": 2,
    }  # fmt: skip
    run = next(r for r in read_runs(whole) if (r.setting, r.seed) == ("sdm_hn", 1))
    line = next(x for x in data["tables"]["selective"] if (x["setting"], x["dataset"]) == ("sdm_hn", "test"))
    assert line["seeds"] == [0, 1]
    assert line["quantities"]["share"]["values"][1] == run.evaluations["test"].accepted.mean()
    assert "Training curves of tiny" in (whole / "report.html").read_text()
    assert "SDM + HN" in (whole / "tables.tex").read_text()
    assert (whole / "tables.csv").read_text().startswith("table,dataset,model")


def test_the_log_of_every_run_is_kept_line_by_line(whole: Path) -> None:
    lines = list(csv.DictReader((whole / "training.csv").open()))
    runs = read_runs(whole)
    assert [(x["model"], x["seed"]) for x in lines] == [(r.label, str(r.seed)) for r in runs for _ in r.history]
    logs = [row for run in runs for row in run.history]
    assert {"loss", "base", "eval_loss", "eval_admitted", "train_runtime"} <= set(lines[0])
    for line, row in zip(lines, logs, strict=True):
        numbers = {k: v for k, v in line.items() if k not in ("family", "model", "seed")}
        assert {k: float(v) for k, v in numbers.items() if v} == {k: v for k, v in row.items() if v is not None}


def test_a_finished_replication_only_makes_its_tables_again(
    whole: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    before, tables = kept(whole), (whole / "tables.json").read_text()
    (whole / "tables.json").unlink()
    monkeypatch.setattr(SDMTrainer, "train", lambda *a, **k: pytest.fail("trained again"))
    monkeypatch.setattr(SDMLanguageModel, "generate", lambda *a, **k: pytest.fail("generated again"))
    capsys.readouterr()
    assert main(["replicate", "tiny/sdm_hn.yaml", "--output", "whole", "--seeds", "1", "--json"]) == 0
    assert strict_json(capsys.readouterr().out) == strict_json(tables)  # all that is finished in the folder
    assert (whole / "tables.json").read_text() == tables
    assert kept(whole) == before
    assert main(["replicate", "tiny", "--output", "whole", "--seeds", "0", "1"]) == 0
    out = capsys.readouterr().out
    for word in ("Selective classification", "Exact match", "HR lower", "q'min", "Written: whole/tables.csv"):
        assert word in out


def test_an_interrupted_replication_goes_on_to_the_same(
    whole: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replicate", "tiny/sdm_hn.yaml", "--output", "out", "--seeds", "0"]
    folder = here / "out" / "tiny-sdm_hn" / "seed-0"

    plain, calls = SDMTrainer.compute_loss, 0

    def stopped_while_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:  # in the second epoch
            raise KeyboardInterrupt
        return plain(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(SDMTrainer, "compute_loss", stopped_while_training)
        assert main(command) == 2
    assert list(folder.glob("checkpoint-*"))
    assert not (here / "out" / "tables.json").exists()
    assert capsys.readouterr().err.endswith("sdmlm: stopped; the same command goes on from the last checkpoint.\n")
    assert main([*command, "--dry-run", "--json"]) == 0
    (run,) = strict_json(capsys.readouterr().out)["runs"]
    assert (run["model"], run["tests"]) == ("to be resumed", ["test", "shifted"])

    evaluate, seen = evaluation.evaluate, []

    def stopped_after_one(*args: Any, **kwargs: Any) -> Any:
        if seen:
            raise KeyboardInterrupt
        seen.append(1)
        return evaluate(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", stopped_after_one)
        assert main(command) == 2
    assert {p.name for p in (folder / "evaluations").iterdir()} == {"test.json"}
    assert not list(folder.glob("checkpoint-*"))  # the training is done
    before = kept(here / "out")

    with monkeypatch.context() as patch:
        patch.setattr(SDMTrainer, "train", lambda *a, **k: pytest.fail("trained again"))
        assert main(command) == 0
    after = kept(here / "out")
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 1
    twin = whole / "tiny-sdm_hn" / "seed-0"
    assert (folder / "model.safetensors").read_bytes() == (twin / "model.safetensors").read_bytes()
    for test in ("test", "shifted"):
        one, other = (read_evaluation(f / "evaluations" / f"{test}.json")[0] for f in (folder, twin))
        assert one.to_json() == other.to_json()


def test_the_seed_of_the_recipe_is_the_default_and_a_twin_is_left_out(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rerun = RECIPE.format(**{**SETTINGS["sdm_hn"], "label": "again", "seed": 4})
    Path("tiny/sdm_hn_rerun.yaml").write_text(rerun)
    assert main(["replicate", "tiny", "--output", "out", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert [f"out/tiny-{name}" in out for name in ("none/seed-3", "sdm_hn/seed-3", "sdm_hn_rerun/seed-4")] == [True] * 3
    assert err == ""
    assert main(["replicate", "tiny", "--output", "out", "--dry-run", "--seeds", "0", "4", "--json"]) == 0
    out, err = capsys.readouterr()
    folders = [run["folder"] for run in strict_json(out)["runs"]]
    assert folders == [f"out/tiny-{name}/seed-{seed}" for name in ("none", "sdm_hn") for seed in (0, 4)]
    assert "sdm_hn_rerun.yaml with seed 0 is the same run as tiny/sdm_hn.yaml: left out" in err
    assert not Path("out").exists()


@contextmanager
def at_work(folder: str) -> Iterator[Path]:
    """As if another process were at work on this run."""
    path = Path(folder)
    path.mkdir(parents=True)
    handle = os.open(path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        os.close(handle)


def test_a_run_that_another_process_is_at_is_left_to_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with at_work("out/tiny-none/seed-0") as busy:
        assert main(["replicate", "tiny/none.yaml", "--output", "out", "--seeds", "0", "1"]) == 0
    assert "tiny-none, seed 0: left to the process that is at work on it" in capsys.readouterr().err
    assert not list(busy.iterdir())
    assert [(run.setting, run.seed) for run in read_runs("out")] == [("none", 1)]
    assert main(["replicate", "tiny/none.yaml", "--output", "out", "--seeds", "0", "1"]) == 0  # the lock has gone
    assert [run.seed for run in read_runs("out")] == [0, 1]


def test_all_runs_left_to_others_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with at_work("out/tiny-none/seed-0"):
        assert main(["replicate", "tiny/none.yaml", "--output", "out", "--seeds", "0", "--json"]) == 0
    out, err = capsys.readouterr()
    assert strict_json(out) == {}
    assert "out has no finished run yet" in err


def test_two_processes_make_the_run_of_one(here: Path) -> None:
    """As `accelerate launch` starts them: they train together, and the first one evaluates and makes the tables."""
    recipe = Path("tiny/none.yaml").read_text().replace("epochs: 0", "epochs: 1").replace("size: 12", "size: 6")
    Path("tiny/none.yaml").write_text(recipe)
    command = ["replicate", "tiny/none.yaml", "--output", "out", "--seeds", "0"]
    processes = []
    for group in process_group(2):
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | group
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "sdmlm.cli", *command], env=environment, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()  # one that failed leaves the other waiting
    assert [process.returncode for process in processes] == [0, 0], said
    (run,) = read_runs("out")
    assert {name: len(e) for name, e in run.evaluations.items()} == {"test": 12, "shifted": 10}
    assert not list(Path("out").glob("*/*/checkpoint-*"))
    assert Path("out/report.html").exists()
    assert ["12 prompts of test" in text for text in said] == [True, False]
    # The same with one process, which must take twice the batch.
    Path("tiny/none.yaml").write_text(recipe.replace("size: 6", "size: 12"))
    assert main([*command[:3], "alone", *command[4:]]) == 0
    (alone,) = read_runs("alone")
    assert [e.generated for e in run.evaluations.values()] == [e.generated for e in alone.evaluations.values()]


def test_another_task_is_evaluated_again(
    here: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole / "tiny-none", "out/tiny-none")
    first = rows()[72]["sentence"]
    Path("my_task.py").write_text(
        f"from sdmlm.tasks.word_ordering import REFERENCE, reward\n\n\ndef answer(text):\n    return {first!r}\n"
    )
    monkeypatch.syspath_prepend(here)
    recipe = Path("tiny/none.yaml").read_text()
    Path("tiny/none.yaml").write_text(recipe.replace("task: word_ordering", "task: my_task"))
    command = ["replicate", "tiny/none.yaml", "--output", "out", "--seeds", "0"]
    said = fails(capsys, *command)  # seed 1 would be read in another way
    assert "out/tiny-none/seed-1 was evaluated as word_ordering, not as my_task" in said
    shutil.rmtree("out/tiny-none/seed-1")
    for path in Path("out/tiny-none/seed-0/evaluations").iterdir():  # as they were before they named the task
        path.write_text(path.read_text().replace('"task": "word_ordering", ', ""))
    devices = []
    opened = SDMLanguageModel.from_pretrained

    def open_(*args: Any, **kwargs: Any) -> Any:
        devices.append(kwargs["device"])
        return opened(*args, **kwargs)

    monkeypatch.setattr(SDMLanguageModel, "from_pretrained", open_)
    for _ in range(2):  # and only once
        assert main(command) == 0
    assert devices == ["cpu"]  # `use_cpu` is about the tests too
    (run,) = read_runs("out")
    assert run.task == "my_task"
    before, _ = read_evaluation(whole / "tiny-none/seed-0/evaluations/test.json")
    assert run.evaluations["test"].generated == before.generated
    assert run.evaluations["test"].answer_right.tolist() == [row["sentence"] == first for row in rows()[72:84]]


def test_a_new_sdm_layer_is_evaluated_again(here: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(whole / "tiny-none" / "seed-0", "out/tiny-none/seed-0")
    layer = [
        "--exemplar-dim",
        "8",
        "--sdm-epochs",
        "4",
        "--sdm-learning-rate",
        "1e-2",
        "--alpha",
        "0.8",
        "--documents",
        "paper",
    ]
    assert main(["calibrate", "out/tiny-none/seed-0", "--data", "calibration.jsonl", "--force", *layer]) == 0
    weights = Path("out/tiny-none/seed-0/model.safetensors").stat().st_mtime_ns
    assert main(["replicate", "tiny/none.yaml", "--output", "out", "--seeds", "0"]) == 0
    assert Path("out/tiny-none/seed-0/model.safetensors").stat().st_mtime_ns == weights
    new, old = (read_evaluation(root / "tiny-none/seed-0/evaluations/test.json")[0] for root in (Path("out"), whole))
    assert new.generated == old.generated
    assert new.calibration != old.calibration
    # A report knows evaluations of another layer from its own.
    run = "out/tiny-none/seed-0"
    capsys.readouterr()
    assert main(["report", run, "--json"]) == 0
    assert "test" in strict_json(capsys.readouterr().out)["tests"]
    assert main(["calibrate", run, "--data", "calibration.jsonl", "--force", *layer, "--seed", "5"]) == 0
    capsys.readouterr()
    assert main(["report", run, "--json"]) == 0
    out, err = capsys.readouterr()
    assert strict_json(out)["tests"] == []
    assert "made with another SDM layer" in err
    # So do the tables of other runs in the folder.
    shutil.copytree(whole / "tiny-sdm_hn" / "seed-0", "out/tiny-sdm_hn/seed-0")
    assert main(["replicate", "tiny/sdm_hn.yaml", "--output", "out", "--seeds", "0"]) == 0
    assert "tiny-none/seed-0/evaluations/test.json is left out" in capsys.readouterr().err
    assert [run.setting for run in read_runs_quietly("out")] == ["sdm_hn"]


def read_runs_quietly(folder: str) -> list[Run]:
    with pytest.warns(UserWarning, match="another SDM layer"):
        return read_runs(folder)


def test_tables_of_something_else_are_not_replaced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/tables.json").write_text("precious")
    said = fails(capsys, "replicate", "tiny/none.yaml", "--output", "out")
    assert "out holds tables or a report, but no runs" in said
    assert Path("out/tables.json").read_text() == "precious"
    assert [p.name for p in Path("out").iterdir()] == ["tables.json"]


def test_another_task_goes_the_same_way(here: Path) -> None:
    """Sums: rows by `sdmlm data`, a reward with columns of its own, a reference that is not a sentence."""
    sizes = ["--train", "24", "--calibration", "24", "--test", "8", "--shifted", "6"]
    assert main(["data", "arithmetic", "--output", "sums", *sizes]) == 0
    tiny_lm(max_position_embeddings=256).save_pretrained("longer")
    tiny_tokenizer().save_pretrained("longer")
    Path("adding").mkdir()
    recipe = (
        RECIPE.format(**SETTINGS["sdm_hn"])
        .replace("reward: sdmlm.tasks.word_ordering:reward\n", "")  # the task's own then
        .replace("word_ordering", "arithmetic")
        .replace("epochs: 2", "epochs: 1")
        .replace("model: model", "model: longer")
    )
    for name in ("train", "calibration", "test", "shifted"):
        recipe = recipe.replace(f" {name}.jsonl", f" sums/{name}.jsonl")
    Path("adding/sdm_hn.yaml").write_text(recipe)
    Path("out/x").mkdir(parents=True)  # a folder of somebody else's is no matter
    assert main(["replicate", "adding", "--output", "out", "--seeds", "0"]) == 0
    fitted = strict_json(Path("out/adding-sdm_hn/seed-0/sdm/lm.json").read_text())
    assert fitted["reward"] == "sdmlm.tasks.arithmetic:reward"
    (run,) = read_runs("out")
    assert run.task == "arithmetic"
    for name in ("test", "shifted"):
        found = run.evaluations[name]
        given = [json.loads(line) for line in Path(f"sums/{name}.jsonl").read_text().splitlines()]
        assert found.answer_right.tolist() == [
            arithmetic.answer(text) == row["sum"] for text, row in zip(found.generated, given, strict=True)
        ]
        assert len(found) == len(given)
    page = Path("out/report.html").read_text()
    assert "as published" not in page  # the paper's figures are about another task
    right = lambda prompts, completions, **columns: [1] * len(prompts)  # noqa: E731
    lm = SDMLanguageModel.from_pretrained("out/adding-sdm_hn/seed-0")
    assert evaluation.evaluate(lm, arithmetic, given, right, progress=False).y.tolist() == [1] * len(given)


def test_runs_over_different_rows_are_not_averaged(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    path = tmp_path / "out" / "tiny-sdm_hn" / "seed-1" / "evaluations" / "test.json"
    assert path.exists()
    text = path.read_text()
    sha256 = json.loads(text)["rows_sha256"]
    path.write_text(text.replace(sha256, "0" * 64))
    with pytest.raises(ValueError, match="different rows of test"):
        read_runs(tmp_path / "out")
