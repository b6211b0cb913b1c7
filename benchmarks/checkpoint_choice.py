"""Does it matter over which documents an evaluation is made? They decide which checkpoint of a training is kept.

    python benchmarks/checkpoint_choice.py --data data/demo --tests test shifted --epochs 10 --learning-rate 3e-4 \
        --output docs/results/checkpoint-choice-demo.json

A model is fine-tuned as in benchmarks/loss_runs.py. After each epoch its loss over the calibration rows is taken twice: over the same documents each
time, as `SDMTrainer` does, and over documents that are drawn anew, with the model's own wrong answers among the negatives as in training.
The epochs with the lowest losses, and the last one, are then measured as in benchmarks/loss_runs.py.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from loss_forms import new_store
from loss_runs import ACCURACIES, ALPHAS, fine_tune, measure, optimiser_options, read, run_options
from loss_tables import print_forms
from transformers import TrainerCallback

from sdmlm import SDMTrainer
from sdmlm.finetuning.training_rows import encode_document
from sdmlm.language_model.encoding import Encoded
from sdmlm.storage.artifacts import write_text_atomically

LATER = 1_000_000  # added to the seed, so that no document is drawn as in training


class Redrawn(SDMTrainer):
    """Its evaluations can be made over documents that are drawn anew, with the model's own wrong answers."""

    redraw = False

    def evaluated_documents(self) -> tuple[list[Encoded], list[int]]:
        if not self.redraw:
            return super().evaluated_documents()
        store, epoch = new_store(self, self.args.seed + LATER), round(self.state.epoch or 0) + 1
        rows, numbers = self.calibration_rows, list(self.evaluated)
        store.prepare(self.model, self.encoder, rows, numbers, epoch, self.state.global_step, progress=False)
        documents = store.documents(rows, numbers, epoch, self.encoder)
        encoded = [encode_document(self.encoder, self.encoded_calibration[d.row], d) for d in documents]
        return encoded, [int(document.positive) for document in documents]


class AfterEpochs(TrainerCallback):  # type: ignore[misc]
    """Takes both losses after each epoch, and keeps the weights."""

    def __init__(self, trainer: Redrawn) -> None:
        self.trainer = trainer
        self.losses: list[tuple[float, float]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        trainer.model.eval()
        both = []
        for trainer.redraw in (False, True):
            both.append(trainer.evaluate()["eval_loss"])
        trainer.model.train()
        self.losses.append((both[0], both[1]))
        self.weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})


class Watched(Redrawn):
    """Is watched by `AfterEpochs`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch = AfterEpochs(self)
        self.add_callback(self.watch)


def choices(losses: Sequence[tuple[float, float]]) -> dict[str, int]:
    """The epoch (from 1) that each way keeps."""
    fixed, redrawn = ([loss[k] for loss in losses] for k in (0, 1))
    return {
        "same documents": fixed.index(min(fixed)) + 1,
        "drawn anew": redrawn.index(min(redrawn)) + 1,
        "last epoch": len(losses),
    }


def run(form: str, seed: int, data: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """One training, and what the kept checkpoints accept."""
    trainer = fine_tune(form, seed, data["train"], data["calibration"], args, Watched)
    watch, found = trainer.watch, {}
    kept = choices(watch.losses)
    for epoch in sorted(set(kept.values())):
        trainer.model.load_state_dict(watch.weights[epoch - 1])
        found[str(epoch)] = {
            "form": f"{form}, epoch {epoch}",
            "seed": seed,
            **measure(trainer, data["tests"], args.draws),
        }
    return {"form": form, "seed": seed, "losses": watch.losses, "kept": kept, "epochs": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    optimiser_options(parser)
    run_options(parser)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The language model answered")
    data = {
        "train": read(args.data / "train.jsonl", args.rows),
        "calibration": read(args.data / "calibration.jsonl", args.calibration_rows),
        "tests": {name: read(args.data / f"{name}.jsonl", args.test_rows) for name in args.tests},
    }
    runs = []
    for seed in args.seeds:
        for form in args.forms:
            runs.append(run(form, seed, data, args))
            stored = {"epochs": args.epochs, "learning_rate": args.learning_rate, "alphas": ALPHAS, "runs": runs}
            write_text_atomically(args.output, json.dumps(stored, indent=1) + "\n")
            print(form, seed, runs[-1]["kept"], runs[-1]["losses"], flush=True)
    measured = [found for one in runs for found in one["epochs"].values()]
    print_forms({"alphas": ALPHAS, "accuracies": ACCURACIES, "runs": measured}, args.tests)


if __name__ == "__main__":
    main()
