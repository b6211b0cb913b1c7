"""One training run from its settings to a saved SDM language model: for `sdmlm train`, its dry run and `replicate`."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sdmlm import __version__
from sdmlm.estimator.calibration_summary import highest_alpha_with_region, summarize_calibration
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning.config import LAYER_FIELDS, SDMConfig
from sdmlm.finetuning.final_layer import answers_metadata, certificate_summary
from sdmlm.finetuning.layers import position_limit
from sdmlm.finetuning.processes import is_main_process
from sdmlm.finetuning.settings import RunSettings
from sdmlm.finetuning.trainer import SDMTrainer
from sdmlm.finetuning.training_rows import TrainingRow, encode_rows
from sdmlm.language_model.answer_rule import load_certificate
from sdmlm.language_model.encoding import Encoder, VerificationTags
from sdmlm.language_model.loading import load_by_name, load_lm, load_tokenizer, model_path
from sdmlm.language_model.rows import PreferenceRow, PreferenceRows, prompt_key, read_preferences
from sdmlm.rewards import Reward, check_reward, load_reward
from sdmlm.storage.artifacts import SDM_FOLDER, write_text_atomically
from sdmlm.storage.plain_json import plain_json
from sdmlm.storage.record import RECORD, halves

# Below this, learning rate x steps can hardly change a model: AdamW moves a weight by at most about the learning rate
# in each step, and the weights of a small model are some hundredths.
SMALLEST_MOVE = 0.005
LARGE_MODEL = 1_000_000_000  # parameters; so large a model may need much smaller moves


@dataclass
class TrainingRun:
    """All that is known about a run before weights are loaded. `prepare_run` makes one.

    `sources` holds the rows of each file, `data` describes them for training.json. `skeleton` is the model without
    memory for its weights.
    """

    settings: RunSettings
    tokenizer: Any
    skeleton: Any
    encoder: Encoder
    reward: Reward
    sources: list[PreferenceRows]
    data: dict[str, dict[str, Any]]
    resumed: bool
    _encoded: list[list[TrainingRow]] | None = field(default=None, repr=False)

    @property
    def config(self) -> SDMConfig:
        return self.settings.config

    @property
    def train(self) -> list[PreferenceRow]:
        """The rows to train on."""
        return self._split([source.rows for source in self.sources])[0]

    @property
    def calibration(self) -> list[PreferenceRow]:
        """The calibration rows."""
        return self._split([source.rows for source in self.sources])[1]

    def encoded(self) -> tuple[list[TrainingRow], list[TrainingRow]]:
        """The rows to train and to calibrate on, encoded once. A row that is too long is an error that names its number."""
        if self._encoded is None:
            self._encoded = [encode_rows(source.rows, self.encoder, source.source) for source in self.sources]
        return self._split(self._encoded)

    def _split(self, sources: list[list[Any]]) -> tuple[list[Any], list[Any]]:
        if len(sources) == 2:
            return sources[0], sources[1]
        return halves(sources[0], self.config.seed)

    def steps(self) -> dict[str, int]:
        """Batch size and numbers of steps, as SDMTrainer counts them, and the expected generations per epoch."""
        config, n = self.config, self.data["train"]["used"]
        documents = config.train_batch_size * config.world_size
        batches = n // documents if config.dataloader_drop_last else -(-n // documents)
        per_epoch = max(1, -(-batches // config.gradient_accumulation_steps))
        total = config.max_steps if config.max_steps > 0 else -(-per_epoch * config.num_train_epochs // 1)
        chance = (1 - config.gamma_plus) * config.gamma_gen * config.gamma_diversity * config.hard_negatives
        return {
            "batch": documents * config.gradient_accumulation_steps,
            "per_epoch": per_epoch,
            "total": int(total),
            "generations_per_epoch": round(n * chance),
        }

    def parameters(self) -> int:
        """The number of weights of the model."""
        return sum(parameter.numel() for parameter in self.skeleton.parameters())


# Before training


def prepare_run(settings: RunSettings, record: Mapping[str, Any] | None = None) -> TrainingRun:
    """Read and check the rows, the reward, the tokenizer and the shapes of the model; no weights are loaded.

    `record` is that of the run to resume; other rows than its own are refused.
    """
    config = settings.config
    reward = load_reward(settings.reward)
    sources = [read_preferences(settings.data, config.tags())]
    if settings.calibration is not None:
        sources.append(read_preferences(settings.calibration, config.tags()))
    used = [len(source) for source in sources]
    if len(sources) == 1:
        used = [len(part) for part in halves(sources[0].rows, config.seed)]
    for source in sources:
        check_reward(reward, source.rows)
    data = {
        name: {"source": source.source, "sha256": source.sha256, "rows": len(source), "used": n}
        for name, source, n in (("train", sources[0], used[0]), ("calibration", sources[-1], used[1]))
    }
    for name, before in record["data"].items() if record else ():
        if (before["sha256"], before["used"]) != (data[name]["sha256"], data[name]["used"]):
            raise ValueError(
                f"The {name} rows ({data[name]['source']}) have changed since this run began: --resume needs the same."
            )
    tokenizer = load_tokenizer(settings.model)
    skeleton = _skeleton(settings)
    limit = position_limit(skeleton, config.max_length)
    encoder = Encoder(tokenizer, config.tags(), limit, config.truncate_prompt)
    return TrainingRun(settings, tokenizer, skeleton, encoder, reward, sources, data, record is not None)


def _skeleton(settings: RunSettings) -> Any:
    """The model on the meta device: its configuration and the shapes of its weights."""
    folder = Path(model_path(settings.model))
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter: merge it into its model first (peft: merge_and_unload).")
    config = load_by_name(AutoConfig.from_pretrained, settings.model, "configuration")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ValueError(f"{settings.model} is no causal language model that transformers knows.") from error
    if adapter := settings.lora():
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    return model


def warn_about(run: TrainingRun) -> None:
    """Warn about rows and settings that are allowed but probably not meant."""
    if not is_main_process():
        return
    train, calibration, config = run.train, run.calibration, run.config
    if len(run.sources) == 1:
        warnings.warn(
            f"no --calibration: {run.sources[0].source} is split at random (seed {config.seed}), {len(train)} rows for "
            f"training and {len(calibration)} for calibration.",
            stacklevel=2,
        )
    shared = len({prompt_key(row["prompt"]) for row in train} & {prompt_key(row["prompt"]) for row in calibration})
    if shared:
        warnings.warn(
            f"{shared} prompts stand both in the training and in the calibration rows: the calibration will look too good.",
            stacklevel=2,
        )
    layers = [name for name in run.settings.values if name in LAYER_FIELDS.values() and name != "alpha"]
    if layers and (config.loss, config.documents) == ("ce", "own"):
        warnings.warn(
            f"{', '.join(layers)} changes nothing here: with cross-entropy no SDM layer is fitted while training, and the one over "
            "own answers is fitted automatically.",
            stacklevel=2,
        )
    steps = run.steps()["total"]
    all_weights = run.settings.lora() is None
    if 0 < config.learning_rate * steps < SMALLEST_MOVE and all_weights and run.parameters() < LARGE_MODEL:
        warnings.warn(
            f"{steps} steps at a learning rate of {config.learning_rate:g} will hardly change this model (their product "
            f"is below {SMALLEST_MOVE:g}): try --learning-rate {_suggested_rate(steps):g}, more --num-train-epochs, or "
            "smaller batches, which make more steps.",
            stacklevel=2,
        )


def _suggested_rate(steps: int) -> float:
    """The smallest of some usual rates that is not too small for so few steps."""
    return next((rate for rate in (1e-4, 2e-4, 5e-4, 1e-3) if rate * steps >= 2 * SMALLEST_MOVE), 1e-3)


# Training


def train(run: TrainingRun, resume: bool = False) -> dict[str, Any]:
    """Train, save the model and training.json, and return the summary; with `resume` from the newest checkpoint."""
    settings, config = run.settings, run.config
    training, calibration = run.encoded()
    model = load_lm(settings.model, torch.float32)
    try:
        trainer = SDMTrainer(model, config, training, calibration, run.tokenizer, run.reward, settings.lora())
    except (RuntimeError, ImportError) as error:  # of transformers: a logger that is not installed, for instance
        raise ValueError(
            f"Training cannot begin: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error
    warn_about(run)
    trainer.accelerator.wait_for_everyone()  # every process has looked at the folder: now it may be written to
    if is_main_process() and not run.resumed:
        _write_record(run, "started", trainer, None)
    with contextlib.redirect_stdout(sys.stderr):  # logs, and what a reward may print; stdout is for the summary
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(settings.output))
    summary = _summary(run, trainer)
    if is_main_process():
        _write_record(run, "finished", trainer, summary)
    return summary


def _summary(run: TrainingRun, trainer: SDMTrainer) -> dict[str, Any]:
    assert trainer.estimator is not None
    state = trainer.state
    at_best = [entry for entry in state.log_history if entry["step"] == state.best_global_step and "eval_loss" in entry]
    best: dict[str, Any] = at_best[-1] if at_best else {}
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    return {
        "output": str(run.settings.output),
        "model": run.settings.model,
        "steps": state.global_step,
        "best": {"loss": best.get("eval_loss"), "step": best.get("step"), "epoch": best.get("epoch")},
        "training_loss": {"first": losses[0], "last": losses[-1]} if losses else None,
        "answers": answers_metadata(trainer.calibration_answers),
        "certificate": certificate_summary(None if trainer.final_layer is None else trainer.final_layer.certificate),
        "data": run.data,
        **layer_summary(trainer.estimator, run.config.tags()),
    }


def _write_record(run: TrainingRun, status: str, trainer: SDMTrainer, summary: dict[str, Any] | None) -> None:
    """Write training.json: the settings, the rows and the results. Access tokens are left out."""
    record = {
        "format_version": 1,
        "sdmlm_version": __version__,
        "status": status,
        "settings": {name: value for name, value in run.settings.values.items() if not name.endswith("_token")},
        "data": run.data,
        "config": trainer.args.to_dict(),
        "summary": summary,
        "log_history": [] if summary is None else trainer.state.log_history,
    }
    text = json.dumps(plain_json(record), indent=1, ensure_ascii=False, allow_nan=False)
    write_text_atomically(run.settings.output / RECORD, text + "\n")


def finished_summary(record: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """The recorded summary of a finished run, updated to the SDM layer that is in its folder now.

    `sdmlm calibrate` may have replaced the layer since.
    """
    config = SDMConfig(output_dir=None, report_to="none", verification_tags=record["config"]["verification_tags"])
    layer, certificate = SDMEstimator.from_pretrained(output / SDM_FOLDER), load_certificate(output / SDM_FOLDER)
    if certificate is not None and certificate.rule.estimator != layer.digest():
        certificate = None  # of another layer
    certified = {"certificate": certificate_summary(certificate)}
    return {**record["summary"], **certified, **layer_summary(layer, config.tags())}


def layer_summary(layer: SDMEstimator, tags: VerificationTags) -> dict[str, Any]:
    """Measures of the SDM layer of a language model over its calibration half; the classes are named by the verdicts."""
    return {
        **summarize_calibration(layer).to_dict([tags.no, tags.yes]),
        "highest_alpha": highest_alpha_with_region(layer),
        "rounds": layer.rounds,
        "support": len(layer.support_ids_),
    }
