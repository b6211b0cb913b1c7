"""SDMTrainer: any Hugging Face causal LM becomes an SDM language model (spec section 7).

An epoch: hard negatives are generated for the prompts that drew one, an SDM layer is fitted on one document per prompt
with the LM frozen, and then, step by step, that layer gives each document the base of its next-token loss. In the middle
and at the end of an epoch another SDM layer is fitted over the calibration set D_ca, and the next-token loss over D_ca under
it picks the checkpoint. The last act fits the SDM layer that goes with the model.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.data import Sampler
from transformers import AutoTokenizer, Trainer, TrainerCallback, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ProgressCallback

from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning.config import SDMConfig
from sdmlm.finetuning.final_layer import (
    check_draws,
    completion_room,
    fit_final_layer,
    fit_once,
    layer_metrics,
    position_limit,
    positives,
    save_final_layer,
)
from sdmlm.finetuning.loss import LogitTransform, output_head, sdm_loss_from_hidden, sdm_next_token_loss
from sdmlm.finetuning.negatives import HardNegatives, NegativePolicy, generate_negatives
from sdmlm.finetuning.phases import PhaseProgress
from sdmlm.finetuning.schedule import EpochOrder, RowNumbers, Schedule, row_numbers
from sdmlm.language_model.encoding import IGNORED, Encoded, Encoder, VerificationTags, check_rows, collate
from sdmlm.language_model.forward import (
    CountedStates,
    allow_inside,
    has_dropout,
    inner_lm,
    logits_and_states_of,
    over_documents,
    read_documents,
    states_of,
)
from sdmlm.language_model.loading import load_lm, load_tokenizer
from sdmlm.language_model.summary import summarize
from sdmlm.rewards import Reward, check_reward, load_reward
from sdmlm.storage.artifacts import SDM_FOLDER, write_text_atomically

STATE = "sdm_state.json"
LAYER = "sdm_layer"
STATES_BUDGET = 2 * 2**30  # bytes of states that a process keeps between reading D_ca and taking its loss
Rows = Sequence[Mapping[str, Any]]


class SDMTrainer(Trainer):  # type: ignore[misc]
    """Fine-tunes a causal LM on rows of prompt, chosen and rejected.

    model: a name, a path or a loaded model. eval_dataset: D_ca, the calibration set. processing_class: the tokenizer.
    reward_funcs: r, one function `(prompts, completions, **columns) -> list` of 0 and 1 or "module:function"; by default
    the completion must equal `chosen`. peft_config: trains an adapter instead of all weights; over a model loaded in 4 or
    8 bits it is QLoRA, which no test of ours has run on a GPU. `train()` ends with the final SDM layer in `estimator`;
    `save_model` writes the model and, beside it, `sdm/`.
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
        if isinstance(model, (str, Path)):
            processing_class = processing_class or load_tokenizer(model)
            model = load_lm(model, torch.float32, trainable=True)
        if processing_class is None:
            name = getattr(model.config, "_name_or_path", "")
            if not name:
                raise ValueError("SDMTrainer needs a tokenizer: give processing_class.")
            processing_class = AutoTokenizer.from_pretrained(name)
        if peft_config is not None:
            if hasattr(model, "peft_config"):
                raise ValueError(
                    "The model has an adapter already: leave out peft_config (lora_r) to train it further, or merge it "
                    "into the model first."
                )
            from peft import get_peft_model, prepare_model_for_kbit_training

            if _is_quantised(model):
                options = args.gradient_checkpointing_kwargs or {"use_reentrant": False}  # as Transformers has it
                model = prepare_model_for_kbit_training(model, args.gradient_checkpointing, options)
            set_seed(args.seed)  # the adapter's first weights are random, and drawn before Trainer sets it
            model = get_peft_model(model, peft_config)
        _check_adapter(model)
        if isinstance(reward_funcs, (list, tuple)):
            if len(reward_funcs) != 1:
                raise ValueError(f"SDMTrainer takes one reward, got {len(reward_funcs)}: combine them in one function.")
            reward_funcs = reward_funcs[0]
        self.reward = load_reward(reward_funcs)  # type: ignore[arg-type]

        tags = args.tags()
        self.rows = _checked(train_dataset, "train", tags)
        self.calibration_rows = _checked(eval_dataset, "calibration", tags)
        for rows in (self.rows, self.calibration_rows):
            check_reward(self.reward, rows)
        self.encoder = Encoder(processing_class, tags, position_limit(model, args.max_length), args.truncate_prompt)
        self._encoded = _encode_static(self.encoder, self.rows, "train")
        self._encoded_ca = _encode_static(self.encoder, self.calibration_rows, "calibration")
        if args.max_new_tokens is None:
            args.max_new_tokens = completion_room(self.encoder, [*self.rows, *self.calibration_rows])

        # D_ca: which prompts stand with their positive is drawn once, so that checkpoints see the same documents.
        self.calibration_positive = positives(args, len(self.calibration_rows), epoch=0)
        check_draws(args, len(self.rows), len(self.calibration_rows))
        gamma_gen = args.gamma_gen if args.hard_negatives else 0.0
        policy = NegativePolicy(args.gamma_plus, gamma_gen, args.gamma_diversity, args.seed)
        self.negatives = HardNegatives(
            policy, self.reward, args.max_new_tokens, args.temperature, args.num_generations, args.tokens_per_batch
        )

        allow_inside(model)
        self._random = has_dropout(model) or args.neftune_noise_alpha is not None
        if self._random and args.loss == "sdm":
            warnings.warn(
                "This model has dropout, so the summary h of a document cannot come from the training pass: each step "
                "makes a second pass. Set the dropout of the model (and of LoRA) to 0 to save it.",
                stacklevel=2,
            )
        self.estimator: SDMEstimator | None = None  # the final SDM layer
        self.training_layer: SDMEstimator | None = None  # that of the epoch
        self._own_entry = np.empty(0, dtype=np.int64)  # each row's index in that layer's support, -1 for none
        self._layer_epoch = -1
        self._documents: list[Any] = []  # of the epoch, by row
        self._encoded_documents: list[Encoded] = []
        self._metrics: dict[str, list[float]] = defaultdict(list)  # since the last log, a value for each document
        self._phases = PhaseProgress()

        super().__init__(
            model=model,
            args=args,
            data_collator=row_numbers,
            train_dataset=RowNumbers(len(self.rows)),
            eval_dataset=self.calibration_rows,
            processing_class=processing_class,
            callbacks=[*(callbacks or []), Schedule(self)],
            optimizers=optimizers,
        )
        # compute_loss divides by the tokens of the whole (global, accumulated) batch, whatever the model's own loss does.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self._loss_shifts_labels = True
        self._transform = self._logit_transform()
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(self._phases)

    def _logit_transform(self) -> LogitTransform | None:
        """What the model does to its logits; None where only the model itself can apply its output embedding."""
        found: list[Any] = [None]
        if self.accelerator.is_main_process:  # the others may hold no weights yet (FSDP, memory-efficient loading)
            try:
                found = [output_head(inner_lm(self.model))[1]]
            except ValueError as error:
                warnings.warn(f"{error} The loss is taken from full logits, which costs memory.", stacklevel=3)
        if self.accelerator.num_processes > 1:
            broadcast_object_list(found)
        return found[0]  # type: ignore[no-any-return]

    # An epoch

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return EpochOrder(self)

    def begin_epoch(self, epoch: int) -> None:
        """Hard negatives and the SDM layer of an epoch (from 0), unless a checkpoint brought them."""
        if self._layer_epoch == epoch:
            return
        hard = self.args.hard_negatives and epoch > 0
        doing = "generating hard negatives" if hard else "choosing documents"
        with self._phase("generation", f"Epoch {epoch + 1}: {doing}"):
            generated = generate_negatives(  # the policy counts epochs from 1
                self.accelerator,
                self.negatives,
                self.model,
                self.encoder,
                self.rows,
                epoch + 1,
                self.state.global_step,
            )
        if generated and all(body is None for body in generated):
            warnings.warn(
                f"Epoch {epoch + 1}: none of {len(generated)} generations was wrong (r = 0), so all its negatives are "
                "static ones.",
                stacklevel=2,
            )
        self._choose_documents(epoch)
        if self.args.loss == "sdm":
            with self._phase("reading", f"Epoch {epoch + 1}: reading the training documents"):
                h, _ = self._read(self._encoded_documents)
            with self._phase("sdm_layer", f"Epoch {epoch + 1}: fitting the SDM layer"):
                labels = [int(d.positive) for d in self._documents]
                self.training_layer = fit_once(self.accelerator, self.args, [1, epoch], h, labels)
                self._own_entry = self.training_layer.support_index(range(len(self.rows)))
        self._layer_epoch = epoch

    def _choose_documents(self, epoch: int) -> None:
        self._documents = self.negatives.documents(self.rows, range(len(self.rows)), epoch + 1)
        self._encoded_documents = [
            self.encoder.encode(row["prompt"], document.completion, False, row=i)
            if document.source == "generated"
            else self._encoded[i][0 if document.positive else 1]
            for i, (row, document) in enumerate(zip(self.rows, self._documents, strict=True))
        ]

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Row numbers from the loader become padded documents, with the tokens that count in the global batch.

        A step's documents are dealt to its batches by length: less padding, and the same sum of gradients.
        """
        sizes, rows = [], []
        for _, found in zip(range(num_batches), epoch_iterator, strict=False):
            numbers = [i for i in found["rows"].tolist() if i >= 0]
            sizes.append(len(numbers))
            rows += numbers
        if len(sizes) > 1:  # a single batch is padded alike in any order
            rows.sort(key=lambda i: len(self._encoded_documents[i].input_ids))
        left, batches = iter(rows), []
        for size in sizes:
            numbers = list(islice(left, size))
            documents = [self._encoded_documents[i] for i in numbers]
            if not documents:  # nothing left for this process: it must join the step, with nothing that counts
                first = self._encoded_documents[0]
                documents = [Encoded(first.input_ids, [IGNORED] * len(first.labels), first.verified_at)]
            batch = collate(documents, self.encoder.pad_id)
            batch["rows"] = torch.tensor(numbers or [-1])
            batch["reward"] = torch.tensor([int(self._documents[i].positive) for i in batch["rows"].tolist()])
            self._metrics["hard_negatives"] += [float(self._documents[i].source == "generated") for i in numbers]
            batches.append(batch)
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
        """The SDM next-token loss of a batch: one forward pass gives h, from h the base, from the base the loss."""
        base = None
        if self.args.loss == "sdm" and self._random:
            model.eval()
            with torch.no_grad():
                h = model(inside=lambda lm: self._summary(states_of(lm, inputs), inputs))
            model.train()
            base = self._base(h, inputs)
        loss: Tensor = model(inside=lambda lm: self._loss_inside(lm, inputs, base, num_items_in_batch))
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # the processes' gradients are averaged, not summed
        return (loss, {}) if return_outputs else loss

    def _loss_inside(self, lm: Any, inputs: dict[str, Tensor], base: Tensor | None, num_items: Any) -> Tensor:
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

    @torch.no_grad()
    def _base(self, h: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """b = 2 + SDM(z')_y; a document of a prompt in the support ignores that prompt's entry."""
        assert self.training_layer is not None
        start = time.perf_counter()
        rows, y = inputs["rows"].cpu(), inputs["reward"].cpu()
        own = torch.from_numpy(self._own_entry[rows.numpy()])
        layer = self.training_layer.layers_[0]
        with torch.autocast(h.device.type, enabled=False):  # this runs inside the LM's forward pass
            p = layer.output(h.to(layer.adaptor.weight.device), own)[torch.arange(len(y)), y]
        if int(rows[0]) >= 0:  # not the stand-in of a process with nothing left
            self._metrics["base"] += (2 + p).tolist()
            self._metrics["sdm/positive"] += p[y == 1].tolist()
            self._metrics["sdm/negative"] += p[y == 0].tolist()
        self._metrics["time/sdm_score"].append(time.perf_counter() - start)
        return (2 + p).float().to(h.device)

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The next-token loss over D_ca, with an SDM layer fitted over D_ca for the bases (`loss="sdm"`).

        One pass over the LM: the states of the counted tokens are kept until the bases are known. Where they would take
        more memory than STATES_BUDGET, a second pass makes them anew.
        """
        if eval_dataset is not None:
            raise ValueError("SDMTrainer evaluates over the calibration set it was made with: leave eval_dataset out.")
        start = time.perf_counter()
        labels = [int(positive) for positive in self.calibration_positive]
        encoded = [pair[1 - label] for pair, label in zip(self._encoded_ca, labels, strict=True)]
        keep = self._transform is not None and self._bytes_of_states(encoded) <= STATES_BUDGET
        with self._phase("reading", "Evaluating: reading the calibration documents"):
            h, counted = self._read(encoded, keep_states=keep)
        metrics: dict[str, float] = {}
        base = torch.full((len(encoded),), math.e)
        if self.args.loss == "sdm":
            with self._phase("sdm_layer", "Evaluating: fitting the SDM layer"):
                estimator = fit_once(self.accelerator, self.args, [2, self.state.global_step], h, labels)
                metrics = layer_metrics(estimator)
                own = torch.from_numpy(estimator.support_index(range(len(labels))))
                layer = estimator.layers_[0]
                p = layer.output(h.to(layer.adaptor.weight.device), own)
                base = (2 + p[torch.arange(len(labels)), torch.tensor(labels)]).float()
        sums = self._loss_of(counted, base) if keep else self._loss_by_second_pass(encoded, base)
        total, tokens = self.accelerator.gather(sums[None]).sum(dim=0).tolist()
        metrics["loss"] = total / tokens
        metrics["runtime"] = time.perf_counter() - start
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(named)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def _bytes_of_states(self, encoded: Sequence[Encoded]) -> int:
        """What the states at counted positions take in a process, in float32: the same number on each."""
        tokens = sum(label != IGNORED for document in encoded for label in document.labels[1:])
        width = inner_lm(self.model).config.get_text_config().hidden_size
        return int(tokens * width * 4 // self.accelerator.num_processes)

    def _loss_of(self, counted: CountedStates, base: Tensor) -> Tensor:
        """Sum and number of the token losses of this process's kept states."""

        def inside(lm: Any) -> Tensor:
            head = lm.get_output_embeddings()
            total = torch.zeros((), device=head.weight.device)
            for part in torch.arange(len(counted.targets)).split(8192):
                # One token a row: the label of a position stands one to its right.
                labels = torch.nn.functional.pad(counted.targets[part, None], (1, 0), value=IGNORED)
                states, labels, bases = (
                    t.to(total.device) for t in (counted.states[part, None], labels, base[counted.documents[part]])
                )
                total += sdm_loss_from_hidden(states, head.weight, labels, bases, 1, head.bias, self._transform)
            return torch.stack([total, total.new_tensor(float(len(counted.targets)))])

        with torch.no_grad():
            sums: Tensor = self.model(inside=inside)
        return sums

    def _loss_by_second_pass(self, encoded: Sequence[Encoded], base: Tensor) -> Tensor:
        """The same where the states were not kept: too many, or only the model itself can make logits of them."""

        def inside(lm: Any, batch: dict[str, Tensor], numbers: Tensor) -> Tensor:
            total = self._loss_inside(lm, batch, base.to(numbers.device)[numbers], 1)
            return torch.stack([total, (batch["labels"][:, 1:] != IGNORED).sum()])

        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        pad, size = self.encoder.pad_id, self.args.tokens_per_batch
        sums = over_documents(self.model, encoded, pad, size, inside, rank, world)
        return torch.stack([torch.zeros(2, device=self.args.device), *sums]).sum(dim=0)

    # The final layer, saving, resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Fine-tune, load the best checkpoint, fit the final SDM layer.

        `resume_from_checkpoint=True` goes on from the newest complete checkpoint, or starts where there is none; a
        checkpoint that was cut off while it was written is passed over.
        """
        path = None
        if resume_from_checkpoint:
            given = resume_from_checkpoint if isinstance(resume_from_checkpoint, (str, Path)) else None
            path = _complete_checkpoint(Path(self.args.output_dir), given)
        self._layer_epoch = -1
        self.negatives.attempts.clear()
        if path is not None:
            self._load_state(Path(path))
        with self._phases:
            result = super().train(resume_from_checkpoint=path, **kwargs)
            self.fit_final_layer()
        return result

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Without the output embedding of a tied model, which is never saved: it is the input embedding."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        load_result.missing_keys[:] = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result)

    def fit_final_layer(self) -> SDMEstimator:
        """The SDM layer for use, over D_ca with gamma_gen = gamma_diversity = 1."""
        with self._phase("final_layer", "Fitting the final SDM layer"):
            self.estimator = fit_final_layer(
                self.model,
                self.encoder,
                self.calibration_rows,
                self.args,
                self.reward,
                self.accelerator,
                progress=False,
            )
        self.log({f"final_{name}": value for name, value in layer_metrics(self.estimator).items()} | self._times())
        return self.estimator

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
                save_final_layer(folder / SDM_FOLDER, self.estimator, weights, self.encoder, self.args, self.reward)
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="SDM language model")

    def _weights(self) -> dict[str, Tensor]:
        """The LM's state dict, whole: under FSDP all processes must ask for it."""
        if not self.is_fsdp_enabled:
            return dict(inner_lm(self.model).state_dict())
        full = self.accelerator.get_state_dict(self.model)
        return {name.removeprefix("base_model.model."): tensor for name, tensor in full.items()}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As usual. trainer_state.json is written last: where it is whole, so is the checkpoint."""
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)  # an older run's must not vouch for new files
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
        if self.training_layer is not None:
            self.training_layer.save_pretrained(folder / LAYER)
        state = {
            "epoch": self._layer_epoch,
            "rows": len(self.rows),
            "calibration_positive": self.calibration_positive,
            "negatives": self.negatives.state_dict(),
        }
        write_text_atomically(folder / STATE, json.dumps(state, ensure_ascii=False))

    def _load_state(self, folder: Path) -> None:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        for name, now, then in (
            ("train", len(self.rows), state["rows"]),
            ("calibration", len(self.calibration_rows), len(state["calibration_positive"])),
        ):
            if now != then:
                raise ValueError(f"{folder} was written with {then} {name} rows, not {now}: resume with the same rows.")
        self.calibration_positive = state["calibration_positive"]
        self.negatives.load_state_dict(state["negatives"])
        self._layer_epoch = int(state["epoch"])
        if self._layer_epoch < 0:
            return
        self._choose_documents(self._layer_epoch)
        if self.args.loss == "sdm":
            self.training_layer = SDMEstimator.from_pretrained(folder / LAYER, device=self.args.device)
            self._own_entry = self.training_layer.support_index(range(len(self.rows)))

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
        """Add what the steps noted since the last log: means over the documents of all processes, and `time/*`, the
        seconds of the first process."""
        if "loss" in logs:
            sums = {k: (sum(v), len(v)) for k, v in self._metrics.items() if not k.startswith("time/")}
            parts = gather_object([sums]) if self.accelerator.num_processes > 1 else [sums]
            for name in sorted({name for part in parts for name in part}):
                total, n = np.sum([part[name] for part in parts if name in part], axis=0)
                if n:
                    logs[name] = float(total / n)
            logs |= self._times()
            self._metrics.clear()
        super().log(logs, *args, **kwargs)

    def _times(self) -> dict[str, float]:
        names = [name for name in self._metrics if name.startswith("time/")]
        return {name: float(sum(self._metrics.pop(name))) for name in names}


def _check_adapter(model: Any) -> None:
    """Refuse adapters of PEFT that would be trained for nothing: they could not be opened again, or see no documents."""
    if not hasattr(model, "get_base_model"):
        return
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"{model.active_peft_config.peft_type.value} puts virtual tokens before a document, which SDM fine-tuning cannot "
            "do: use an adapter of the weights, such as LoRA."
        )
    if model.active_adapters != ["default"]:
        raise ValueError(
            f'The adapter of the model is named {", ".join(model.active_adapters)}: name it "default", for a saved folder '
            "opens with no other."
        )
    if not model.active_peft_config.base_model_name_or_path:
        warnings.warn(
            "The base model was not loaded from a folder or the Hub, so a saved adapter will not know it and cannot be opened "
            "by itself: save the base model and load it from there first.",
            stacklevel=3,
        )


def _is_quantised(model: Any) -> bool:
    """Whether Transformers loaded the weights in a few bits; by the marks that PEFT looks for, too."""
    marks = ("is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method")
    return any(getattr(model, mark, None) for mark in marks)


def _checked(rows: Any, name: str, tags: VerificationTags) -> list[dict[str, Any]]:
    plain = [dict(row) for row in rows]
    try:
        check_rows(plain, tags)
    except ValueError as error:
        raise ValueError(f"The {name} rows cannot be used. {error}") from error
    return plain


def _encode_static(encoder: Encoder, rows: Rows, name: str) -> list[tuple[Encoded, Encoded]]:
    """(positive, negative) of every row, encoded once; a row that is too long is named."""
    return [
        (
            encoder.encode(row["prompt"], row["chosen"], True, row=f"{i} of the {name} rows"),
            encoder.encode(row["prompt"], row["rejected"], False, row=f"{i} of the {name} rows"),
        )
        for i, row in enumerate(rows)
    ]


def _complete_checkpoint(output: Path, given: str | Path | None) -> str | None:
    """The checkpoint to resume from: the one given, or the newest that was written to its end."""

    def complete(folder: Path) -> bool:
        try:
            json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
            return (folder / STATE).is_file()
        except (OSError, ValueError):
            return False

    if given is not None:
        if not complete(Path(given)):
            raise ValueError(
                f"{given} is not a complete checkpoint of SDMTrainer: name another, or True for the newest."
            )
        return str(given)
    found = [(int(p.name[11:]), p) for p in output.glob("checkpoint-*") if p.name[11:].isdigit() and complete(p)]
    newest = max(found, default=(0, None))[1]
    return None if newest is None else str(newest)
