"""What `sdmlm train` is to do: the settings of a run, its rows, and what is known before any weights are loaded."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.finetuning import recipe
from sdmlm.finetuning.processes import is_main_process
from sdmlm.language_model.loading import load_by_name, load_tokenizer, model_path
from sdmlm.storage.record import RECORD, halves, read_record

if TYPE_CHECKING:
    from sdmlm.finetuning.config import SDMConfig
    from sdmlm.language_model.encoding import Encoder
    from sdmlm.language_model.rows import PreferenceRow, PreferenceRows

OPTIONS = {
    "model": str,
    "data": str,
    "calibration": str,
    "output": str,
    "reward": str,
    "lora_r": int,
    "lora_alpha": float,
    # Only `sdmlm replicate` reads these; in a recipe they may stand all the same.
    "task": str,
    "tests": dict,
    "setting": str,
}
# Settings that a resumed run may change: they do not touch the weights.
_FREE = {
    "output", "data", "calibration", "task", "tests", "setting",
    "report_to", "run_name", "disable_tqdm", "save_total_limit", "dataloader_num_workers",
}  # fmt: skip
_FREE_KINDS = ("logging_", "log_", "hub_")


def is_free(name: str) -> bool:
    """Whether a setting may change without making another run of it; rows are known by their content."""
    return name in _FREE or name.startswith(_FREE_KINDS)


# Settings


def read_settings(args: argparse.Namespace, record: dict[str, Any] | None) -> tuple[dict[str, Any], SDMConfig]:
    """All that was asked for (of the command line, else of the recipe, else of the run to resume), and the config."""
    from sdmlm.finetuning.config import SDMConfig

    kinds = {**{name: kind | None for name, kind in OPTIONS.items()}, **recipe.field_types()}
    own = {name: value for name, value in vars(args).items() if name in kinds and value is not None}
    given = recipe.typed({**own, **recipe.read_options(args.more)}, kinds)
    if args.recipe:
        given = recipe.typed(recipe.read_recipe(args.recipe), kinds, args.recipe) | given
    before: dict[str, Any] = record["settings"] if record else {}
    for name, value in given.items():
        old = before.get(name, recipe.field_default(name))
        if record and value != old and not is_free(name):
            raise ValueError(f"{name} was {old!r} and is now {value!r}: --resume goes on with the settings of the run.")
    settings = before | given
    for name in ("model", "data", "output"):
        if settings.get(name) is None and not (name == "output" and args.dry_run):
            if args.resume and record is None and settings.get("output"):
                raise ValueError(f"{settings['output']} holds no run to resume: give --model and --data to begin one.")
            raise ValueError(f"--{name} is missing: give it, or a recipe that has it.")
    if settings.get("lora_r") is not None and settings["lora_r"] < 1:
        raise ValueError(f"lora_r is {settings['lora_r']} but must be at least 1.")
    if settings.get("lora_alpha") is not None and settings.get("lora_r") is None:
        raise ValueError("lora_alpha is given without lora_r, the rank of the adapters: give both, or neither.")
    if settings.get("lora_alpha") is not None and not settings["lora_alpha"] > 0:
        raise ValueError(f"lora_alpha is {settings['lora_alpha']} but must be above 0.")
    fields = {name: value for name, value in settings.items() if name not in OPTIONS}
    return settings, SDMConfig(**{"report_to": "none", **fields, "output_dir": settings.get("output")})


def record_to_resume(args: argparse.Namespace) -> dict[str, Any] | None:
    """The record of the run to resume; refuses an output folder that is not to be written to."""
    output = args.output
    if output is None and args.recipe:
        output = recipe.read_recipe(args.recipe).get("output")
    if output is None or (args.dry_run and not args.resume):
        return None
    folder = Path(str(output))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder to train into.")
    common.check_output_file(str(folder / RECORD))
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    record = None
    with contextlib.suppress(ValueError):  # a training.json of something else
        record = read_record(folder)
    if record is None:
        raise ValueError(f"{folder} holds something else than a training run of sdmlm: name another folder.")
    if not args.resume:
        raise ValueError(
            f"{folder} already holds a training run ({record['status']}): give --resume or another folder."
        )
    return record


# Rows


@dataclass
class Plan:
    """What is known before any weights are loaded."""

    settings: dict[str, Any]
    config: SDMConfig
    tokenizer: Any
    skeleton: Any  # the model without memory for its weights
    encoder: Encoder
    sources: list[PreferenceRows]
    train: list[PreferenceRow]
    calibration: list[PreferenceRow]
    data: dict[str, Any]  # about the rows, for the record
    resumed: bool


def make_plan(settings: dict[str, Any], config: SDMConfig, record: dict[str, Any] | None) -> Plan:
    """Read the rows, the tokenizer and the shapes of the model; refuses rows other than those of the run to resume."""
    from sdmlm.finetuning.final_layer import position_limit
    from sdmlm.language_model.encoding import Encoder
    from sdmlm.language_model.rows import read_preferences
    from sdmlm.rewards import check_reward, load_reward

    reward = load_reward(settings.get("reward"))
    sources = [read_preferences(settings["data"], config.tags())]
    if settings.get("calibration") is not None:
        sources.append(read_preferences(settings["calibration"], config.tags()))
        train, held = (source.rows for source in sources)
    else:
        train, held = halves(sources[0].rows, config.seed)
    for rows in (train, held):
        check_reward(reward, rows)
    data = {
        name: {"source": source.source, "sha256": source.sha256, "rows": len(source), "used": len(rows)}
        for name, source, rows in (("train", sources[0], train), ("calibration", sources[-1], held))
    }
    for name, facts in record["data"].items() if record else ():
        if (facts["sha256"], facts["used"]) != (data[name]["sha256"], data[name]["used"]):
            raise ValueError(
                f"The {name} rows ({data[name]['source']}) have changed since this run began: --resume needs the same."
            )
    tokenizer = load_tokenizer(settings["model"])
    skeleton = _skeleton(settings)
    limit = position_limit(skeleton, config.max_length)
    encoder = Encoder(tokenizer, config.tags(), limit, config.truncate_prompt)
    return Plan(settings, config, tokenizer, skeleton, encoder, sources, train, held, data, record is not None)


def announce(plan: Plan) -> None:
    """What a person should know about the rows."""
    if not is_main_process():
        return
    if len(plan.sources) == 1:
        common.warn(
            f"no --calibration: {plan.sources[0].source} is split at random (seed {plan.config.seed}), {len(plan.train)} "
            f"rows for training and {len(plan.calibration)} for calibration."
        )
    shared = len({_key(row) for row in plan.train} & {_key(row) for row in plan.calibration})
    if shared:
        common.warn(
            f"{shared} prompts stand both in the training and in the calibration rows: the calibration will look too good."
        )


def _key(row: PreferenceRow) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def _skeleton(settings: dict[str, Any]) -> Any:
    """The model on the meta device: its configuration and the shapes of its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(model_path(settings["model"]))
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter: merge it into its model first (peft: merge_and_unload).")
    config = load_by_name(AutoConfig.from_pretrained, settings["model"], "configuration")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ValueError(f"{settings['model']} is no causal language model that transformers knows.") from error
    if peft := lora(settings):
        from peft import get_peft_model

        model = get_peft_model(model, peft)
    return model


def lora(settings: dict[str, Any]) -> Any:
    """PEFT's configuration, if adapters are asked for. No dropout: it would cost a second pass each step."""
    if settings.get("lora_r") is None:
        return None
    from peft import LoraConfig

    rank = settings["lora_r"]
    scale = 2 * rank if settings.get("lora_alpha") is None else settings["lora_alpha"]
    return LoraConfig(r=rank, lora_alpha=scale, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
