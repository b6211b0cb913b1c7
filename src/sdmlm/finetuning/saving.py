"""A `transformers.Trainer` whose checkpoints are complete or absent, and which writes `sdm/` with a saved model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning.final_layer import save_final_layer
from sdmlm.language_model.encoding import Encoder
from sdmlm.language_model.forward import inner_lm
from sdmlm.rewards import Reward
from sdmlm.storage.artifacts import SDM_FOLDER


class SavingTrainer(Trainer):  # type: ignore[misc]
    """The part of `SDMTrainer` that saves. `SDMTrainer` defines in `_save_state` what else a checkpoint holds."""

    estimator: SDMEstimator | None
    encoder: Encoder
    reward: Reward

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model (or adapter) and tokenizer as usual, with `sdm/` beside; in a checkpoint, what resuming needs."""
        folder = Path(output_dir or self.args.output_dir)
        if _internal_call:
            super().save_model(str(folder), _internal_call=True)
            if self.args.should_save:
                self._save_state(folder)
            return
        if self.is_fsdp_enabled:
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        weights = self._weights()
        try:
            super().save_model(str(folder), _internal_call=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise OSError(
                f"Could not save the model to {folder}: {error}. The trained model is still in memory and its best "
                f"checkpoint in {self.args.output_dir}: make room and call save_model again."
            ) from error
        if self.args.should_save:
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle; sdm/ holds the settings as JSON
            if self.estimator is not None:
                save_final_layer(
                    folder / SDM_FOLDER,
                    self.estimator,
                    weights,
                    self.encoder,
                    self.args,
                    self.reward,
                    final=self.final_layer,
                )
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="SDM language model")

    def _weights(self) -> dict[str, Tensor]:
        """The complete state dict of the LM; under FSDP all processes must call this."""
        if not self.is_fsdp_enabled:
            return dict(inner_lm(self.model).state_dict())
        full = self.accelerator.get_state_dict(self.model)
        return {name.removeprefix("base_model.model."): tensor for name, tensor in full.items()}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As in the base class. trainer_state.json is written last: a checkpoint that has it is complete."""
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)  # an older run's would mark new files as complete
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"Could not write {folder}: {error}. Earlier checkpoints are whole: make room and call "
                "train(resume_from_checkpoint=True)."
            ) from error

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # all processes' files are there before trainer_state.json is

    def _save_state(self, folder: Path) -> None:
        raise NotImplementedError

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Do not warn about the output embedding of a tied model: it is the input embedding, and never saved."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        load_result.missing_keys[:] = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result)
