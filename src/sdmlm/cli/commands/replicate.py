"""`sdmlm replicate`: fine-tune in several settings, evaluate, and make the paper's tables; goes on where it stopped."""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.finetuning import recipe
from sdmlm.finetuning.processes import is_main_process
from sdmlm.finetuning.settings import may_change_on_resume, read_settings, record_to_resume, setting_types
from sdmlm.language_model.loading import require_transformers
from sdmlm.storage.record import read_record

if TYPE_CHECKING:
    from sdmlm.finetuning.settings import RunSettings
    from sdmlm.language_model.rows import PreferenceRows

EXAMPLES = """\
  sdmlm replicate recipes/stories15m --output runs/stories15m --dry-run
  sdmlm replicate recipes/stories15m/ce_hn.yaml recipes/stories15m/sdm_hn.yaml --output runs/stories15m --seeds 0 1 2
  accelerate launch --num_processes 4 -m sdmlm.cli replicate recipes/phi-3.5-mini --output runs/phi-3.5-mini"""

WRITTEN = ("tables.csv", "tables.json", "tables.md", "tables.tex", "training.csv", "report.html")
_CONTENT = ("data", "calibration", "task", "tests")  # what two recipes of the same run share beside the settings


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "run recipes with all their seeds and test sets, and make the paper's tables"
    parser = common.add_command(subparsers, "replicate", help, EXAMPLES)
    parser.usage = "sdmlm replicate RECIPES... --output DIR [--seeds N ...] [--json] [--dry-run]"
    parser.add_argument("recipes", nargs="+", metavar="RECIPES", help="recipes (.yaml), or folders of them")
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="runs go to DIR/FOLDER-FILE/seed-N (of the recipe), tables to DIR",
    )
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="seeds of each recipe (default: its own)")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check recipes and rows, show what is left to do, stop")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Job:
    """One recipe with one seed."""

    recipe: Path
    seed: int
    settings: dict[str, Any]  # all that the recipe says, with this seed
    folder: Path

    @property
    def family(self) -> str:
        return self.recipe.absolute().parent.name

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}, seed {self.seed}"

    def run_settings(self, record: dict[str, Any] | None) -> RunSettings:
        """The settings of the training run."""
        own = {"output": str(self.folder), "reward": self.settings["reward"], "seed": self.seed}
        return read_settings(own, str(self.recipe), record, resume=True)

    def record(self) -> dict[str, Any] | None:
        return record_to_resume(self.folder, resume=True)

    def facts(self) -> dict[str, Any]:
        """What is written with every evaluation of this run."""
        label = self.settings.get("setting") or self.recipe.stem
        facts = {"family": self.family, "setting": self.recipe.stem, "label": label, "seed": self.seed}
        return {**facts, "task": self.settings["task"]}


def run(args: argparse.Namespace) -> None:
    """Everything is checked before the first run begins."""
    with common.main_process_errors():
        require_transformers()
        from sdmlm.storage.artifacts import locked

        jobs = _jobs(args)
        _check(jobs)
        _check_stored(jobs, args.output)
        if args.dry_run:
            _show_plan(args, jobs)
            return
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        for n, job in enumerate(jobs, start=1):
            with locked(job.folder, wait=False) if is_main_process() else contextlib.nullcontext(True) as ours:
                if not ours and not alone:
                    raise ValueError(f"{job.folder} is being worked on by another process: wait for it.")
                if not ours:
                    common.warn(f"[{n}/{len(jobs)}] {job.name}: left to the process that is at work on it.")
                    continue
                _train(job, f"[{n}/{len(jobs)}] {job.name}")
                if alone:
                    _evaluate(job, f"[{n}/{len(jobs)}] {job.name}")
        if not is_main_process():
            return  # what is left needs no other process
        if not alone:
            for n, job in enumerate(jobs, start=1):
                _evaluate(job, f"[{n}/{len(jobs)}] {job.name}")
        _report(args)


# What there is to do


