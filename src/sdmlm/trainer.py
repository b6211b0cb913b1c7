"""SDMTrainer: any Hugging Face causal LM becomes an SDM language model (spec section 7).

An epoch: hard negatives are generated for the prompts that drew one, an SDM layer is fitted on one document per prompt
with the LM frozen, and then, step by step, that layer gives each document the base of its next-token loss. In the middle
and at the end of an epoch another SDM layer is fitted over the calibration set D_ca, and the next-token loss over D_ca under
it picks the checkpoint. The last act fits the SDM layer that goes with the model.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from sdmlm.activation import sdm_losses
from sdmlm.artifacts import write_text_atomically
from sdmlm.config import SDMConfig
from sdmlm.encoding import Encoded, Encoder, check_rows, collate
from sdmlm.estimator import SDMEstimator
from sdmlm.final_layer import SDM_FOLDER, completion_room, fit_final_layer, position_limit, save_final_layer
from sdmlm.forward import CountedStates, allow_inside, has_dropout, inner_lm, read_documents, states_of
from sdmlm.loss import LogitTransform, output_head, sdm_loss_from_hidden, sdm_next_token_loss
from sdmlm.negatives import HardNegatives, NegativePolicy
from sdmlm.phases import PhaseProgress
from sdmlm.rewards import Reward, load_reward
from sdmlm.summary import summarize

STATE = "sdm_state.json"
LAYER = "sdm_layer"
Rows = Sequence[Mapping[str, Any]]


class SDMTrainer(Trainer):  # type: ignore[misc]
    """Fine-tunes a causal LM on rows of prompt, chosen and rejected.

    model: a name, a path or a loaded model. eval_dataset: D_ca, the calibration set. processing_class: the tokenizer.
    reward_funcs: r, one function `(prompts, completions, **columns) -> list` of 0 and 1 or "module:function"; by default
    the completion must equal `chosen`. peft_config: trains an adapter instead of all weights. `train()` ends with the
    final SDM layer in `estimator`; `save_model` writes the model and, beside it, `sdm/`.
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
        args = args or SDMConfig()
        if train_dataset is None or eval_dataset is None:
            raise ValueError("SDMTrainer needs train_dataset and eval_dataset (the calibration set D_ca).")
        if isinstance(model, str):
            processing_class = processing_class or AutoTokenizer.from_pretrained(model)
            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if processing_class is None:
            name = getattr(model.config, "_name_or_path", "")
            if not name:
                raise ValueError("SDMTrainer needs a tokenizer: give processing_class.")
            processing_class = AutoTokenizer.from_pretrained(name)
        if peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, peft_config)
        if isinstance(reward_funcs, (list, tuple)):
            if len(reward_funcs) != 1:
                raise ValueError(f"SDMTrainer takes one reward, got {len(reward_funcs)}: combine them in one function.")
            reward_funcs = reward_funcs[0]
        self.reward = load_reward(reward_funcs)  # type: ignore[arg-type]

        self.rows, self.calibration_rows = _checked(train_dataset, "train"), _checked(eval_dataset, "calibration")
        limit = position_limit(model, args.max_length)
        self.encoder = Encoder(processing_class, args.tags(), limit, args.truncate_prompt)
        self._encoded = _encode_static(self.encoder, self.rows, "train")
        self._encoded_ca = _encode_static(self.encoder, self.calibration_rows, "calibration")
        if args.max_new_tokens is None:
            args.max_new_tokens = completion_room(self.encoder, [*self.rows, *self.calibration_rows])

        # D_ca: which prompts stand with their positive is drawn once, so that checkpoints see the same documents.
        choice = NegativePolicy(args.gamma_plus, 0.0, 0.0, seed=args.seed)
        self.calibration_positive = [choice.draw(i, epoch=0).positive for i in range(len(self.calibration_rows))]
        _check_halves(self.calibration_positive, "calibration")
        self.negatives = HardNegatives(
            NegativePolicy(
                args.gamma_plus, args.gamma_gen if args.hard_negatives else 0.0, args.gamma_diversity, args.seed
            ),
            self.reward,
            args.max_new_tokens,
            args.temperature,
            args.num_generations,
            args.tokens_per_batch,
        )
        positives = [self.negatives.policy.draw(i, epoch=1).positive for i in range(len(self.rows))]
        _check_halves(positives, "train")

        allow_inside(model)
        self._transform: LogitTransform | None = None
        try:
            self._transform = output_head(inner_lm(model))[1]
        except ValueError as error:
            warnings.warn(f"{error} The loss is taken from the model's full logits, which costs memory.", stacklevel=2)
        self._dropout = has_dropout(model)
        if self._dropout and args.loss == "sdm":
            warnings.warn(
                "This model has dropout, so the summary h of a document cannot come from the training pass: each step "
                "makes a second pass. Set the dropout of the model (and of LoRA) to 0 to save it.",
                stacklevel=2,
            )
        self.estimator: SDMEstimator | None = None  # the final SDM layer
        self.training_layer: SDMEstimator | None = None  # that of the epoch
        self._layer_epoch = -1
        self._documents: list[Any] = []
        self._own_entry = np.empty(0, dtype=np.int64)
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._phases = PhaseProgress()

        super().__init__(
            model=model,
            args=args,
            data_collator=lambda rows: {"rows": torch.tensor(rows)},
            train_dataset=_RowNumbers(len(self.rows)),
            eval_dataset=self.calibration_rows,
            processing_class=processing_class,
            callbacks=[*(callbacks or []), _Schedule(self)],
            optimizers=optimizers,
        )
        # compute_loss divides by the tokens of the whole (global, accumulated) batch, whatever the model's own loss does.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self._loss_shifts_labels = True
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(self._phases)

    # An epoch

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return _EpochOrder(self)

    def begin_epoch(self, epoch: int) -> None:
        """Hard negatives and the SDM layer of an epoch (from 0), unless a checkpoint brought them."""
        if self._layer_epoch == epoch:
            return
        numbers = range(len(self.rows))
        with self._phase("generation", f"Epoch {epoch + 1}: generating hard negatives"):
            self._generate(numbers, epoch)
        self._choose_documents(epoch)
        if self.args.loss == "sdm":
            encoded = [self._encode_document(i) for i in numbers]
            with self._phase("reading", f"Epoch {epoch + 1}: reading the training documents"):
                h, _ = self._read(encoded)
            with self._phase("sdm_layer", f"Epoch {epoch + 1}: fitting the SDM layer"):
                labels = [int(d.positive) for d in self._documents]
                self.training_layer = self._fit(h, labels, [1, epoch])
                self._own_entry = self.training_layer.support_index(numbers)
        self._layer_epoch = epoch

    def _choose_documents(self, epoch: int) -> None:
        # The policy counts epochs from 1.
        self._documents = self.negatives.documents(self.rows, range(len(self.rows)), epoch + 1)

    def _generate(self, numbers: Sequence[int], epoch: int) -> None:
        """Fill the store for this epoch. Processes share the prompts, except under FSDP, where every forward pass is
        a joint one: there all make the same generations."""
        shared = self.accelerator.num_processes > 1 and not self.is_fsdp_enabled
        own = numbers[self.accelerator.process_index :: self.accelerator.num_processes] if shared else numbers
        self.negatives.prepare(
            self.model, self.encoder, self.rows, own, epoch + 1, self.state.global_step, progress=False
        )
        if shared:
            self.negatives.load_state_dict({"attempts": gather_object(self.negatives.state_dict()["attempts"])})

    def _encode_document(self, i: int) -> Encoded:
        """The document of row i in this epoch; only generated ones are encoded anew."""
        document = self._documents[i]
        if document.source == "generated":
            return self.encoder.encode(self.rows[i]["prompt"], document.completion, False, row=i)
        return self._encoded[i][0 if document.positive else 1]

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Row numbers from the loader become padded documents, with the tokens that count in the global batch."""
        batches = []
        for _, found in zip(range(num_batches), epoch_iterator, strict=False):
            numbers = found["rows"].tolist()
            batch = collate([self._encode_document(i) for i in numbers], self.encoder.pad_id)
            batch["reward"] = torch.tensor([int(self._documents[i].positive) for i in numbers])
            batch["rows"] = torch.tensor(numbers)
            generated = [self._documents[i].source == "generated" for i in numbers]
            self._metrics["hard_negatives"].append(float(np.mean(generated)))
            batches.append(batch)
        return batches, self._get_num_items_in_batch(batches, device)

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
        if self.args.loss == "sdm" and self._dropout:
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
        if self._transform is None:  # an output embedding that only the model itself can apply
            out = type(lm).forward(
                lm,
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                output_hidden_states=True,
                use_cache=False,
            )
            base = self._base_from(out.hidden_states[-1], inputs) if base is None else base
            return sdm_next_token_loss(out.logits, inputs["labels"], base, num_items)
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
        p = layer.output(h.float().to(layer.adaptor.weight.device), own)[torch.arange(len(y)), y]
        self._metrics["base"].append(float(2 + p.mean()))
        for c, name in enumerate(("negative", "positive")):
            if bool((y == c).any()):
                self._metrics[f"sdm/{name}"].append(float(p[y == c].mean()))
        self._metrics["time/sdm_score"].append(time.perf_counter() - start)
        return (2 + p).float().to(h.device)

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The next-token loss over D_ca, with an SDM layer fitted over D_ca for the bases (`loss="sdm"`).

        One pass over the LM: the states of the counted tokens are kept until the bases are known.
        """
        start = time.perf_counter()
        positive = self.calibration_positive
        encoded = [pair[0 if p else 1] for pair, p in zip(self._encoded_ca, positive, strict=True)]
        with self._phase("reading", "Evaluating: reading the calibration documents"):
            h, counted = self._read(encoded, keep_states=True)
        metrics: dict[str, float] = {}
        base = torch.full((len(encoded),), math.e)
        if self.args.loss == "sdm":
            labels = [int(p) for p in positive]
            with self._phase("sdm_layer", "Evaluating: fitting the SDM layer"):
                layer = self._fit(h, labels, [2, self.state.global_step])
            own = torch.from_numpy(layer.support_index(range(len(labels))))
            best = layer.layers_[0]
            p = best.output(h.to(best.adaptor.weight.device), own)[torch.arange(len(labels)), torch.tensor(labels)]
            base = (2 + p).float()
            metrics = layer_metrics(layer)
        assert counted is not None
        metrics["loss"] = self._loss_of(counted, base)
        metrics["runtime"] = time.perf_counter() - start
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(named)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def _loss_of(self, counted: CountedStates, base: Tensor) -> float:
        """The next-token loss over all processes' kept states."""

        def inside(lm: Any) -> Tensor:
            head = lm.get_output_embeddings()
            device = head.weight.device
            total = torch.zeros((), device=device)
            for part in torch.arange(len(counted.targets)).split(8192):
                states = counted.states[part].to(device)[:, None, :]
                targets = counted.targets[part].to(device)[:, None]
                # One token a row: the label of a position stands one to its right.
                pad = torch.full_like(targets, -100)
                bases = base[counted.documents[part]].to(device)
                if self._transform is None:
                    logits = torch.nn.functional.pad(head(states), (0, 0, 0, 1))
                    total += sdm_next_token_loss(logits, torch.cat([pad, targets], 1), bases, 1)
                else:
                    total += sdm_loss_from_hidden(
                        states, head.weight, torch.cat([pad, targets], 1), bases, 1, head.bias, self._transform
                    )
            return torch.stack([total, total.new_tensor(float(len(counted.targets)))])

        with torch.no_grad():
            sums = self.model(inside=inside)
        total, tokens = self.accelerator.gather(sums[None]).sum(dim=0).tolist()
        return float(total / tokens)

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
        if path is not None:
            self._load_state(Path(path))
        with self._phases:
            result = super().train(resume_from_checkpoint=path, **kwargs)
            with self._phase("final_layer", "Fitting the final SDM layer"):
                self.fit_final_layer()
        return result

    def fit_final_layer(self) -> SDMEstimator:
        """The SDM layer for use, over D_ca with gamma_gen = gamma_diversity = 1."""
        self.estimator = fit_final_layer(
            self.model,
            self.encoder,
            self.calibration_rows,
            self.args,
            self.reward,
            self.accelerator,
            self.is_fsdp_enabled,
        )
        return self.estimator

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model (or adapter) and tokenizer as usual, with `sdm/` beside; in a checkpoint, what resuming needs."""
        output_dir = output_dir or self.args.output_dir
        super().save_model(output_dir, _internal_call=True)
        if self.args.should_save:
            folder = Path(output_dir)
            if _internal_call:
                self._save_state(folder)
            elif self.estimator is not None:
                save_final_layer(folder / SDM_FOLDER, self.estimator, self.model, self.encoder, self.args)
            if not _internal_call:
                (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle; sdm/ holds the settings as JSON
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="SDM language model")

    def _save_state(self, folder: Path) -> None:
        # trainer_state.json is written after this and last of all: where it is whole, so is the checkpoint.
        if self.training_layer is not None:
            self.training_layer.save_pretrained(folder / LAYER)
        state = {"epoch": self._layer_epoch, "negatives": self.negatives.state_dict()}
        write_text_atomically(folder / STATE, json.dumps(state, ensure_ascii=False))

    def _load_state(self, folder: Path) -> None:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self.negatives.load_state_dict(state["negatives"])
        self._layer_epoch = int(state["epoch"])
        if self._layer_epoch < 0:
            return
        self._choose_documents(self._layer_epoch)
        if self.args.loss == "sdm":
            self.training_layer = SDMEstimator.from_pretrained(folder / LAYER, device=self.args.device)
            self._own_entry = self.training_layer.support_index(range(len(self.rows)))

    # Helpers

    def _read(self, encoded: Sequence[Encoded], keep_states: bool = False) -> tuple[Tensor, CountedStates | None]:
        return read_documents(
            self.model,
            encoded,
            self.encoder.pad_id,
            self.args.tokens_per_batch,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            keep_states,
        )

    def _fit(self, h: Tensor, labels: Sequence[int], seeds: list[int]) -> SDMEstimator:
        """An SDM layer, fitted by the first process and sent to the others."""
        seed = int(np.random.default_rng([self.args.seed, *seeds]).integers(2**31))
        parameters = self.args.estimator_parameters()
        found: list[Any] = [None]
        if self.accelerator.is_main_process:
            estimator = SDMEstimator(**parameters, seed=seed, device=self.args.device, progress=False)
            found = [estimator.fit(h, labels)]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(found)
        return found[0]  # type: ignore[no-any-return]

    @contextmanager
    def _phase(self, name: str, description: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._phases.phase(description):
            yield
        self._metrics[f"time/{name}"].append(time.perf_counter() - start)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the means of what the steps noted since the last log; times are summed."""
        if "loss" in logs:
            for name, values in self._metrics.items():
                logs[name] = float(np.sum(values) if name.startswith("time/") else np.mean(values))
            self._metrics.clear()
        super().log(logs, *args, **kwargs)


