"""Does the form of the loss change what SDM layers accept? Fine-tune the demo's model in several ways, and fit many layers over each.

    sdmlm data word-ordering --sentences demo --output data/demo --train 3200 --calibration 3200 --test 1000 --shifted 1000
    python benchmarks/loss_variants.py --data data/demo --output docs/results/loss-variants-demo.json

ce        cross-entropy
sdm       the SDM loss as published: the layer that gives the bases was fitted over the epoch's own documents
crossfit  the SDM loss; each document gets its base from a layer over the other half of the rows
through   as sdm, and the SDM loss of the verdict (weight 0.5, layer frozen, q at most 50, d at least 0.2) reaches the LM through h

All have hard negatives, and the same rows, seeds and optimiser. For each fine-tuned LM: `--layers` final layers as the trainer fits them, each
with its own documents, halves and first weights, over the calibration rows; then, by alpha, which greedy answers to the test prompts
they accept. Runs that stand in the output file are not made again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdmlm import SDMConfig, SDMEstimator, SDMTrainer
from sdmlm.demo import BASE_MODEL
from sdmlm.estimator.activation import sdm_losses
from sdmlm.evaluation.metrics import aurc, auroc
from sdmlm.finetuning.layers import fit_and_broadcast, loss_bases, positives
from sdmlm.finetuning.loss import sdm_loss_from_hidden
from sdmlm.language_model.decoding import generate
from sdmlm.language_model.forward import states_of
from sdmlm.language_model.reading import embed_sequences
from sdmlm.language_model.summary import summarize
from sdmlm.rewards import apply_reward
from sdmlm.storage.artifacts import write_text_atomically
from sdmlm.tasks.word_ordering import reward

ALPHAS = (0.8, 0.85, 0.9, 0.95)
VARIANTS = ("ce", "sdm", "crossfit", "through")
WEIGHT, MOST_Q, LEAST_D = 0.5, 50, 0.2  # of the verdict's loss


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
        self.note_bases(h, labels)

    def bases(self, h: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """The base of each document, from the layer that has not seen its row."""
        both = [loss_bases(layer, h, labels, torch.full((len(h),), -1)) for layer in self.others]
        return torch.where(self.half[rows] == 0, both[0], both[1])

    def note_bases(self, h: Tensor, labels: Tensor) -> None:
        """Bases at the start of an epoch: the published layer's, over its own two halves, and the cross-fitted ones."""
        assert self.training_layer is not None
        rows, own_entry = torch.arange(len(h)), torch.from_numpy(self._own_entry)
        published, crossed = loss_bases(self.training_layer, h, labels, own_entry), self.bases(h, labels, rows)
        kinds = np.array([d.source for d in self._documents])
        parts = {
            "all": np.ones(len(h), bool),
            "trained on": (own_entry >= 0).numpy(),
            "held out": (own_entry < 0).numpy(),
        }
        parts |= {kind: kinds == kind for kind in ("positive", "static", "generated")}
        made = [
            (name, int(part.sum()), *(base[part].quantile(torch.tensor([0.05, 0.5], dtype=base.dtype)).tolist()), float(base[part].mean()))
            for name, part in parts.items() if part.any() for base in (published, crossed)
        ]  # fmt: skip
        self.log({"bases": made})  # type: ignore[dict-item]

    def _base(self, h: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        base = self.bases(h, inputs["reward"].cpu(), inputs["rows"].cpu())
        self._metrics["base"] += base.tolist()
        return base.float()


class Through(SDMTrainer):
    """The verdict's SDM loss is added, and changes the LM through h."""

    def loss_inside(self, lm: Any, inputs: dict[str, Tensor], base: Tensor | None, num_items: Any) -> Tensor:
        if not lm.training:
            return super().loss_inside(lm, inputs, base, num_items)
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
        return loss + WEIGHT * verdict.mean()


def fine_tune(
    variant: str,
    seed: int,
    train: Sequence[Any],
    calibration: Sequence[Any],
    epochs: int,
    folder: str,
    maker: type[SDMTrainer] | None = None,
) -> Any:
    """A trainer after training, without the final layer."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "alpha": 0.9,
    }
    settings |= {"exemplar_dim": 256, "sdm_epochs": 50, "sdm_learning_rate": 3e-3, "num_train_epochs": epochs}
    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "logging_steps": 10, "use_cpu": True}
    quiet |= {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    config = SDMConfig(folder, seed=seed, loss="ce" if variant == "ce" else "sdm", **settings, **quiet)
    maker = maker or {"crossfit": CrossFitted, "through": Through}.get(variant, SDMTrainer)
    trainer: Any = maker(BASE_MODEL, config, train, calibration, reward_funcs=reward)
    trainer.fit_final_layer = lambda: None  # many are fitted in `measure`
    trainer.train()
    trainer.model.eval()
    return trainer


def answers(trainer: SDMTrainer, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], np.ndarray]:
    """The LM's greedy answers, and which are right."""
    generated = generate(
        trainer.model, trainer.encoder, [row["prompt"] for row in rows], trainer.args.max_new_tokens, progress=False
    )
    texts = [trainer.encoder.read(ids)[0] for ids in generated]
    return texts, np.array(apply_reward(reward, rows, texts, trainer.encoder.tags))


def states(trainer: SDMTrainer, rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> Tensor:
    ids = [trainer.encoder.encode_for_judging(row["prompt"], text) for row, text in zip(rows, texts, strict=True)]
    return embed_sequences(trainer.model, ids)


def measure(trainer: SDMTrainer, test: Sequence[Mapping[str, Any]], layers: int) -> dict[str, Any]:
    """What many final layers over the LM accept of its answers to the test prompts."""
    rows = trainer.calibration_rows
    own, right = answers(trainer, rows)
    h = [states(trainer, rows, texts) for texts in (own, *([r[c] for r in rows] for c in ("chosen", "rejected")))]
    texts, y = answers(trainer, test)
    h_test, found = states(trainer, test, texts), []
    for k in range(layers):
        config = copy.copy(trainer.args)
        config.seed += 1000 * k
        positive = torch.tensor(positives(config, len(rows), epoch=0))
        negative = torch.where(torch.from_numpy(right == 0)[:, None], h[0], h[2])
        documents = torch.where(positive[:, None], h[1], negative)
        layer = fit_and_broadcast(trainer.accelerator, config, [4], documents, positive.int().tolist())
        scores = layer.score(h_test)
        verdict_right, admitted = scores.prediction == y, layer.accepted_at(scores, ALPHAS)
        found.append({
            "admitted": admitted.sum(axis=0).tolist(),
            "rightly": (admitted & verdict_right[:, None]).sum(axis=0).tolist(),
            "verdicts_right": float(verdict_right.mean()),
            "auroc": auroc(scores.p[:, 1], y),
            "aurc": aurc(scores.p[:, 1], y),
            "mean_q": float(scores.q.mean()),
        })  # fmt: skip
    return {"answers": len(y), "right": int(y.sum()), "calibration_right": int(right.sum()), "layers": found}


def read(path: Path, limit: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][:limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS[:3]))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=1600, help="training rows")
    parser.add_argument("--calibration-rows", type=int, default=1000)
    parser.add_argument("--test-rows", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: getattr(args, name) for name in ("rows", "calibration_rows", "test_rows", "epochs", "layers")}
    stored: dict[str, Any] = (
        json.loads(args.output.read_text(encoding="utf-8"))
        if args.output.exists()
        else {"settings": settings, "runs": []}
    )
    if stored["settings"] != settings:
        raise SystemExit(f"{args.output} was made with other settings: name another file.")
    sizes = {"train": args.rows, "calibration": args.calibration_rows, "test": args.test_rows}
    train, calibration, test = (read(args.data / f"{name}.jsonl", n) for name, n in sizes.items())
    for seed in args.seeds:
        for variant in args.variants:
            if any((run["variant"], run["seed"]) == (variant, seed) for run in stored["runs"]):
                continue
            start = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                trainer = fine_tune(variant, seed, train, calibration, args.epochs, folder)
            log = trainer.state.log_history
            run: dict[str, Any] = {"variant": variant, "seed": seed, **measure(trainer, test, args.layers)}
            run["base_by_log"] = [round(entry["base"], 4) for entry in log if "base" in entry]
            run["bases"] = [entry["bases"] for entry in log if "bases" in entry]
            run["cpu_seconds"] = round(time.process_time() - start, 1)
            stored["runs"].append(run)
            write_text_atomically(args.output, json.dumps({**stored, "alphas": ALPHAS}, indent=1) + "\n")
            shares = [round(float(np.mean([layer["admitted"][a] for layer in run["layers"]])), 1) for a in range(4)]
            print(variant, seed, "right", run["right"], "accepted", shares, run["cpu_seconds"], "s", flush=True)


if __name__ == "__main__":
    main()
