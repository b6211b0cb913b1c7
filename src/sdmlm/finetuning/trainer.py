"""SDMTrainer: fine-tune any Hugging Face causal LM into an SDM language model (docs/method.md, sections 4 to 7).

In each epoch, hard negatives are generated for the prompts that drew one. With `loss="sdm"` an SDM layer is fitted on one document
per prompt with the LM frozen, and gives each document the base of its next-token loss in the training steps. In the
middle and at the end of an epoch, another SDM layer is fitted over the calibration set D_ca, and the next-token loss over
D_ca is computed with its bases; the checkpoint is chosen by this loss. With `loss="ce"` all bases are e, and there are no such
layers. After training, the final SDM layer is fitted.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from sdmlm.estimator.calibration_summary import summarize_calibration
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning import checkpoints
from sdmlm.finetuning.batches import padded_batches
from sdmlm.finetuning.config import SDMConfig
from sdmlm.finetuning.evaluation import fits_states_budget, loss_by_second_pass, loss_of_states
from sdmlm.finetuning.final_layer import AnswerCount, FinalLayer, fit_final_layer
from sdmlm.finetuning.held_out import evaluated_rows
from sdmlm.finetuning.layers import check_draws, fit_and_broadcast, loss_bases, position_limit, positives
from sdmlm.finetuning.loss import sdm_loss_from_hidden, sdm_next_token_loss, shared_logit_transform
from sdmlm.finetuning.model_setup import model_and_tokenizer, with_adapter
from sdmlm.finetuning.negatives import EpochDocument, HardNegatives, NegativePolicy, generate_negatives
from sdmlm.finetuning.phases import PhaseProgress, StepMetrics
from sdmlm.finetuning.saving import SavingTrainer
from sdmlm.finetuning.schedule import EpochOrder, RowNumbers, Schedule, row_numbers
from sdmlm.finetuning.training_rows import TrainingRow, completion_room, encode_document, training_rows
from sdmlm.language_model.encoding import Encoded, Encoder
from sdmlm.language_model.forward import allow_inside, has_dropout, logits_and_states_of, states_of
from sdmlm.language_model.reading import CountedStates, read_documents
from sdmlm.language_model.summary import summarize
from sdmlm.rewards import Reward, single_reward

Rows = Sequence[Mapping[str, Any]] | Sequence[TrainingRow]


class SDMTrainer(SavingTrainer):
    """Fine-tunes a causal LM on rows of prompt, chosen and rejected, and gives it an SDM layer.

    Parameters
    ----------
    model : str, Path or model
        A folder, a name on the Hub, "demo" (the small model that comes with sdmlm), or a loaded causal LM.
    args : SDMConfig, optional
        All options. The defaults are the paper's, except for `loss`, `gamma_other` and the final SDM layer.
    train_dataset : sequence of rows
        Each row maps "prompt", "chosen" and "rejected" to text or messages; further columns go to the reward.
    eval_dataset : sequence of rows
        The calibration set D_ca. The checkpoint is chosen on it, and the final SDM layer is fitted over it.
    processing_class : tokenizer, optional
        Default: the tokenizer of the model.
    reward_funcs : callable, str or a list of one, optional
        r, a function `(prompts, completions, **columns) -> list` of 0 and 1, or "module:function". By default a
        completion is right if it equals `chosen`.
    peft_config : peft.PeftConfig, optional
        Trains an adapter instead of all weights. With a model loaded in 4 or 8 bits this is QLoRA, which our tests do
        not cover on a GPU.
    callbacks, optimizers : as in `transformers.Trainer`

    Attributes
    ----------
    estimator : SDMEstimator or None
        The final SDM layer, after `train` or `fit_final_layer`.
    calibration_answers : AnswerCount or None
        How many calibration prompts the LM answered correctly, counted while the final layer was fitted.
    training_layer : SDMEstimator or None
        The SDM layer of the current epoch (`loss="sdm"`).
    encoder : Encoder
        How rows become token ids.
    rows, calibration_rows : list of rows
        The two data sets.
    calibration_positive : list of bool
        Which calibration prompts are represented by their positive when checkpoints are compared.

    Examples
    --------
    >>> from sdmlm import SDMConfig, SDMTrainer
    >>> rows = [{"prompt": f"{i} + 1 =", "chosen": str(i + 1), "rejected": str(i)} for i in range(40)]
    >>> config = SDMConfig("runs/sums", num_train_epochs=1, exemplar_dim=16, sdm_epochs=2, report_to="none")
    >>> trainer = SDMTrainer("demo", config, train_dataset=rows[:20], eval_dataset=rows[20:])
    >>> trainer.train()  # doctest: +SKIP
    >>> trainer.save_model()  # doctest: +SKIP

    `save_model` writes the model and, beside it, `sdm/`: `SDMLanguageModel.from_pretrained("runs/sums")` opens both.
    """

    def __init__(
        self,
        model: Any,
        args: SDMConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        processing_class: Any = None,
        reward_funcs: Reward | str | Sequence[Reward | str] | None = None,
        peft_config: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        args = copy.copy(args) if args is not None else SDMConfig()  # max_new_tokens is filled in below
        if train_dataset is None or eval_dataset is None:
            raise ValueError("SDMTrainer needs train_dataset and eval_dataset (the calibration set D_ca).")
        if args.n_gpu > 1:
            raise ValueError(
                f"One process sees {args.n_gpu} GPUs: start one process for each with `accelerate launch`, or show it "
                "one with CUDA_VISIBLE_DEVICES."
            )
        model, tokenizer = model_and_tokenizer(model, processing_class)
        model = with_adapter(model, peft_config, args)
        self.reward = single_reward(reward_funcs)
        self._prepare_rows(model, args, tokenizer, train_dataset, eval_dataset)
        self._prepare_documents(args)
        allow_inside(model)
        self._random = has_dropout(model) or args.neftune_noise_alpha is not None
        if self._random and args.loss == "sdm":
            warnings.warn(
                "This model has dropout, so the summary h of a document cannot come from the training pass: each step "
                "makes a second pass. Set the dropout of the model (and of LoRA) to 0 to save it.",
                stacklevel=2,
            )
        self.estimator: SDMEstimator | None = None
        self.calibration_answers: AnswerCount | None = None
        self.final_layer: FinalLayer | None = None
        self.training_layer: SDMEstimator | None = None
        self.layer_epoch = -1  # the epoch (from 0) that the training layer and the documents belong to
        self._own_entry = np.empty(0, dtype=np.int64)  # each row's index in that layer's support, -1 for none
        self._metrics = StepMetrics()  # since the last log
        self._phases = PhaseProgress()

        super().__init__(
            model=model,
            args=args,
            data_collator=row_numbers,
            train_dataset=RowNumbers(len(self.rows)),
            eval_dataset=self.calibration_rows,
            processing_class=tokenizer,
            callbacks=[*(callbacks or []), Schedule(self)],
            optimizers=optimizers,
        )
        # compute_loss divides by the tokens of the whole (global, accumulated) batch, unlike the model's own loss.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self._loss_shifts_labels = True
        self._transform = shared_logit_transform(self.accelerator, self.model)
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(self._phases)

    def _prepare_rows(self, model: Any, args: SDMConfig, tokenizer: Any, train: Rows, calibration: Rows) -> None:
        """Check and encode both data sets, once."""
        limit = position_limit(model, args.max_length)
        self.encoder = Encoder(tokenizer, args.tags(), limit, args.truncate_prompt)
        self.training_rows = training_rows(train, self.encoder, self.reward, "train")
        self.encoded_calibration = training_rows(calibration, self.encoder, self.reward, "calibration")
        self.rows = [row.columns for row in self.training_rows]
        self.calibration_rows = [row.columns for row in self.encoded_calibration]
        if args.max_new_tokens is None:
            args.max_new_tokens = completion_room(self.encoder, [*self.rows, *self.calibration_rows])

    def _prepare_documents(self, args: SDMConfig) -> None:
        """Set up the policy that chooses one document per row, and the choice for D_ca, the same for all checkpoints."""
        assert args.max_new_tokens is not None
        self.calibration_positive = positives(args, len(self.calibration_rows), epoch=0)
        self.evaluated = evaluated_rows([row["prompt"] for row in self.calibration_rows], args)
        check_draws(args, len(self.rows), [row["prompt"] for row in self.calibration_rows])
        gamma_gen = args.gamma_gen if args.hard_negatives else 0.0
        gammas = args.gamma_plus, gamma_gen, args.gamma_diversity
        policy = NegativePolicy(*gammas, args.seed, gamma_other=args.gamma_other, gamma_revise=args.gamma_revise)
        self.negatives = HardNegatives(
            policy, self.reward, args.max_new_tokens, args.temperature, args.num_generations, args.tokens_per_batch
        )
        self._documents: list[EpochDocument] = []  # of the epoch, by row
        self._encoded_documents: list[Encoded] = []

    # An epoch

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return EpochOrder(self)

    def begin_epoch(self, epoch: int) -> None:
        """Make hard negatives and the SDM layer of an epoch (from 0), unless they were loaded from a checkpoint."""
        if self.layer_epoch == epoch:
            return
        hard = self.args.hard_negatives and epoch > 0
        activity = "generating hard negatives" if hard else "choosing documents"
        with self._phase("generation", f"Epoch {epoch + 1}: {activity}"):
            step = self.state.global_step  # the policy counts epochs from 1
            store, model, encoder, rows = self.negatives, self.model, self.encoder, self.rows
            generated = generate_negatives(self.accelerator, store, model, encoder, rows, epoch + 1, step)
        if generated and all(attempt.body is None for attempt in generated):
            warnings.warn(
                f"Epoch {epoch + 1}: none of {len(generated)} generations was wrong (r = 0), so all its negatives are "
                "static ones.",
                stacklevel=2,
            )
        self.choose_documents(epoch)
        if self.args.loss == "sdm":
            with self._phase("reading", f"Epoch {epoch + 1}: reading the training documents"):
                h, _ = self._read(self._encoded_documents)
            with self._phase("sdm_layer", f"Epoch {epoch + 1}: fitting the SDM layer"):
                labels = [int(d.positive) for d in self._documents]
                self.use_training_layer(fit_and_broadcast(self.accelerator, self.args, [1, epoch], h, labels))
        self.layer_epoch = epoch

    def choose_documents(self, epoch: int) -> None:
        """Choose and encode one document per row for an epoch (from 0)."""
        self._documents = self.negatives.documents(self.rows, range(len(self.rows)), epoch + 1, self.encoder)
        self._encoded_documents = [
            encode_document(self.encoder, row, document)
            for row, document in zip(self.training_rows, self._documents, strict=True)
        ]

    def use_training_layer(self, layer: SDMEstimator) -> None:
        """Use this SDM layer for the bases of the next steps."""
        self.training_layer = layer
        self._own_entry = layer.support_index(range(len(self.rows)))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The padded documents of the row numbers from the loader, and the number of tokens with a loss in the global batch."""
        taken = [loaded for _, loaded in zip(range(num_batches), epoch_iterator, strict=False)]
        numbers = [[i for i in loaded["rows"].tolist() if i >= 0] for loaded in taken]
        batches = padded_batches(numbers, self._documents, self._encoded_documents, self.encoder.pad_id)
        used = [self._documents[i] for batch in numbers for i in batch]
        self._metrics["hard_negatives"] += [float(document.source == "generated") for document in used]
        items = self._get_num_items_in_batch(batches, device)
        return batches, items if items is None else items.clamp_min(1)

    # A step

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The SDM next-token loss of a batch: from one forward pass come h, from h the base, and with the base the loss."""
        base = None
        if self.args.loss == "sdm" and self._random:
            model.eval()
            with torch.no_grad():
                h = model(inside=lambda lm: self._summary(states_of(lm, inputs), inputs))
            model.train()
            base = self._base(h, inputs)
        loss: Tensor = model(inside=lambda lm: self.loss_inside(lm, inputs, base, num_items_in_batch))
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # the processes' gradients are averaged, not summed
        return (loss, {}) if return_outputs else loss

    def loss_inside(self, lm: Any, inputs: dict[str, Tensor], base: Tensor | None, num_items: Any) -> Tensor:
        """The loss of a batch, called inside the forward pass; without `base` the bases come from this pass."""
        if self._transform is None:
            logits, states = logits_and_states_of(lm, inputs)
            base = self._base_from(states, inputs) if base is None else base
            return sdm_next_token_loss(logits, inputs["labels"], base, num_items)
        states = states_of(lm, inputs)
        base = self._base_from(states, inputs) if base is None else base
        head = lm.get_output_embeddings()
        return sdm_loss_from_hidden(states, head.weight, inputs["labels"], base, num_items, head.bias, self._transform)

    @staticmethod
    def _summary(states: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return summarize(states.detach(), inputs["verified_at"], inputs["attention_mask"])

    def _base_from(self, states: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        if self.args.loss == "ce":
            return torch.full((len(states),), math.e, device=states.device)
        return self._base(self._summary(states, inputs), inputs)

    def _base(self, h: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """The base of each document of a batch; a document of a prompt in the support ignores that prompt's entry."""
        assert self.training_layer is not None
        start = time.perf_counter()
        rows, y = inputs["rows"].cpu(), inputs["reward"].cpu()
        base = loss_bases(self.training_layer, h, y, torch.from_numpy(self._own_entry[rows.numpy()]))
        if int(rows[0]) >= 0:  # not the placeholder of a process that has no rows left
            self._metrics["base"] += base.tolist()
            self._metrics["sdm/positive"] += (base[y == 1] - 2).tolist()
            self._metrics["sdm/negative"] += (base[y == 0] - 2).tolist()
        self._metrics["time/sdm_score"].append(time.perf_counter() - start)
        return base.float().to(h.device)

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The next-token loss over D_ca (without the rows of a certificate), with an SDM layer for the bases (`loss="sdm"`)."""
        if eval_dataset is not None:
            raise ValueError("SDMTrainer evaluates over the calibration set it was made with: leave eval_dataset out.")
        start = time.perf_counter()
        encoded, labels = self.evaluated_documents()
        processes = self.accelerator.num_processes
        keep = self._transform is not None and fits_states_budget(self.model, encoded, processes)
        with self._phase("reading", "Evaluating: reading the calibration documents"):
            h, counted = self._read(encoded, keep_states=keep)
        metrics: dict[str, float] = {}
        base = torch.full((len(encoded),), math.e)
        if self.args.loss == "sdm":
            with self._phase("sdm_layer", "Evaluating: fitting the SDM layer"):
                layer = fit_and_broadcast(self.accelerator, self.args, [2, self.state.global_step], h, labels)
                metrics = summarize_calibration(layer).metrics()
                own_entry = torch.from_numpy(layer.support_index(range(len(labels))))
                base = loss_bases(layer, h, torch.tensor(labels), own_entry).float()
        if keep:
            sums = loss_of_states(self.model, counted, base, self._transform)
        else:
            sums = loss_by_second_pass(self, encoded, base)
        total, tokens = self.accelerator.gather(sums[None]).sum(dim=0).tolist()
        metrics["loss"] = total / tokens
        metrics["runtime"] = time.perf_counter() - start
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(named)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def evaluated_documents(self) -> tuple[list[Encoded], list[int]]:
        """The documents of an evaluation, the same each time, and their labels."""
        labels = [int(self.calibration_positive[i]) for i in self.evaluated]
        rows = [self.encoded_calibration[i] for i in self.evaluated]
        return [row.document(bool(y)) for row, y in zip(rows, labels, strict=True)], labels

    # The final layer, saving, resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Fine-tune, load the best checkpoint, fit the final SDM layer.

        `resume_from_checkpoint=True` continues from the newest complete checkpoint, or starts anew if there is none. An
        incomplete checkpoint is ignored.
        """
        path = None
        if resume_from_checkpoint:
            given = resume_from_checkpoint if isinstance(resume_from_checkpoint, (str, Path)) else None
            path = checkpoints.complete_checkpoint(Path(self.args.output_dir), given)
        self.layer_epoch = -1
        self.negatives.attempts.clear()
        if path is not None:
            checkpoints.load_state(self, Path(path))
        with self._phases:
            result = super().train(resume_from_checkpoint=path, **kwargs)
            self.fit_final_layer()
        return result

    def fit_final_layer(self) -> SDMEstimator:
        """Fit the SDM layer for use, over D_ca."""
        with self._phase("final_layer", "Fitting the final SDM layer"):
            final = fit_final_layer(
                self.model,
                self.encoder,
                self.encoded_calibration,
                self.args,
                self.reward,
                self.accelerator,
                progress=False,
                fall_back=True,
            )
        self.final_layer = final
        self.estimator, self.calibration_answers = final.estimator, final.answers
        metrics = summarize_calibration(self.estimator).metrics()
        self.log({f"final_{name}": value for name, value in metrics.items()} | self._metrics.pop_times())
        return self.estimator

    def _save_state(self, folder: Path) -> None:
        checkpoints.save_state(self, folder)

    # Helpers

    def _read(self, encoded: Sequence[Encoded], keep_states: bool = False) -> tuple[Tensor, CountedStates]:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        pad, size = self.encoder.pad_id, self.args.tokens_per_batch
        return read_documents(self.model, encoded, pad, size, rank, world, keep_states)

    @contextmanager
    def _phase(self, name: str, description: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._phases.phase(description):
            yield
        self._metrics[f"time/{name}"].append(time.perf_counter() - start)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the values that the steps recorded since the last log: means over documents, and `time/*` in seconds."""
        if "loss" in logs:
            logs |= self._metrics.means(self.accelerator)
            logs |= self._metrics.pop_times()
            self._metrics.clear()
        super().log(logs, *args, **kwargs)
