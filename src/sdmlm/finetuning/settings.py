"""The settings of a training run, from the command line, a recipe and an earlier run, as one typed object."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm.finetuning import recipe
from sdmlm.storage.output_paths import check_output_file
from sdmlm.storage.record import RECORD, read_record

if TYPE_CHECKING:
    from sdmlm.finetuning.config import SDMConfig

# The settings of a run that are not fields of SDMConfig.
OPTIONS = {
    "model": str,
    "data": str,
    "calibration": str,
    "output": str,
    "reward": str,
    "lora_r": int,
    "lora_alpha": float,
    # Only `sdmlm replicate` reads these. `sdmlm train` accepts them, so that both take the same recipes.
    "task": str,
    "tests": dict,
    "setting": str,
}
# A resumed run may change these: they do not influence the weights. Rows are compared by content, not by path.
MAY_CHANGE_ON_RESUME = {
    "output", "data", "calibration", "task", "tests", "setting",
    "report_to", "run_name", "disable_tqdm", "save_total_limit", "dataloader_num_workers",
}  # fmt: skip
# Defaults of older versions, which a run that was begun with them keeps when it is resumed.
OLD_DEFAULTS = {"loss": "sdm", "gamma_other": 0.0, "documents": "paper", "summary": "states"}
_MAY_CHANGE_PREFIXES = ("logging_", "log_", "hub_")


def defaults_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that a recorded run was begun with, where versions differ in them."""
    return {name: record["config"].get(name, old) for name, old in OLD_DEFAULTS.items()}


def may_change_on_resume(name: str) -> bool:
    """Whether a resumed run may have another value of this setting."""
    return name in MAY_CHANGE_ON_RESUME or name.startswith(_MAY_CHANGE_PREFIXES)


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run.

    `values` holds the settings that were given, by name, as training.json records them. `config` holds all fields of
    `SDMConfig`, with defaults.
    """

    values: dict[str, Any]
    config: SDMConfig

    @property
    def model(self) -> str:
        return str(self.values["model"])

    @property
    def data(self) -> str:
        return str(self.values["data"])

    @property
    def calibration(self) -> str | None:
        return self.values.get("calibration")

    @property
    def output(self) -> Path:
        return Path(self.values["output"])

    @property
    def reward(self) -> str | None:
        return self.values.get("reward")

    def lora(self) -> Any:
        """PEFT's configuration; None for training all weights. No dropout, which would need a second pass in each step."""
        rank, scale = self.values.get("lora_r"), self.values.get("lora_alpha")
        if rank is None:
            return None
        from peft import LoraConfig

        return LoraConfig(
            r=rank,
            lora_alpha=2 * rank if scale is None else scale,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )


def setting_types() -> dict[str, Any]:
    """The type of every setting of a run, by name."""
    return {**{name: kind | None for name, kind in OPTIONS.items()}, **recipe.field_types()}


def read_settings(
    given: Mapping[str, Any],
    recipe_file: str | None = None,
    record: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    needs_output: bool = True,
) -> RunSettings:
    """The settings of a run. `given` wins over the recipe, and both over the `record` of the run to resume.

    Values in `given` may be text, as on the command line. A resumed run refuses changes of settings that influence the
    weights.
    """
    from sdmlm.finetuning.config import SDMConfig

    types = setting_types()
    asked = recipe.typed(given, types)
    if recipe_file:
        asked = recipe.typed(recipe.read_recipe(recipe_file), types, recipe_file) | asked
    before: dict[str, Any] = record["settings"] if record else {}
    begun_with = defaults_of(record) if record else {}
    for name, value in asked.items():
        old = before.get(name, begun_with.get(name, recipe.field_default(name)))
        if record and value != old and not may_change_on_resume(name):
            raise ValueError(f"{name} was {old!r} and is now {value!r}: --resume goes on with the settings of the run.")
    values = before | asked
    _check_required(values, resume and record is None, needs_output)
    _check_lora(values)
    fields = begun_with | {name: value for name, value in values.items() if name not in OPTIONS}
    return RunSettings(values, SDMConfig(**{"report_to": "none", **fields, "output_dir": values.get("output")}))


def _check_required(values: Mapping[str, Any], nothing_to_resume: bool, needs_output: bool) -> None:
    for name in ("model", "data", "output"):
        if values.get(name) is not None or (name == "output" and not needs_output):
            continue
        if nothing_to_resume and values.get("output"):
            raise ValueError(f"{values['output']} holds no run to resume: give --model and --data to begin one.")
        raise ValueError(f"--{name} is missing: give it, or a recipe that has it.")


def _check_lora(values: Mapping[str, Any]) -> None:
    rank, scale = values.get("lora_r"), values.get("lora_alpha")
    if rank is not None and rank < 1:
        raise ValueError(f"lora_r is {rank} but must be at least 1.")
    if scale is not None and rank is None:
        raise ValueError("lora_alpha is given without lora_r, the rank of the adapters: give both, or neither.")
    if scale is not None and not scale > 0:
        raise ValueError(f"lora_alpha is {scale} but must be above 0.")


def record_to_resume(output: str | Path | None, resume: bool) -> dict[str, Any] | None:
    """The record of the run in an output folder, None for a new run; refuses a folder that must not be written to."""
    if output is None:
        return None
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder to train into.")
    check_output_file(folder / RECORD)
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    record = None
    with contextlib.suppress(ValueError):  # a training.json of another program
        record = read_record(folder)
    if record is None:
        raise ValueError(f"{folder} holds something else than a training run of sdmlm: name another folder.")
    if not resume:
        raise ValueError(
            f"{folder} already holds a training run ({record['status']}): give --resume or another folder."
        )
    return record
