"""How much of the spread between runs is the SDM layer's, and how much the LM's? Many layers over each LM.

    python benchmarks/spread.py runs/stories15m/stories15m-{ce,sdm}_hn/seed-* --output docs/results/spread-stories15m.json

For each run of `sdmlm replicate`: its LM answers the calibration and the test prompts once, and `--layers` SDM layers are fitted over
it as the final one is, each with its own choice of documents, halves and first weights. Then, by alpha and test set: the share that
each setting admits, mean over the layers of an LM; the standard deviation between layers of one LM and between these means;
and the difference of SDM + HN and CE + HN, paired by seed. Nothing is chosen by what is measured here.

The first layer has the seed of the run's own, so the same documents and halves; h comes from other batches, and differs in the last digits.
`stored` is what the run's own layer admits: the two show what a rounding does. Runs that stand in the output file are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from scipy.stats import t

from sdmlm import SDMEstimator, SDMLanguageModel
from sdmlm.evaluation.lm_evaluation import evaluation_file, read_evaluation
from sdmlm.experiments.evaluate import generation_length, load_task
from sdmlm.finetuning.config import LAYER_FIELDS, SDMConfig
from sdmlm.finetuning.layers import fit_and_broadcast, positives
from sdmlm.language_model.reading import embed_sequences
from sdmlm.language_model.rows import read_preferences
from sdmlm.rewards import apply_reward
from sdmlm.storage.artifacts import write_text_atomically
from sdmlm.storage.record import read_record

ALPHAS = (0.8, 0.85, 0.9, 0.95)


def answers(lm: SDMLanguageModel, task: Any, rows: Sequence[Mapping[str, Any]]) -> tuple[torch.Tensor, np.ndarray]:
    """h of the LM's own greedy answers, and which of them are right."""
    room = generation_length(lm, rows)
    texts = [a.text for a in lm.generate([row["prompt"] for row in rows], max_new_tokens=room, neighbors=0)]
    return states(lm, rows, texts), np.array(apply_reward(task.reward, rows, texts, lm.tags))


def states(lm: SDMLanguageModel, rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> torch.Tensor:
    ids = [lm.encoder.encode_for_judging(row["prompt"], text) for row, text in zip(rows, texts, strict=True)]
    return embed_sequences(lm.model, ids)


def fit(
    lm: SDMLanguageModel, gamma_plus: float, h: Mapping[str, torch.Tensor], wrong: np.ndarray, seed: int
) -> SDMEstimator:
    """A final SDM layer as `sdmlm.finetuning.final_layer.fit_final_layer` makes it with this seed."""
    own = {field: getattr(lm.estimator, parameter) for parameter, field in LAYER_FIELDS.items()}
    config = SDMConfig(use_cpu=True, seed=seed, gamma_plus=gamma_plus, **own)
    positive = torch.tensor(positives(config, len(wrong), epoch=0))
    negatives = torch.where(torch.from_numpy(wrong)[:, None], h["own"], h["static"])
    documents = torch.where(positive[:, None], h["positive"], negatives)
    return fit_and_broadcast(Accelerator(cpu=True), config, [4], documents, positive.int().tolist())


def measure(folder: str, layers: int) -> dict[str, Any]:
    """All layers of one run: how many answers each admits, and how many of those verdicts are right."""
    torch.set_num_threads(1)
    if (record := read_record(folder)) is None:
        raise ValueError(f"{folder} is no run of sdmlm replicate.")
    settings, lm = record["settings"], SDMLanguageModel.from_pretrained(folder, device="cpu")
    task, rows = load_task(settings["task"]), read_preferences(settings["calibration"]).rows
    own, y = answers(lm, task, rows)
    h = {"own": own}
    h |= {
        name: states(lm, rows, [row[column] for row in rows])
        for name, column in (("positive", "chosen"), ("static", "rejected"))
    }
    tests = {name: answers(lm, task, read_preferences(source).rows) for name, source in settings["tests"].items()}
    facts = read_evaluation(evaluation_file(folder, next(iter(tests))))[1]
    out: dict[str, Any] = {name: facts[name] for name in ("setting", "seed")} | {"layers": []}
    for k in range(layers):
        layer = fit(lm, settings["gamma_plus"], h, y == 0, settings["seed"] + 1000 * k)
        found: dict[str, Any] = {"loss": layer.loss_}
        for name, (h_test, y_test) in tests.items():
            scores = layer.score(h_test)
            right = scores.prediction == y_test
            admitted = layer.accepted_at(scores, ALPHAS)
            found[name] = {
                "verdicts_right": float(right.mean()),
                "answers": len(right),
                "admitted": admitted.sum(axis=0).tolist(),
                "rightly": (admitted & right[:, None]).sum(axis=0).tolist(),
            }
            if k == 0:
                stored = read_evaluation(evaluation_file(folder, name))[0]
                found[name]["stored"] = [int(stored.accepted_at(alpha).sum()) for alpha in ALPHAS]
        out["layers"].append(found)
    return out


def summary(runs: Sequence[dict[str, Any]], test: str, a: int, first: str, second: str) -> str:
    """One line: shares of both settings at an alpha, the two spreads, accuracy, and the difference with its 95% interval."""
    means: dict[str, dict[int, float]] = {first: {}, second: {}}
    within, pooled = [], {}
    for setting, by_seed in means.items():
        chosen = [run for run in runs if run["setting"] == setting]
        for run in chosen:
            shares = [100 * layer[test]["admitted"][a] / layer[test]["answers"] for layer in run["layers"]]
            by_seed[run["seed"]] = statistics.fmean(shares)
            within.append(statistics.variance(shares))
        counts = [
            [layer[test][what][a] for run in chosen for layer in run["layers"]] for what in ("rightly", "admitted")
        ]
        pooled[setting] = f"{sum(counts[0]) / sum(counts[1]):.2f}" if sum(counts[1]) else "-"
    seeds = sorted(means[first].keys() & means[second].keys())
    differences = [means[first][s] - means[second][s] for s in seeds]
    half = float(t.ppf(0.975, len(seeds) - 1)) * statistics.stdev(differences) / math.sqrt(len(seeds))
    mean = statistics.fmean(differences)
    between = math.sqrt(statistics.fmean(statistics.variance(by_seed.values()) for by_seed in means.values()))
    shown = [f"{s} {' '.join(f'{means[s][n]:.1f}' for n in seeds)} ({pooled[s]} right)" for s in (first, second)]
    spread = f"sd of layers {math.sqrt(statistics.fmean(within)):.1f}, of LMs {between:.1f}"
    return f"{test} {ALPHAS[a]:g}: {', '.join(shown)}: {mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f}); {spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs: two settings, several seeds of each")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    path = Path(args.output)
    done = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else {}
    left = [folder for folder in args.runs if folder not in done]
    with ProcessPoolExecutor(min(len(left), os.cpu_count() or 1) or 1, mp_context=get_context("spawn")) as pool:
        for folder, found in zip(left, pool.map(measure, left, [args.layers] * len(left)), strict=True):
            done[folder] = found
            write_text_atomically(path, json.dumps({"alphas": ALPHAS, "runs": done}, indent=1) + "\n")
    runs = list(done.values())
    for test in [name for name in runs[0]["layers"][0] if name != "loss"]:
        for a in range(len(ALPHAS)):
            print(summary(runs, test, a, "sdm_hn", "ce_hn"))


if __name__ == "__main__":
    main()
