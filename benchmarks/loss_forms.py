"""Forms of SDM fine-tuning that differ from the paper's text in one point each where possible, as trainers (benchmarks/loss_runs.py uses them).

ce           cross-entropy
sdm          the SDM loss as in the paper
none         no fine-tuning
ce-static, sdm-static  ce and sdm without hard negatives
crossfit     each document gets its base from an SDM layer over the other half of the rows (so its support is half as large)
independent  the SDM layer of an epoch is fitted over documents that are drawn independently of those of the steps
inside       hard negatives are generated within the step, with the current weights
nearest      each document ignores its nearest support entry, whatever that is, and gets the Distance of a document in the support
turn         h is read at the end of the turn, after a document without a tag, instead of at the tag
verdict      the base applies to the tokens of the verdict and its closing tag only; the other tokens have base e
follow       the SDM layer of the epoch is fitted anew every 25 steps
bf16, ce-bf16  weights and AdamW's averages are rounded to bfloat16 after every step (sdm and ce)
through      the SDM loss of the verdict is added (weight 0.5, layer frozen, q at most 50, d at least 0.2) and reaches the LM through h
ce-through   the same, next to cross-entropy
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from sdmlm import SDMEstimator, SDMTrainer
from sdmlm.estimator.activation import sdm_losses
from sdmlm.finetuning.layers import fit_and_broadcast, loss_bases
from sdmlm.finetuning.loss import sdm_loss_from_hidden
from sdmlm.finetuning.negatives import HardNegatives
from sdmlm.finetuning.training_rows import encode_document
from sdmlm.language_model.encoding import IGNORED, Encoded, collate
from sdmlm.language_model.forward import states_of
from sdmlm.language_model.summary import summarize

WEIGHT, MOST_Q, LEAST_D = 0.5, 50, 0.2  # of the verdict's loss
EVERY = 25  # steps between two layers of "follow"


class CrossFitted(SDMTrainer):
    """Each document gets its base from an SDM layer that was fitted over the other half of the rows."""

    def use_training_layer(self, layer: SDMEstimator) -> None:
        super().use_training_layer(layer)
        n, epoch = len(self.rows), math.floor(self.state.epoch or 0)
        h, _ = self._read(self._encoded_documents)
        labels = torch.tensor([int(d.positive) for d in self._documents])
        self.half = torch.from_numpy(np.random.default_rng([self.args.seed, epoch, 5]).permutation(n) % 2)
        self.others: list[SDMEstimator] = []
        for k in (0, 1):
            there = self.half != k
            seeds = [4, epoch, k]
            self.others.append(fit_and_broadcast(self.accelerator, self.args, seeds, h[there], labels[there].tolist()))

    def bases(self, h: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """The base of each document, from the layer that has not seen its row."""
        both = [loss_bases(layer, h, labels, torch.full((len(h),), -1)) for layer in self.others]
        return torch.where(self.half[rows] == 0, both[0], both[1])

    def _base(self, h: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        base = self.bases(h, inputs["reward"].cpu(), inputs["rows"].cpu())
        self._metrics["base"] += base.tolist()
        return base.float()


class Independent(SDMTrainer):
    """The SDM layer of an epoch is fitted over documents drawn independently of those of the steps."""

    def choose_documents(self, epoch: int) -> None:
        super().choose_documents(epoch)
        self.of_steps = self._documents, self._encoded_documents
        store = new_store(self, seed=self.args.seed + 1)
        numbers = range(len(self.rows))
        store.prepare(self.model, self.encoder, self.rows, numbers, epoch + 1, self.state.global_step, progress=False)
        self._documents = store.documents(self.rows, numbers, epoch + 1, self.encoder)
        pairs = zip(self.training_rows, self._documents, strict=True)
        self._encoded_documents = [encode_document(self.encoder, row, document) for row, document in pairs]

    def use_training_layer(self, layer: SDMEstimator) -> None:
        super().use_training_layer(layer)
        self._documents, self._encoded_documents = self.of_steps


class Inside(SDMTrainer):
    """Hard negatives are generated within the step that uses them."""

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        return super().get_batch_samples((self.renewed(batch) for batch in epoch_iterator), num_batches, device)

    def renewed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        store, epoch = new_store(self, self.args.seed), self.layer_epoch + 1
        rows = [i for i in batch["rows"].tolist() if store.policy.draw(i, epoch).generate]
        self.model.eval()
        store.prepare(self.model, self.encoder, self.rows, rows, epoch, self.state.global_step, progress=False)
        self.model.train()
        for i, document in zip(rows, store.documents(self.rows, rows, epoch), strict=True):
            self._documents[i] = document
            self._encoded_documents[i] = encode_document(self.encoder, self.training_rows[i], document)
        return batch


def new_store(trainer: SDMTrainer, seed: int) -> HardNegatives:
    """A store of hard negatives with the run's settings, and nothing in it."""
    policy, args = dataclasses.replace(trainer.negatives.policy, seed=seed), trainer.args
    how = args.max_new_tokens, args.temperature, args.num_generations, args.tokens_per_batch
    return HardNegatives(policy, trainer.reward, *how)