def _jobs(args: argparse.Namespace) -> list[Job]:
    """Every recipe with every seed; recipes that come to the same run are run once."""
    output = Path(args.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file: name a folder for the runs.")
    if not any(output.glob("*/seed-*")) and any((output / name).exists() for name in WRITTEN):
        raise ValueError(f"{output} holds tables or a report, but no runs they could be of: give another --output.")
    common.check_output_file(str(output / WRITTEN[0]))
    if args.seeds is not None and (min(args.seeds) < 0 or len(set(args.seeds)) < len(args.seeds)):
        raise ValueError(f"--seeds is {' '.join(map(str, args.seeds))}: give whole numbers from 0 on, each once.")
    jobs: list[Job] = []
    for path in _recipes(args.recipes):
        settings = _settings(path)
        name = f"{path.absolute().parent.name}-{path.stem}"
        if any(job.folder.parent.name == name and job.recipe != path for job in jobs):
            raise ValueError(f"Two recipes would be run in {output / name}: rename {path} or its folder.")
        for seed in args.seeds or [settings["seed"]]:
            own = {**settings, "seed": seed}
            same = next((job for job in jobs if _difference(job.settings, own, _CONTENT) is None), None)
            if same is not None:
                if is_main_process():
                    common.warn(f"{path} with seed {seed} is the same run as {same.recipe}: left out.")
                continue
            jobs.append(Job(path, seed, own, output / name / f"seed-{seed}"))
    return jobs


def _recipes(given: list[str]) -> list[Path]:
    """The files, and in place of a folder the recipes in it, by the order of the paper's settings."""
    from sdmlm.experiments.runs import setting_order

    found: list[Path] = []
    for path in map(Path, given):
        if path.is_dir():
            inside = sorted(path.glob("*.yaml"), key=lambda p: setting_order(p.stem))
            if not inside:
                raise ValueError(f"{path} holds no recipe (.yaml).")
            found += inside
        elif not path.exists():
            raise ValueError(f"{path} does not exist: name a recipe (.yaml) or a folder of them.")
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def _settings(path: Path) -> dict[str, Any]:
    from sdmlm.experiments.evaluate import load_task

    settings = recipe.typed(recipe.read_recipe(str(path)), setting_types(), str(path))
    for name, what in (("model", "a model"), ("data", "rows"), ("task", "a task"), ("tests", "test sets")):
        if not settings.get(name):
            raise ValueError(f"{path} names no {name}: `sdmlm replicate` needs {what}.")
    for test, source in settings["tests"].items():
        if not isinstance(test, str) or not re.fullmatch(r"[\w-]+", test) or not isinstance(source, str):
            raise ValueError(f"{path}: tests must be `name: rows`, one a line, names of letters, digits, _ and -.")
    # The reward that judges the test sets is the one that the model is calibrated with.
    reward = settings.get("reward") or f"{load_task(settings['task']).__name__}:reward"
    return {"seed": recipe.field_default("seed"), **settings, "reward": reward}


def _difference(one: Mapping[str, Any], other: Mapping[str, Any], counted: Sequence[str] = ()) -> str | None:
    """The first setting in which two runs differ, of those that make a run another one or are `counted`."""
    for name in {**one, **other}:
        free = (may_change_on_resume(name) and name not in counted) or name.endswith(
            "_token"
        )  # no record keeps a token
        default = recipe.field_default(name)
        if not free and one.get(name, default) != other.get(name, default):
            return name
    return None


# Before anything is run


def _check(jobs: list[Job]) -> None:
    """Refuse folders of other runs, settings and rows that cannot be used, before hours of work; the same rows once."""
    from sdmlm.experiments.evaluate import check_test_rows, load_task
    from sdmlm.finetuning.layers import check_draws
    from sdmlm.finetuning.run import prepare_run
    from sdmlm.finetuning.training_rows import encode_rows
    from sdmlm.rewards import load_reward

    names = (
        *("model", "data", "calibration", "tests", "task", "reward"),
        *("max_length", "truncate_prompt", "verification_tags", "lora_r"),
    )
    seen: dict[str, tuple[int, int]] = {}  # numbers of rows to train and to calibrate on
    for job in jobs:
        record, task = job.record(), load_task(job.settings["task"])
        reward = load_reward(job.settings["reward"])
        if record is not None:
            _check_same(job, record)
        _check_others(job)
        if record is not None and record["status"] == "finished":
            for test in _left(job):
                check_test_rows(task, reward, (rows := _rows(job, test)).rows, rows.source)
            continue  # no more is needed than the model
        settings = job.run_settings(record)
        key = json.dumps([job.settings.get(name) for name in names])
        if key not in seen:
            run = prepare_run(settings, record)
            run.encoded()  # refuses rows that are too long
            tests = [_rows(job, test) for test in job.settings["tests"]]
            for source in tests:
                encode_rows(source.rows, run.encoder, source.source)
            for rows in tests:
                check_test_rows(task, reward, rows.rows, rows.source)
            seen[key] = run.data["train"]["used"], run.data["calibration"]["used"]
        check_draws(settings.config, *seen[key])


def _check_stored(jobs: Sequence[Job], output: str) -> None:
    """Refuse what could not stand in one table with the evaluations there: another alpha, another task or other test rows
    in a family."""
    from sdmlm.evaluation.lm_evaluation import EVALUATIONS, read_evaluation
    from sdmlm.experiments.runs import evaluated_task

    alphas = {float(job.settings.get("alpha", recipe.field_default("alpha"))) for job in jobs}
    sources = {(job.family, test): source for job in jobs for test, source in job.settings["tests"].items()}
    tasks = {job.family: job.settings["task"] for job in jobs}
    again = {job.folder for job in jobs}  # these are evaluated anew where the task is another one
    for folder in sorted(Path(output).glob("*/seed-*")):
        record = read_record(folder)
        for path in sorted((folder / EVALUATIONS).glob("*.json")):
            evaluation, facts = read_evaluation(path)
            alphas.add(evaluation.alpha)
            family = str(facts.get("family"))
            if (source := sources.get((family, path.stem))) is not None:
                _check_rows(folder, source, str(facts.get("rows_sha256")))
            if record is None or folder in again or family not in tasks:
                continue
            if (old := evaluated_task(facts, record)) != tasks[family]:
                raise ValueError(
                    f"{folder} was evaluated as {old}, not as {tasks[family]}: name its recipe and seed too, or give another "
                    "--output."
                )
    if len(alphas) > 1:
        shown = " and ".join(f"{alpha:g}" for alpha in sorted(alphas))
        raise ValueError(f"The runs in {output} would have alpha {shown}: one folder of tables needs one alpha.")


def _check_same(job: Job, record: dict[str, Any]) -> None:
    """Refuse to go on with a run of other settings or other rows."""
    name = _difference(record["settings"], job.settings)
    if name is not None:
        old, new = (s.get(name, recipe.field_default(name)) for s in (record["settings"], job.settings))
        if name == "reward" and old is None:
            raise ValueError(
                f"{job.folder} was calibrated by exact match, as recipes without a reward once were, and not by {new}. Give "
                "another --output."
            )
        raise ValueError(
            f"{job.folder} holds a run of another recipe: {name} was {old!r} and is {new!r} in {job.recipe}. Give "
            "another --output."
        )
    _check_trained(job, record, job.folder)


def _check_others(job: Job) -> None:
    """Refuse to put a run beside others of its setting that differ in more than the seed."""
    for folder in sorted(job.folder.parent.glob("seed-*")):
        if folder == job.folder or (record := read_record(folder)) is None:
            continue
        name = _difference({**record["settings"], "seed": job.seed}, job.settings)
        if name is not None:
            raise ValueError(
                f"{folder} is a run of another recipe ({name} differs from {job.recipe}): runs of one setting may differ in "
                "the seed alone. Give another --output."
            )
        _check_trained(job, record, folder)


def _check_trained(job: Job, record: dict[str, Any], folder: Path) -> None:
    data = job.settings["data"]
    for source, facts in (
        (data, record["data"]["train"]),
        (job.settings.get("calibration") or data, record["data"]["calibration"]),
    ):
        _check_rows(folder, source, facts["sha256"])


def _check_rows(folder: Path, source: str, sha256: str) -> None:
    path = Path(source)
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise ValueError(f"{folder} was made with other rows than {source} holds now. Give another --output.")


def _stored(job: Job, test: str) -> dict[str, Any] | None:
    """The facts of an evaluation that is there already."""
    from sdmlm.evaluation.lm_evaluation import evaluation_file, read_evaluation

    path = evaluation_file(job.folder, test)
    return read_evaluation(path)[1] if path.exists() else None


def _left(job: Job) -> list[str]:
    """The test sets on which the model of a finished run is still to be evaluated with its present SDM layer and task."""
    from sdmlm.experiments.runs import evaluated_task

    layer, record = _layer(job), job.record()

    def done(facts: Mapping[str, Any] | None) -> bool:
        if facts is None or record is None or facts.get("sdm_sha256") != layer:
            return False
        return evaluated_task(facts, record) == str(job.settings["task"])

    return [test for test in job.settings["tests"] if not done(_stored(job, test))]


def _layer(job: Job) -> str:
    from sdmlm.language_model.sdm_folder import layer_sha256
    from sdmlm.storage.artifacts import SDM_FOLDER

    return layer_sha256(job.folder / SDM_FOLDER)


def _show_plan(args: argparse.Namespace, jobs: list[Job]) -> None:
    rows: list[dict[str, Any]] = []
    for job in jobs:
        record = job.record()
        status = "to be trained" if record is None else "to be resumed" if record["status"] == "started" else "trained"
        left = _left(job) if status == "trained" else list(job.settings["tests"])
        rows.append(
            {"recipe": str(job.recipe), "seed": job.seed, "folder": str(job.folder), "model": status, "tests": left}
        )
    if args.json:
        common.print_json({"runs": rows})
        return
    table = common.rich_table(
        "Runs", ("folder", "seed", "model", "tests to do"), left=["folder", "model", "tests to do"]
    )
    for row in rows:
        table.add_row(row["folder"], str(row["seed"]), row["model"], ", ".join(row["tests"]) or "none")
    common.console(args).print(table)


# Running


def _train(job: Job, title: str) -> None:
    """Fine-tune unless that is done; the checkpoints of a finished run go."""
    from sdmlm.finetuning import run

    record = job.record()
    if record is None or record["status"] != "finished":
        if is_main_process():
            common.warn(f"{title}: {'training' if record is None else 'training goes on'}")
        try:
            run.train(run.prepare_run(job.run_settings(record), record), resume=True)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped; the same command goes on from the last checkpoint.") from None
        gc.collect()  # the trainer refers to itself
    if is_main_process():
        for folder in job.folder.glob("checkpoint-*"):
            shutil.rmtree(folder, ignore_errors=True)


def _evaluate(job: Job, title: str) -> None:
    """Generate for the test sets that are left, and keep what came of each."""
    from sdmlm.evaluation.lm_evaluation import evaluation_file, write_evaluation
    from sdmlm.experiments.evaluate import evaluate, load_task
    from sdmlm.generation.language_model import SDMLanguageModel

    left = _left(job)
    if not left:
        return
    device = "cpu" if job.settings.get("use_cpu") else None  # where it was trained
    lm, task = SDMLanguageModel.from_pretrained(job.folder, device=device), load_task(job.settings["task"])
    for test in left:
        rows = _rows(job, test)
        common.warn(f"{title}: {len(rows)} prompts of {test}")
        start = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):  # whatever a reward prints
            found = evaluate(lm, task, rows.rows, job.settings.get("reward"))
        source = {"test": test, "rows_source": rows.source, "rows_sha256": rows.sha256, "sdm_sha256": _layer(job)}
        facts = {**job.facts(), **source, "seconds": round(time.perf_counter() - start, 1)}
        write_evaluation(evaluation_file(job.folder, test), found, facts)


