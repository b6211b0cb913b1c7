"""Checks before the first run starts, so that hours of work do not end in an avoidable error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdmlm.evaluation.lm_evaluation import EVALUATIONS, read_evaluation
from sdmlm.experiments.evaluate import check_test_rows, load_task
from sdmlm.experiments.planning import PlannedRun, first_difference
from sdmlm.experiments.runs import evaluated_task
from sdmlm.finetuning import recipe
from sdmlm.finetuning.settings import defaults_of
from sdmlm.storage.record import read_record


def check_runs(planned: list[PlannedRun]) -> None:
    """Refuse folders of other runs, and unusable settings or rows. Rows that several runs share are read once."""
    from sdmlm.finetuning.layers import check_draws
    from sdmlm.finetuning.run import prepare_run
    from sdmlm.finetuning.training_rows import encode_rows
    from sdmlm.rewards import load_reward

    names = (
        *("model", "data", "calibration", "tests", "task", "reward"),
        *("max_length", "truncate_prompt", "verification_tags", "lora_r"),
    )
    seen: dict[str, tuple[int, list[Any]]] = {}  # the number of rows to train on, the prompts to calibrate on
    for one in planned:
        record, task = one.record(), load_task(one.settings["task"])
        reward = load_reward(one.settings["reward"])
        if record is not None:
            _check_same(one, record)
        _check_others(one)
        if record is not None and record["status"] == "finished":
            for test in one.pending_tests():
                check_test_rows(task, reward, (rows := one.test_rows(test)).rows, rows.source)
            continue  # the model exists, so training needs no check
        settings = one.run_settings(record)
        key = json.dumps([one.settings.get(name) for name in names])
        if key not in seen:
            run = prepare_run(settings, record)
            run.encoded()  # refuses rows that are too long
            tests = [one.test_rows(test) for test in one.settings["tests"]]
            for source in tests:
                encode_rows(source.rows, run.encoder, source.source)
            for rows in tests:
                check_test_rows(task, reward, rows.rows, rows.source)
            seen[key] = run.data["train"]["used"], [row["prompt"] for row in run.calibration]
        check_draws(settings.config, *seen[key])


def check_stored(planned: Sequence[PlannedRun], folder: str | Path) -> None:
    """Refuse runs that cannot be in one table with the stored evaluations: they have another alpha, or, within a family,
    another task or other test rows."""
    alphas = {float(one.settings.get("alpha", recipe.field_default("alpha"))) for one in planned}
    sources = {(one.family, test): source for one in planned for test, source in one.settings["tests"].items()}
    tasks = {one.family: one.settings["task"] for one in planned}
    again = {one.folder for one in planned}  # evaluated again if the task has changed
    for home in sorted(Path(folder).glob("*/seed-*")):
        record = read_record(home)
        for path in sorted((home / EVALUATIONS).glob("*.json")):
            evaluation, metadata = read_evaluation(path)
            alphas.add(evaluation.alpha)
            family = str(metadata.get("family"))
            if (source := sources.get((family, path.stem))) is not None:
                _check_rows(home, source, str(metadata.get("rows_sha256")))
            if record is None or home in again or family not in tasks:
                continue
            if (old := evaluated_task(metadata, record)) != tasks[family]:
                raise ValueError(
                    f"{home} was evaluated as {old}, not as {tasks[family]}: name its recipe and seed too, or give another "
                    "--output."
                )
    if len(alphas) > 1:
        shown = " and ".join(f"{alpha:g}" for alpha in sorted(alphas))
        raise ValueError(f"The runs in {folder} would have alpha {shown}: one folder of tables needs one alpha.")


def _check_same(one: PlannedRun, record: dict[str, Any]) -> None:
    """Refuse to continue a run of other settings or other rows."""
    before = defaults_of(record) | record["settings"]
    name = first_difference(before, one.settings)
    if name is not None:
        old, new = (s.get(name, recipe.field_default(name)) for s in (before, one.settings))
        if name == "reward" and old is None:
            raise ValueError(
                f"{one.folder} was calibrated by exact match, as recipes without a reward once were, and not by {new}. Give "
                "another --output."
            )
        raise ValueError(
            f"{one.folder} holds a run of another recipe: {name} was {old!r} and is {new!r} in {one.recipe}. Give "
            "another --output."
        )
    _check_trained(one, record, one.folder)


def _check_others(one: PlannedRun) -> None:
    """Refuse a run if other runs of its setting differ in more than the seed."""
    for folder in sorted(one.folder.parent.glob("seed-*")):
        if folder == one.folder or (record := read_record(folder)) is None:
            continue
        name = first_difference({**defaults_of(record), **record["settings"], "seed": one.seed}, one.settings)
        if name is not None:
            raise ValueError(
                f"{folder} is a run of another recipe ({name} differs from {one.recipe}): runs of one setting may differ in "
                "the seed alone. Give another --output."
            )
        _check_trained(one, record, folder)


def _check_trained(one: PlannedRun, record: dict[str, Any], folder: Path) -> None:
    data = one.settings["data"]
    for source, metadata in (
        (data, record["data"]["train"]),
        (one.settings.get("calibration") or data, record["data"]["calibration"]),
    ):
        _check_rows(folder, source, metadata["sha256"])


def _check_rows(folder: Path, source: str, sha256: str) -> None:
    path = Path(source)
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise ValueError(f"{folder} was made with other rows than {source} holds now. Give another --output.")