def layer_metrics(estimator: SDMEstimator) -> dict[str, float]:
    """The calibration summary of an SDM layer: the columns of the paper's last table."""
    layer, region = estimator.layers_[0], estimator.region_
    ca = layer.calibration
    out = {"sdm_loss": estimator.loss_, "q_min": region.q_min}
    right = (ca.predictions == ca.labels).double()
    losses = sdm_losses(ca.z, ca.q, ca.d, ca.labels)
    for c, psi in enumerate(region.psi):
        own = ca.labels == c
        out |= {
            f"psi_{c}": psi,
            f"mean_q_{c}": float(ca.q[own].double().mean()),
            f"sdm_loss_{c}": float(losses[own].mean()),
            f"sdm_accuracy_{c}": float(right[own].mean()),
        }
    out["admitted"] = float(region.contains(ca.q_prime, ca.p, ca.predictions).double().mean())
    return out


class _RowNumbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return i


class _EpochOrder(Sampler[int]):
    """A fresh order each epoch, drawn from (seed, epoch): the same however often an epoch is begun."""

    def __init__(self, trainer: SDMTrainer) -> None:
        self.trainer = trainer

    def __len__(self) -> int:
        return len(self.trainer.rows)

    def __iter__(self) -> Iterator[int]:
        seed = self.trainer.args.data_seed if self.trainer.args.data_seed is not None else self.trainer.args.seed
        epoch = max(0, self.trainer._layer_epoch)
        return iter(np.random.default_rng([seed, 3, epoch]).permutation(len(self)).tolist())


