"""Run an experiment: train and evaluate what is left to do, then make the tables. A second call continues the first."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdmlm.evaluation.lm_evaluation import evaluation_file, read_evaluation, write_evaluation
from sdmlm.experiments import evaluate
from sdmlm.experiments.answer_runs import TEST, comparison_csv, read_comparison, write_comparison
from sdmlm.experiments.checks import check_runs, check_stored
from sdmlm.experiments.planning import PlannedRun, plan_runs
from sdmlm.experiments.runs import Run, training_csv
from sdmlm.experiments.tables import Tables
from sdmlm.finetuning.processes import is_main_process
from sdmlm.storage.artifacts import locked, write_text_atomically

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel

SAMPLES = 2  # further answers per prompt, for self-consistency

Tell = Callable[[str], None]  # called with a sentence about the current step


def checked_runs(recipes: Sequence[str], folder: str | Path, seeds: Sequence[int] | None = None) -> list[PlannedRun]:
    """The runs that recipes ask for, after checking that all of them can be done."""
    planned = plan_runs(recipes, folder, seeds)
    check_runs(planned)
    check_stored(planned, folder)
    return planned


def run_all(planned: Sequence[PlannedRun], tell: Tell) -> None:
    """Train and evaluate every run. Several independent processes may share a folder; each run is done by one of them.

    Under `accelerate launch` the processes train together, and the first one evaluates.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    titles = [f"[{n}/{len(planned)}] {one.name}" for n, one in enumerate(planned, start=1)]
    for one, title in zip(planned, titles, strict=True):
        with locked(one.folder, wait=0) if is_main_process() else contextlib.nullcontext(True) as ours:
            if not ours and not alone:
                raise ValueError(f"{one.folder} is being worked on by another process: wait for it.")
            if not ours:
                tell(f"{title}: left to the process that is at work on it.")
                continue
            _train(one, title, tell)
            if alone:
                _evaluate(one, title, tell)
    if not alone and is_main_process():
        for one, title in zip(planned, titles, strict=True):
            _evaluate(one, title, tell)


def _train(one: PlannedRun, title: str, tell: Tell) -> None:
    """Fine-tune unless that is done, then remove the checkpoints."""
    from sdmlm.finetuning import run

    record = one.record()
    if record is None or record["status"] != "finished":
        if is_main_process():
            tell(f"{title}: {'training' if record is None else 'training goes on'}")
        try:
            run.train(run.prepare_run(one.run_settings(record), record), resume=True)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped; the same command goes on from the last checkpoint.") from None
        gc.collect()  # the trainer refers to itself
    if is_main_process():
        for folder in one.folder.glob("checkpoint-*"):
            shutil.rmtree(folder, ignore_errors=True)


def _evaluate(one: PlannedRun, title: str, tell: Tell) -> None:
    """Evaluate on the test sets that are pending, and store each evaluation."""
    from sdmlm.generation.language_model import SDMLanguageModel

    pending = one.pending_tests()
    if not pending and not _comparable(one):
        return
    device = "cpu" if one.settings.get("use_cpu") else None  # where it was trained
    lm, task = SDMLanguageModel.from_pretrained(one.folder, device=device), evaluate.load_task(one.settings["task"])
    for test in pending:
        rows = one.test_rows(test)
        tell(f"{title}: {len(rows)} prompts of {test}")
        start = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):  # a reward may print
            evaluation = evaluate.evaluate(lm, task, rows.rows, one.settings.get("reward"))
        source = {
            "test": test,
            "rows_source": rows.source,
            "rows_sha256": rows.sha256,
            "sdm_sha256": one.layer_sha256(),
        }
        metadata = {**one.metadata(), **source, "seconds": round(time.perf_counter() - start, 1)}
        write_evaluation(evaluation_file(one.folder, test), evaluation, metadata)
    if _comparable(one):
        tell(f"{title}: comparing scores of its answers")
        _compare(one, lm)


def _comparable(one: PlannedRun) -> bool:
    """Whether scores are still to be compared: on the test set "test", where it has rows enough."""
    from sdmlm.experiments.answer_comparison import LEAST_ROWS

    if TEST not in one.settings["tests"] or read_comparison(one.folder, one.layer_sha256()) is not None:
        return False
    return len(one.test_rows(TEST).rows) >= LEAST_ROWS


def _compare(one: PlannedRun, lm: SDMLanguageModel) -> None:
    """Compare scores of the answers that were evaluated."""
    from sdmlm.experiments.answer_comparison import compare_answers

    written, rows = {}, {}
    for test in one.settings["tests"]:
        evaluation, _ = read_evaluation(evaluation_file(one.folder, test))
        written[test] = [lm.tags.read(text)[0] for text in evaluation.generated]
        rows[test] = one.test_rows(test).rows
    others = {test: some for test, some in rows.items() if test != TEST}
    reward = one.settings.get("reward")
    with contextlib.redirect_stdout(sys.stderr):  # whatever a reward prints
        comparison = compare_answers(lm, rows[TEST], others, reward, samples=SAMPLES, written=written)
    write_comparison(one.folder, comparison, one.layer_sha256())


def write_tables(folder: str | Path, runs: Sequence[Run], tables: Tables) -> None:
    """Write tables.json, tables.csv, tables.md and tables.tex, and training.csv with the training logs."""
    home = Path(folder)
    content = json.dumps(tables.json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_text_atomically(home / "tables.json", content + "\n")
    write_text_atomically(home / "tables.csv", tables.csv())
    write_text_atomically(home / "tables.md", tables.markdown())
    write_text_atomically(home / "tables.tex", tables.latex())
    write_text_atomically(home / "training.csv", training_csv(runs))
    if any(run.answers for run in runs):
        write_text_atomically(home / "answers.csv", comparison_csv(runs))
