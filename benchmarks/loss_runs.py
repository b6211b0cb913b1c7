"""Does the form of the loss change what can be accepted? Fine-tune a model in several ways, and judge its answers in the same way each time.

    sdmlm data word-ordering --sentences demo --output data/demo --train 3200 --calibration 3200 --test 1000 --shifted 1000
    python benchmarks/loss_runs.py --model demo --data data/demo --tests test shifted --output docs/results/loss-demo.json

The forms are those of benchmarks/loss_forms.py. All have hard negatives, unless their name says otherwise, and the same rows, seeds and optimiser. Over each fine-tuned
model, by alpha and for the model's own greedy answers:

region     what the region of the papers accepts, over averaged layers with the default settings, fitted over the papers' documents and states;
           `--draws` draws of the documents. Also how many of the accepted are judged right (yes), and how the SDM output for Yes ranks answers
published  the same with a single layer for each draw, with the settings that the papers' layers have in training
certified  own answers and likelihood (docs/method.md, 9): what is verified under the certificate. It never accepts the tenth of the answers that is least
           usual, so where a model is right more often than alpha the share stays near 90%; `coverage` shows more

coverage: the largest share of the answers, surest first, of which 95, 98 or 99% are right (the threshold is chosen on the same answers).

Runs that stand in the output file are not made again. `--keep` saves the fine-tuned models, and measures those that are there without training. A table of all forms ends
the output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loss_forms import FORMS
from loss_tables import print_forms
from torch import Tensor

from sdmlm import SDMConfig, SDMEstimator, SDMTrainer
from sdmlm.demo import BASE_MODEL
from sdmlm.errors import NoOwnAnswers
from sdmlm.evaluation.metrics import aurc, auroc, coverage_at_accuracy
from sdmlm.experiments.answer_rivals import signed_confidence
from sdmlm.finetuning.layers import positives
from sdmlm.finetuning.own_answers import fit_over_own_answers
from sdmlm.language_model.answer_rule import evidence_of
from sdmlm.language_model.decoding import generate
from sdmlm.language_model.likelihood import LIKELIHOOD, VerdictTokens, answer_summaries
from sdmlm.language_model.reading import embed_sequences
from sdmlm.rewards import apply_reward
from sdmlm.storage.artifacts import write_text_atomically
from sdmlm.tasks.word_ordering import reward

ALPHAS = (0.8, 0.85, 0.9, 0.95)
ACCURACIES = (0.95, 0.98, 0.99)
SETTINGS = (
    "rows", "epochs", "learning_rate", "batch", "accumulate", "lora_layers", "calibration_rows", "tests", "test_rows",
    "draws",
)  # fmt: skip
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Rows = Sequence[Mapping[str, Any]]


def fine_tune(
    form: str,
    seed: int,
    train: Rows,
    calibration: Rows,
    args: argparse.Namespace,
    maker: type[SDMTrainer] | None = None,
    kept: Path | None = None,
) -> Any:
    """A trainer after training, without the final layer; with the model that is `kept`, if there is one."""
    trained = kept is not None and kept.exists()
    cross_entropy = form.split("-")[0] in ("ce", "none")
    config = SDMConfig(
        tempfile.mkdtemp(),
        seed=seed,
        loss="ce" if cross_entropy else "sdm",
        hard_negatives=not form.endswith("-static"),
        gamma_other=0.0,  # the paper's negatives
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.learning_rate,
        num_train_epochs=0 if form == "none" or trained else args.epochs,
        alpha=0.9,
        exemplar_dim=256,
        sdm_epochs=50,
        sdm_learning_rate=3e-3,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        logging_steps=10,
        use_cpu=True,
        eval_strategy="no",
        save_strategy="no",
        load_best_model_at_end=False,
    )
    lora = None
    if args.lora_layers is not None and not trained:
        from peft import LoraConfig

        layers = list(range(*args.lora_layers))
        lora = LoraConfig(r=16, lora_alpha=32, target_modules=LINEAR, layers_to_transform=layers, lora_dropout=0.0)
    model = kept if trained else BASE_MODEL if args.model == "demo" else args.model
    trainer: Any = (maker or FORMS[form])(model, config, train, calibration, reward_funcs=reward, peft_config=lora)
    trainer.fit_final_layer = lambda: None  # layers are fitted in `measure`
    trainer.train()
    trainer.model.eval()
    return trainer


def answers(trainer: SDMTrainer, rows: Rows) -> tuple[list[str], np.ndarray]:
    """The LM's greedy answers, and which are right."""
    prompts, room = [row["prompt"] for row in rows], trainer.args.max_new_tokens
    generated = generate(trainer.model, trainer.encoder, prompts, room, progress=False)
    texts = [trainer.encoder.read(ids)[0] for ids in generated]
    return texts, np.array(apply_reward(reward, rows, texts, trainer.encoder.tags))


