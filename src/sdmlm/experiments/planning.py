"""The runs that recipes and seeds ask for: their settings, their folders, and what is left to do for each."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm.evaluation.lm_evaluation import evaluation_file, read_evaluation
from sdmlm.experiments.evaluate import load_task
from sdmlm.experiments.runs import evaluated_task, setting_order
from sdmlm.finetuning import recipe
from sdmlm.finetuning.settings import may_change_on_resume, read_settings, record_to_resume, setting_types
from sdmlm.storage.artifacts import SDM_FOLDER
from sdmlm.storage.output_paths import check_output_file

if TYPE_CHECKING:
    from sdmlm.finetuning.settings import RunSettings
    from sdmlm.language_model.rows import PreferenceRows

WRITTEN = ("tables.csv", "tables.json", "tables.md", "tables.tex", "training.csv", "report.html")
_CONTENT = ("data", "calibration", "task", "tests")  # recipes are of the same run only if these are equal too


@dataclass(frozen=True)
class PlannedRun:
    """One recipe with one seed, and the folder that its run goes to."""

    recipe: Path
    seed: int
    settings: dict[str, Any]  # everything in the recipe, with this seed
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

    def metadata(self) -> dict[str, Any]:
        """The metadata stored with every evaluation of this run."""
        label = self.settings.get("setting") or self.recipe.stem
        names = {"family": self.family, "setting": self.recipe.stem, "label": label, "seed": self.seed}
        return {**names, "task": self.settings["task"]}

    def test_rows(self, test: str) -> PreferenceRows:
        """The rows of a test set."""
        from sdmlm.language_model.rows import read_preferences

        return read_preferences(self.settings["tests"][test])

    def layer_sha256(self) -> str:
        """The hash of the SDM layer that the run has now."""
        from sdmlm.language_model.sdm_folder import layer_sha256

        return layer_sha256(self.folder / SDM_FOLDER)

    def pending_tests(self) -> list[str]:
        """The test sets on which a finished run must still be evaluated with its present SDM layer and task."""
        layer, record = self.layer_sha256(), self.record()

        def done(test: str) -> bool:
            path = evaluation_file(self.folder, test)
            metadata = read_evaluation(path)[1] if path.exists() else {}
            if record is None or metadata.get("sdm_sha256") != layer:
                return False
            return evaluated_task(metadata, record) == str(self.settings["task"])

        return [test for test in self.settings["tests"] if not done(test)]

    def status(self) -> dict[str, Any]:
        """What is left to do, for a dry run."""
        record = self.record()
        model = "to be trained" if record is None else "to be resumed" if record["status"] == "started" else "trained"
        tests = self.pending_tests() if model == "trained" else list(self.settings["tests"])
        return {
            "recipe": str(self.recipe),
            "seed": self.seed,
            "folder": str(self.folder),
            "model": model,
            "tests": tests,
        }


def plan_runs(recipes: Sequence[str], folder: str | Path, seeds: Sequence[int] | None) -> list[PlannedRun]:
    """Every recipe with every seed (default: the recipe's own). If two recipes ask for the same run, one is left out."""
    output = Path(folder)
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file: name a folder for the runs.")
    if not any(output.glob("*/seed-*")) and any((output / name).exists() for name in WRITTEN):
        raise ValueError(f"{output} holds tables or a report, but no runs they could be of: give another --output.")
    check_output_file(output / WRITTEN[0])
    if seeds is not None and (min(seeds) < 0 or len(set(seeds)) < len(seeds)):
        raise ValueError(f"--seeds is {' '.join(map(str, seeds))}: give whole numbers from 0 on, each once.")
    planned: list[PlannedRun] = []
    for path in _recipe_files(recipes):
        settings = _settings(path)
        name = f"{path.absolute().parent.name}-{path.stem}"
        if any(one.folder.parent.name == name and one.recipe != path for one in planned):
            raise ValueError(f"Two recipes would be run in {output / name}: rename {path} or its folder.")
        for seed in seeds or [settings["seed"]]:
            own = {**settings, "seed": seed}
            same = next((one for one in planned if first_difference(one.settings, own, _CONTENT) is None), None)
            if same is not None:
                warnings.warn(f"{path} with seed {seed} is the same run as {same.recipe}: left out.", stacklevel=2)
                continue
            planned.append(PlannedRun(path, seed, own, output / name / f"seed-{seed}"))
    return planned


def _recipe_files(given: Sequence[str]) -> list[Path]:
    """The files; a folder stands for the recipes in it, in the order of the paper's settings."""
    files: list[Path] = []
    for path in map(Path, given):
        if path.is_dir():
            inside = sorted(path.glob("*.yaml"), key=lambda p: setting_order(p.stem))
            if not inside:
                raise ValueError(f"{path} holds no recipe (.yaml).")
            files += inside
        elif not path.exists():
            raise ValueError(f"{path} does not exist: name a recipe (.yaml) or a folder of them.")
        else:
            files.append(path)
    return list(dict.fromkeys(files))


def _settings(path: Path) -> dict[str, Any]:
    """The settings of a recipe; refused if one that `sdmlm replicate` needs is missing."""
    settings = recipe.typed(recipe.read_recipe(str(path)), setting_types(), str(path))
    for name, what in (("model", "a model"), ("data", "rows"), ("task", "a task"), ("tests", "test sets")):
        if not settings.get(name):
            raise ValueError(f"{path} names no {name}: `sdmlm replicate` needs {what}.")
    for test, source in settings["tests"].items():
        if not isinstance(test, str) or not re.fullmatch(r"[\w-]+", test) or not isinstance(source, str):
            raise ValueError(f"{path}: tests must be `name: rows`, one a line, names of letters, digits, _ and -.")
    # The model is calibrated with the same reward that judges the test sets.
    reward = settings.get("reward") or f"{load_task(settings['task']).__name__}:reward"
    return {"seed": recipe.field_default("seed"), **settings, "reward": reward}


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any], counted: Sequence[str] = ()) -> str | None:
    """The first setting in which two runs differ, without settings that a resumed run may change, except those in `counted`."""
    one, other = _with_summary(one), _with_summary(other)
    for name in {**one, **other}:
        # No record keeps a token, so tokens cannot be compared.
        free = (may_change_on_resume(name) and name not in counted) or name.endswith("_token")
        default = recipe.field_default(name)
        if not free and one.get(name, default) != other.get(name, default):
            return name
    return None


def _with_summary(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the summary that goes with their documents, if they name none."""
    from sdmlm.language_model.likelihood import default_summary

    documents = settings.get("documents", recipe.field_default("documents"))
    return {**settings, "summary": settings.get("summary") or default_summary(documents)}
