"""How far does the form of the loss turn the gradient of the language model? Cosines at the start of each epoch.

    python benchmarks/loss_gradients.py --data data/demo --output docs/results/loss-gradients-demo.json

The demo's model is fine-tuned as in benchmarks/loss_runs.py (form crossfit). At the start of each epoch the gradient of the
next-token loss over all documents of the epoch is taken with four bases: e (cross-entropy), 2.5 for all, the published ones, and the
cross-fitted ones. Given are the cosines between these gradients (AdamW does not see their length). To compare with: the cosine of the
cross-entropy gradients of two random halves of the documents, that is, what the choice of the documents changes.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np
import torch
from loss_forms import CrossFitted
from loss_runs import fine_tune, optimiser_options, read
from torch import Tensor

from sdmlm.finetuning.batches import padded_batches
from sdmlm.finetuning.layers import loss_bases
from sdmlm.finetuning.loss import sdm_loss_from_hidden
from sdmlm.language_model.encoding import IGNORED
from sdmlm.language_model.forward import states_of
from sdmlm.storage.artifacts import write_text_atomically

PAIRS = (("ce", "constant"), ("ce", "published"), ("ce", "crossfit"), ("published", "crossfit"))


class WithGradients(CrossFitted):
    """Compares gradients before the steps of each epoch."""

    found: list[dict[str, float]]

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        if epoch == 0:
            self.found = []
        h, _ = self._read(self._encoded_documents)
        labels = torch.tensor([int(d.positive) for d in self._documents])
        assert self.training_layer is not None
        bases = {
            "ce": torch.full((len(h),), math.e),
            "constant": torch.full((len(h),), 2.5),
            "published": loss_bases(self.training_layer, h, labels, torch.from_numpy(self._own_entry)).float(),
            "crossfit": self.bases(h, labels, torch.arange(len(h))).float(),
        }
        order = np.random.default_rng([self.args.seed, epoch, 6]).permutation(len(h))
        halves = [self.gradients(half.tolist(), bases) for half in np.array_split(order, 2)]
        whole = {name: halves[0][name] + halves[1][name] for name in bases}
        cosines = {f"{a}, {b}": cosine(whole[a], whole[b]) for a, b in PAIRS}
        cosines["ce, two halves"] = cosine(halves[0]["ce"], halves[1]["ce"])
        spread = {f"sd of {name} bases": float(bases[name].std()) for name in ("published", "crossfit")}
        self.found.append({"epoch": epoch + 1, **cosines, **spread})
        print(json.dumps(self.found[-1]), flush=True)

    def gradients(self, rows: list[int], bases: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of the summed token losses of documents, flat, for each kind of base."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        total = {name: torch.zeros(sum(p.numel() for p in parameters)) for name in bases}
        parts = [rows[n : n + 32] for n in range(0, len(rows), 32)]
        for part in parts:
            batch = padded_batches([part], self._documents, self._encoded_documents, self.encoder.pad_id)[0]
            assert (batch["labels"] != IGNORED).any()

            def inside(lm: Any, batch: dict[str, Tensor] = batch, part: list[int] = part) -> dict[str, Tensor]:
                states, head = states_of(lm, batch), lm.get_output_embeddings()
                how = head.bias, self._transform
                return {
                    name: sdm_loss_from_hidden(states, head.weight, batch["labels"], base[part], 1, *how)
                    for name, base in bases.items()
                }

            losses = self.model(inside=inside)
            for name, loss in losses.items():
                made = torch.autograd.grad(loss, parameters, retain_graph=True)
                total[name] += torch.cat([g.flatten() for g in made])
        return total


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    optimiser_options(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    train, calibration = read(args.data / "train.jsonl", args.rows), read(args.data / "calibration.jsonl", 100)
    trainer: Any = fine_tune("crossfit", args.seed, train, calibration, args, WithGradients)
    write_text_atomically(args.output, json.dumps({"rows": args.rows, "epochs": trainer.found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
