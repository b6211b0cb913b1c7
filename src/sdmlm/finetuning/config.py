"""SDMConfig: the options of SDM fine-tuning, on top of `transformers.TrainingArguments`.

The defaults are the paper's (spec section 7). Loss and hard negatives are two switches; their four combinations are its
four fine-tuned settings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from sdmlm.errors import BadSetting
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.validation import check_parameters
from sdmlm.finetuning.negatives import NegativePolicy, check_generations
from sdmlm.language_model.encoding import VerificationTags

# Which field holds a parameter of the `SDMEstimator` of each SDM layer
LAYER_FIELDS = {
    "alpha": "alpha",
    "exemplar_dim": "exemplar_dim",
    **{name: f"sdm_{name}" for name in ("epochs", "batch_size", "learning_rate", "rounds", "center")},
}


_BY_CLASS = ("sdm_loss", "sdm_accuracy", "mean_q")
# Of an evaluation, to choose a checkpoint by; with loss="ce" only the first. Not psi, which is infinite without a region.
METRICS = ("loss", "sdm_loss", "q_min", "admitted", *(f"{name}_{c}" for name in _BY_CLASS for c in (0, 1)))


@dataclass
class SDMConfig(TrainingArguments):  # type: ignore[misc]
    """Options of `SDMTrainer`; everything of `TrainingArguments` is there too."""

    # TrainingArguments with the paper's values
    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate of AdamW."})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay of AdamW."})
    num_train_epochs: float = field(default=10, metadata={"help": "Epochs over the training rows."})
    warmup_steps: float = field(
        default=0.1, metadata={"help": "Warm-up, as a share of all steps (below 1) or in steps."}
    )
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Documents a device and micro-step."})
    gradient_accumulation_steps: int = field(default=8, metadata={"help": "8 x 8 = the paper's batch of 64."})
    bf16: bool | None = field(default=None, metadata={"help": "bfloat16 autocast; default: where a GPU has it."})  # type: ignore[assignment]
    eval_strategy: str = field(default="epoch", metadata={"help": '"epoch": in the middle and at the end of each.'})
    save_strategy: str = field(default="epoch", metadata={"help": "Checkpoints are kept where evaluation runs."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept, the best always."})
    load_best_model_at_end: bool = field(default=True, metadata={"help": "End with the checkpoint of the lowest loss."})
    metric_for_best_model: str | None = field(default="loss", metadata={"help": "The next-token loss over D_ca."})
    greater_is_better: bool | None = field(default=None, metadata={"help": "Default: not for losses and q_min."})
    remove_unused_columns: bool | None = field(default=False, metadata={"help": "Extra columns go to the reward."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps."})

    # The method
    loss: str = field(default="sdm", metadata={"help": '"sdm" (Eq. 1 of the paper) or "ce" (cross-entropy: base e).'})
    hard_negatives: bool = field(default=True, metadata={"help": "Generate negatives online, from the second epoch."})
    gamma_plus: float = field(default=0.5, metadata={"help": "Probability that a prompt stands with its positive."})
    gamma_gen: float = field(default=0.5, metadata={"help": "Probability that a negative is generated."})
    gamma_diversity: float = field(default=0.5, metadata={"help": "Probability that a generated negative is used."})
    temperature: float = field(default=0.0, metadata={"help": "Of the generation of negatives; 0 is greedy."})
    num_generations: int = field(default=1, metadata={"help": "Tries for a negative a prompt (needs a temperature)."})
    max_new_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Bound of a generation; default: the longest completion of the data, its verdict, and 8 more."
        },
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Bound of prompt and completion in tokens; default: the model's positions."}
    )
    truncate_prompt: bool = field(
        default=False, metadata={"help": "Cut prompts that are too long on the left; otherwise such rows are refused."}
    )
    verification_tags: dict[str, str] | str | None = field(
        default=None, metadata={"help": "Changes to VerificationTags, as JSON: open, close, yes, no, separator."}
    )
    tokens_per_batch: int = field(
        default=8192, metadata={"help": "Padded tokens a batch where nothing is trained: generation, summaries."}
    )

    # The SDM layers
    alpha: float = field(default=0.95, metadata={"help": "Accuracy that the accepted are to have, in (0.5, 1]."})
    exemplar_dim: int = field(default=1000, metadata={"help": "M: the width of the exemplar vectors."})
    sdm_epochs: int = field(default=200, metadata={"help": "Epochs of an SDM layer."})
    sdm_batch_size: int = field(default=50, metadata={"help": "Batch size of an SDM layer."})
    sdm_learning_rate: float = field(default=1e-5, metadata={"help": "Adam learning rate of an SDM layer."})
    sdm_rounds: int = field(default=1, metadata={"help": "J: rounds of an SDM layer."})
    sdm_center: str = field(default="global", metadata={"help": 'How h is standardised: "global" or "feature".'})

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported() and not self.fp16
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # torch would warn at every epoch that there is nothing to pin for
        if self.loss not in ("sdm", "ce"):
            raise ValueError(f'loss is {self.loss!r} but must be "sdm" or "ce".')
        self._check_best()
        super().__post_init__()
        self._check_numbers()
        self._check_estimator()
        NegativePolicy(self.gamma_plus, self.gamma_gen, self.gamma_diversity)  # refuses what is no probability
        if not 0 < self.gamma_plus < 1:
            raise ValueError("gamma_plus must be between 0 and 1: the SDM layers need positives and negatives.")
        self.tags()

    def _check_best(self) -> None:
        """The metric that picks the checkpoint: one that evaluations have, and whether more of it is better."""
        name = (self.metric_for_best_model or "loss").removeprefix("eval_")
        known = METRICS if self.loss == "sdm" else METRICS[:1]
        if name not in known:
            raise ValueError(
                f"metric_for_best_model is {name!r} but an evaluation with loss {self.loss!r} has {', '.join(known)}."
            )
        if self.greater_is_better is None:
            self.greater_is_better = "loss" not in name and name != "q_min"

    def _check_numbers(self) -> None:
        """What `TrainingArguments` lets through, and would fail or do nothing with later."""
        for name, neutral in (("label_smoothing_factor", 0.0), ("train_sampling_strategy", "random")):
            if getattr(self, name) != neutral:
                raise ValueError(f"{name} is {getattr(self, name)!r} but SDM fine-tuning knows only {neutral!r}.")
        if self.world_size > 1 and not self.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices is off, but the loss is a mean over the whole batch: leave it on."
            )
        room = 1 if self.max_new_tokens is None else self.max_new_tokens
        check_generations(room, self.temperature, self.num_generations)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "tokens_per_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)} but must be at least 1.")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate} but must be above 0.")
        if not self.num_train_epochs >= 0:
            raise ValueError(
                f"num_train_epochs is {self.num_train_epochs} but must be at least 0 (which trains nothing)."
            )

    def _check_estimator(self) -> None:
        """Refuse now what the SDM layer would refuse later: with `loss="ce"` the first one comes after training."""
        try:
            check_parameters(SDMEstimator.published(**self.estimator_parameters()))
        except BadSetting as error:  # the estimator's name of a setting may differ from ours
            raise BadSetting(LAYER_FIELDS[error.name], error.problem) from None

    def tags(self) -> VerificationTags:
        """The verification tags."""
        changes = self.verification_tags or {}
        try:
            return VerificationTags(**(json.loads(changes) if isinstance(changes, str) else changes))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"verification_tags is not understood ({error}): give some of open, close, yes, no."
            ) from error

    def estimator_parameters(self) -> dict[str, Any]:
        """The parameters of the `SDMEstimator` of each SDM layer."""
        return {parameter: getattr(self, field) for parameter, field in LAYER_FIELDS.items()}