def _rows(job: Job, test: str) -> PreferenceRows:
    from sdmlm.language_model.rows import read_preferences

    return read_preferences(job.settings["tests"][test])


def _report(args: argparse.Namespace) -> None:
    """The tables over all that is finished in DIR, also by earlier calls and by other processes."""
    from sdmlm.experiments.runs import read_runs, training_csv
    from sdmlm.experiments.tables import tables
    from sdmlm.report.replication import write_report
    from sdmlm.storage.artifacts import write_text_atomically

    folder = Path(args.output)
    runs = read_runs(folder)
    if not runs:
        common.warn(f"{folder} has no finished run yet: other processes are at work on all of them.")
        if args.json:
            common.print_json({})
        return
    found = tables(runs)
    write_text_atomically(
        folder / "tables.json", json.dumps(found.json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    write_text_atomically(folder / "tables.csv", found.csv())
    write_text_atomically(folder / "tables.md", found.markdown())
    write_text_atomically(folder / "tables.tex", found.latex())
    write_text_atomically(folder / "training.csv", training_csv(runs))
    write_report(folder / "report.html", runs, found)
    if args.json:
        common.print_json(found.json())
        return
    out = common.console(args)
    for table in found.rich():
        out.print(table)
    for comparison in found.comparisons:
        out.print(comparison.statement(), markup=False)
    out.print(
        f"Written: {folder}/{', '.join(WRITTEN)} (every number by seed in the first two).", markup=False, soft_wrap=True
    )