class Nearest(SDMTrainer):
    """A document ignores its nearest support entry."""

    def _base(self, h: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        assert self.training_layer is not None
        _, match, _ = self.training_layer.layers_[0].signals(h, None)
        base = loss_bases(self.training_layer, h, inputs["reward"].cpu(), match.nearest)
        self._metrics["base"] += base.tolist()
        return base.float()


class EndOfTurn(SDMTrainer):
    """h is read at the end of the turn, after a document without a tag."""

    def without_tag(self, encoded: Encoded) -> Encoded:
        start = encoded.verified_at + 1 - len(self.encoder.open_ids)
        ids = [*encoded.input_ids[:start], *self.encoder.closing_ids]
        return Encoded(ids, [IGNORED] * len(ids), len(ids) - 1)

    def _read(self, encoded: Any, keep_states: bool = False) -> Any:
        return super()._read([self.without_tag(one) for one in encoded], keep_states)

    def loss_inside(self, lm: Any, inputs: dict[str, Tensor], base: Tensor | None, num_items: Any) -> Tensor:
        documents = [self.without_tag(self._encoded_documents[i]) for i in inputs["rows"].tolist()]
        batch = collate(documents, self.encoder.pad_id)
        with torch.no_grad():
            h = summarize(states_of(lm, batch), batch["verified_at"], batch["attention_mask"])
        return super().loss_inside(lm, inputs, self._base(h, inputs), num_items)


class VerdictOnly(SDMTrainer):
    """The base applies to the tokens of the verdict and its closing tag only."""

    def loss_inside(self, lm: Any, inputs: dict[str, Tensor], base: Tensor | None, num_items: Any) -> Tensor:
        states, head = states_of(lm, inputs), lm.get_output_embeddings()
        base, labels = self._base_from(states, inputs), inputs["labels"]
        length = torch.tensor([len(self.encoder.answer_ids[bool(y)]) for y in inputs["reward"].tolist()])
        after = torch.arange(labels.shape[1])[None] - inputs["verified_at"][:, None]
        verdict = (after > 0) & (after <= length[:, None])
        parts = ((verdict, base), (~verdict, torch.full_like(base, math.e)))
        losses = [
            sdm_loss_from_hidden(
                states, head.weight, labels.masked_fill(~mask, IGNORED), b, num_items, head.bias, self._transform
            )
            for mask, b in parts
        ]
        return losses[0] + losses[1]


class Follow(SDMTrainer):
    """The SDM layer of the epoch is fitted anew every 25 steps."""

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        step = self.state.global_step
        if step % EVERY == 0 and step:
            self.model.eval()
            h, _ = self._read(self._encoded_documents)
            self.model.train()
            labels = [int(d.positive) for d in self._documents]
            self.use_training_layer(fit_and_broadcast(self.accelerator, self.args, [1, step, 6], h, labels))
        return super().get_batch_samples(epoch_iterator, num_batches, device)


class RoundAfterSteps(TrainerCallback):  # type: ignore[misc]
    """Rounds weights and AdamW's averages to bfloat16 after every step, as training in bfloat16 throughout would."""

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16())
            for values in optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    values[name].copy_(values[name].bfloat16())


class Rounded(SDMTrainer):
    """Weights and AdamW's averages stay in bfloat16 between steps; the computing is in float32."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(RoundAfterSteps())


class Through(SDMTrainer):
    """The verdict's SDM loss is added, and changes the LM through h."""

    def begin_epoch(self, epoch: int) -> None:
        if self.layer_epoch == epoch:
            return
        loss, self.args.loss = self.args.loss, "sdm"  # the verdict's loss needs a layer, also next to cross-entropy
        super().begin_epoch(epoch)
        self.args.loss = loss

    def loss_inside(self, lm: Any, inputs: dict[str, Tensor], base: Tensor | None, num_items: Any) -> Tensor:
        assert self.training_layer is not None
        states, head = states_of(lm, inputs), lm.get_output_embeddings()
        base = self._base_from(states, inputs)
        loss = sdm_loss_from_hidden(states, head.weight, inputs["labels"], base, num_items, head.bias, self._transform)
        h = summarize(states, inputs["verified_at"], inputs["attention_mask"])
        layer, own_entry = self.training_layer.layers_[0], torch.from_numpy(self._own_entry[inputs["rows"].numpy()])
        with torch.no_grad():
            _, match, d = layer.signals(h.detach(), own_entry)
            adaptor = layer.adaptor
            weight, bias = adaptor.out_weight @ adaptor.weight, adaptor.out_weight @ adaptor.bias + adaptor.out_bias
        z = ((h - adaptor.mean) / adaptor.std) @ weight.T + bias
        verdict = sdm_losses(z, match.q.float().clamp(max=MOST_Q), d.float().clamp(min=LEAST_D), inputs["reward"])
        # `num_items` counts the tokens of a whole step: the share of this batch in it is its share of the weight.
        share = 1.0 if num_items is None else float((inputs["labels"] != IGNORED).sum() / num_items)
        return loss + WEIGHT * share * verdict.mean()


FORMS: dict[str, type[SDMTrainer]] = {
    "ce": SDMTrainer,
    "sdm": SDMTrainer,
    "none": SDMTrainer,
    "ce-static": SDMTrainer,
    "sdm-static": SDMTrainer,
    "crossfit": CrossFitted,
    "independent": Independent,
    "inside": Inside,
    "nearest": Nearest,
    "turn": EndOfTurn,
    "verdict": VerdictOnly,
    "follow": Follow,
    "bf16": Rounded,
    "ce-bf16": Rounded,
    "through": Through,
    "ce-through": Through,
}