def states(trainer: SDMTrainer, rows: Rows, texts: Sequence[str]) -> Tensor:
    """h as in the paper."""
    ids = [trainer.encoder.encode_for_judging(row["prompt"], text) for row, text in zip(rows, texts, strict=True)]
    return embed_sequences(trainer.model, ids)


def measure(trainer: SDMTrainer, tests: Mapping[str, Rows], draws: int) -> dict[str, Any]:
    """What the region and the certificate accept of the LM's own answers."""
    rows = trainer.calibration_rows
    own, right = answers(trainer, rows)
    asked = {name: answers(trainer, test) for name, test in tests.items()}
    h = [states(trainer, rows, texts) for texts in (own, *([r[c] for r in rows] for c in ("chosen", "rejected")))]
    judged = {name: (states(trainer, tests[name], texts), y) for name, (texts, y) in asked.items()}
    found: dict[str, Any] = {"calibration_right": float(right.mean())}
    found["right"] = {name: float(y.mean()) for name, (_, y) in asked.items()}
    found["region"], found["published"] = [], []
    for draw in range(draws):
        seed = trainer.args.seed + 1000 * draw
        config = SDMConfig(None, gamma_plus=0.5, seed=seed, report_to="none")
        positive = torch.tensor(positives(config, len(right), epoch=0))
        negative = torch.where(torch.from_numpy(right == 0)[:, None], h[0], h[2])
        documents, labels = torch.where(positive[:, None], h[1], negative), positive.int().tolist()
        averaged = SDMEstimator(rule="region", alpha=0.9, seed=seed, progress=False).fit(documents, labels)
        published = SDMEstimator.published(**trainer.args.estimator_parameters(), seed=seed, progress=False)
        found["region"].append(region(averaged, judged))
        found["published"].append(region(published.fit(documents, labels), judged))
    found["certified"] = certified(trainer, tests, asked)
    return found


def region(layer: SDMEstimator, judged: Mapping[str, tuple[Tensor, np.ndarray]]) -> dict[str, Any]:
    """What the region of a layer accepts of answers, whose states and labels are given by test set."""
    found = {}
    for name, (h, y) in judged.items():
        scores = layer.score(h)
        accepted = layer.accepted_at(scores, ALPHAS)
        yes = accepted & (scores.prediction == 1)[:, None]
        found[name] = {
            "accepted": accepted.mean(axis=0).tolist(),
            "verdicts_right": (accepted & (scores.prediction == y)[:, None]).mean(axis=0).tolist(),
            "yes": yes.mean(axis=0).tolist(),
            "yes_right": (yes & (y == 1)[:, None]).mean(axis=0).tolist(),
            **ranking(scores.p[:, 1], y),
            "mean_q": float(np.mean(scores.q)),
        }
    return found