class _Schedule(TrainerCallback):  # type: ignore[misc]
    """Begins epochs, and evaluates and saves in the middle of one."""

    def __init__(self, trainer: SDMTrainer) -> None:
        self.trainer = trainer

    def _steps(self, args: Any) -> int:
        batches: int = len(self.trainer.callback_handler.train_dataloader)
        gathered: int = args.gradient_accumulation_steps
        return max(1, -(-batches // gathered))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.begin_epoch(state.global_step // self._steps(args))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        steps = self._steps(args)
        if str(args.eval_strategy.value) == "epoch" and steps > 1 and state.global_step % steps == steps // 2:
            control.should_evaluate = control.should_save = True
        return control


def _checked(rows: Any, name: str) -> list[dict[str, Any]]:
    plain = [dict(row) for row in rows]
    try:
        check_rows(plain)
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


def _check_halves(positive: Sequence[bool], name: str) -> None:
    for kind, count in (("positive", sum(positive)), ("negative", len(positive) - sum(positive))):
        if count < 2:
            raise ValueError(
                f"The {name} rows are too few for two halves of an SDM layer: {len(positive)} rows gave {count} {kind} "
                "documents, and each half needs both kinds. Give more rows; hundreds are a start."
            )


def _complete_checkpoint(output: Path, given: str | Path | None) -> str | None:
    """The checkpoint to resume from: the one given, or the newest that was written to its end."""

    def complete(folder: Path) -> bool:
        try:
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            return (folder / STATE).is_file()
        except (OSError, ValueError):
            return False

    if given is not None:
        if not complete(Path(given)):
            raise ValueError(
                f"{given} is not a complete checkpoint of SDMTrainer: name another, or True for the newest."
            )
        return str(given)
    found = [p for p in output.glob("checkpoint-*") if complete(p)]
    newest = max(found, key=lambda p: int(p.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest)