def certified(trainer: SDMTrainer, tests: Mapping[str, Rows], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The certificate over own answers, with likelihood."""
    args, encoder = trainer.args, trainer.encoder
    config = SDMConfig(
        None, seed=args.seed, alpha=0.95, documents="own", summary=LIKELIHOOD, report_to="none", use_cpu=True
    )
    room, nothing = args.max_new_tokens or 0, [0.0] * len(ALPHAS)
    try:
        own = fit_over_own_answers(
            trainer.model, encoder, trainer.calibration_rows, config, reward, room, progress=False
        )
    except NoOwnAnswers:  # hardly an answer is right
        return {test: {"accepted": nothing, "right": nothing, "auroc": None, "aurc": None} for test in tests}
    rules, found = [own.certificate_at(alpha) for alpha in ALPHAS], {}
    assert own.reduction is not None
    for name, (texts, y) in asked.items():
        documents = [encoder.judged_document(r["prompt"], text) for r, text in zip(tests[name], texts, strict=True)]
        ids, starts = [ids for ids, _ in documents], [start for _, start in documents]
        h = own.reduction(answer_summaries(trainer.model, ids, starts, VerdictTokens.of(encoder), 8192, False))
        scores = own.estimator.score(h)
        evidence = evidence_of(scores, h.numpy(), own.certificate.usual)
        accepted = np.stack([rule.rule.accepts(evidence) for rule in rules], axis=1)
        found[name] = {
            "accepted": accepted.mean(axis=0).tolist(),
            "right": (accepted & (y == 1)[:, None]).mean(axis=0).tolist(),
            **ranking(signed_confidence(scores), y),
        }
    return found


def ranking(score: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """How well a score ranks right above wrong answers; None where all are alike."""
    if y.min() == y.max():
        return {"auroc": None, "aurc": None, "coverage": [float(y.max())] * len(ACCURACIES)}
    coverage = [float(coverage_at_accuracy(score, y, accuracy)) for accuracy in ACCURACIES]
    return {"auroc": float(auroc(score, y)), "aurc": float(aurc(score, y)), "coverage": coverage}


def read(path: Path, limit: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][:limit]


def digest(rows: Any) -> str:
    """A short hash of rows, so that runs over different rows do not come into one file."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:12]


def done(form: str, seed: int, path: Path) -> bool:
    """Whether a run stands in the file already."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    return any((run["form"], run["seed"]) == (form, seed) for run in runs)


def optimiser_options(parser: argparse.ArgumentParser) -> None:
    """The options that `fine_tune` needs; the defaults are for the demo's model."""
    parser.add_argument("--model", default="demo", help="a folder, or demo")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1600, help="training rows")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=32, help="documents per micro-step")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-steps per step")
    parser.add_argument("--lora-layers", type=int, nargs=2, metavar=("FROM", "TO"), help="LoRA on these layers only")


def run_options(parser: argparse.ArgumentParser) -> None:
    """Which runs are made, and with which rows they are measured."""
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["ce", "sdm"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--calibration-rows", type=int, default=1000)
    parser.add_argument("--tests", nargs="+", default=["test"], help="names of .jsonl files in --data")
    parser.add_argument("--test-rows", type=int, default=1000, help="rows of each test set")
    parser.add_argument("--draws", type=int, default=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    optimiser_options(parser)
    run_options(parser)
    parser.add_argument("--keep", type=Path, help="folder for the fine-tuned models")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The language model answered")
    data = Path(args.data)
    train, calibration = read(data / "train.jsonl", args.rows), read(data / "calibration.jsonl", args.calibration_rows)
    tests = {name: read(data / f"{name}.jsonl", args.test_rows) for name in args.tests}
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings |= {"model": Path(args.model).name, "data": digest([train, calibration, tests])}
    new: dict[str, Any] = {"settings": settings, "alphas": ALPHAS, "accuracies": ACCURACIES, "runs": []}
    stored: dict[str, Any] = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else new
    if stored["settings"] != settings:
        raise SystemExit(f"{args.output} was made with other settings: name another file.")
    for seed in args.seeds:
        for form in args.forms:
            if done(form, seed, args.output):
                continue
            start = time.process_time()
            kept = None if args.keep is None else args.keep / f"{form}-{seed}"
            trainer = fine_tune(form, seed, train, calibration, args, kept=kept)
            trained = time.process_time() - start
            run: dict[str, Any] = {"form": form, "seed": seed, **measure(trainer, tests, args.draws)}
            log = trainer.state.log_history
            run["loss_by_log"] = [round(entry["loss"], 4) for entry in log if "loss" in entry]
            run["base_by_log"] = [round(entry["base"], 4) for entry in log if "base" in entry]
            run["cpu_seconds"] = [round(trained, 1), round(time.process_time() - start - trained, 1)]
            if kept is not None and not kept.exists():
                whole = trainer.model if args.lora_layers is None else trainer.model.merge_and_unload()
                whole.save_pretrained(kept)
                trainer.encoder.tokenizer.save_pretrained(kept)
            if done(form, seed, args.output):
                continue  # another process was first
            latest = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else new
            latest["runs"].append(run)  # another process may have added runs meanwhile
            write_text_atomically(args.output, json.dumps(latest, indent=1) + "\n")
            shares = np.mean([one[args.tests[0]]["accepted"] for one in run["region"]], axis=0).round(3).tolist()
            sure = np.round(run["certified"][args.tests[0]]["accepted"], 3).tolist()
            print(
                form, seed, "right", run["right"], "region", shares, "certified", sure, run["cpu_seconds"], flush=True
            )
    print_forms(json.loads(args.output.read_text(encoding="utf-8")), args.tests)


if __name__ == "__main__":
    main()
