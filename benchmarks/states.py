"""What limits the admitted share: can h tell right from wrong, and which SDM layers find a region over it?

    python benchmarks/states.py runs/demo/sdm_hn --data runs/demo/data/calibration.jsonl --alpha 0.9 0.95 \
        --layers 1000:1e-4 1000:1e-3 64:1e-3 64:1e-2 8:3e-2 --output docs/results/states-demo.json

Only calibration rows are read. Of each: its positive, its static negative, and the LM's own greedy answer.

- `own_errors`: how many of the LM's wrong answers have the right words in another order, and how many other words.
- `probes`: a logistic regression on h, fitted on one half of the prompts; the area under its ROC curve on the other half, for
  right against wrong documents of one sort. 0.5 is chance: no SDM layer can tell what this cannot.
- `layers`: SDM layers with M:RATE over one document a row, chosen as for the final layer (the positive for half of the rows,
  else the own answer where it is wrong, else the static negative), over several seeds of the layer. q'_min for each alpha.
  `--epochs` and `--rows` take several numbers: is the layer trained long enough, would more calibration rows help?
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sdmlm import SDMEstimator, SDMLanguageModel
from sdmlm.estimator.calibration_summary import summarize_calibration
from sdmlm.experiments.evaluate import load_task
from sdmlm.language_model.reading import embed_sequences
from sdmlm.rewards import apply_reward
from sdmlm.storage.artifacts import finite_or_none, write_text_atomically

Float = NDArray[np.float32]


def sort_of_negative(sentence: str, rejected: str) -> str:
    """How a static negative of word ordering differs from its sentence."""
    if not (rejected.startswith("<sentence>") and rejected.endswith("</sentence>")):
        return "a tag lost"
    words = rejected.removeprefix("<sentence>").removesuffix("</sentence>").split()
    return "the words before the stop swapped" if words[-1] == sentence.split()[-1] else "the stop elsewhere"


def sort_of_error(sentence: str, answer: str | None) -> str:
    """How a wrong answer differs from its sentence: was it the order that failed, or the copying?"""
    if answer is None:
        return "no tagged answer"
    return "another order" if sorted(answer.split()) == sorted(sentence.split()) else "other words"


def probe(right: Float, wrong: Float, seed: int = 0) -> float:
    """Area under the ROC curve on the half of the documents that was not fitted; no two are of the same prompt."""
    h = np.concatenate([right, wrong])
    y = np.repeat([1, 0], [len(right), len(wrong)])
    half = np.random.default_rng(seed).random(len(h)) < 0.5
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000)).fit(h[half], y[half])
    return float(roc_auc_score(y[~half], model.decision_function(h[~half])))


def layer(
    h: Float, y: NDArray[np.int64], dim: int, rate: float, epochs: int, seed: int, alphas: Sequence[float]
) -> dict[str, Any]:
    """One SDM layer: its loss, q and d by class, and q'_min with the share of its calibration half by alpha."""
    estimator = SDMEstimator.published(
        alpha=alphas[0], exemplar_dim=dim, learning_rate=rate, epochs=epochs, rounds=1, batch_size=50,
        center="global", seed=seed, device="cpu", progress=False,
    ).fit(torch.from_numpy(h), y)  # fmt: skip
    ca = estimator.calibration_
    out: dict[str, Any] = {"rows": len(h), "exemplar_dim": dim, "rate": rate, "epochs": epochs, "seed": seed}
    out["sdm_loss"] = estimator.loss_
    for c in (0, 1):
        own = ca.labels == c
        out[f"mean_q_{c}"] = float(ca.q[own].double().mean())
        out[f"median_d_{c}"] = float(ca.d[own].median())
    for alpha in alphas:
        metrics = summarize_calibration(estimator.recalibrate(alpha)).metrics()
        out[f"alpha {alpha:g}"] = {"q_min": finite_or_none(metrics["q_min"]), "admitted": metrics["admitted"]}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of an SDM LM")
    parser.add_argument("--data", required=True, help="its calibration rows")
    parser.add_argument("--task", default="word_ordering")
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.95])
    parser.add_argument("--layers", nargs="+", default=["1000:1e-3", "64:1e-2", "8:3e-2"], metavar="M:RATE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, nargs="+", default=[50])
    parser.add_argument("--rows", type=int, nargs="+", help="fit layers over the first N rows (all)")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    lm, task = SDMLanguageModel.from_pretrained(args.model), load_task(args.task)
    with open(args.data, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    prompts = [row["prompt"] for row in rows]
    answers = [a.text for a in lm.generate(prompts, neighbors=0)]
    own_right = np.array(apply_reward(task.reward, rows, answers, lm.tags)) == 1
    texts = {"positive": [r["chosen"] for r in rows], "static": [r["rejected"] for r in rows], "own": answers}
    h = {}
    for name, bodies in texts.items():
        ids = [lm.encoder.encode_for_judging(p, body) for p, body in zip(prompts, bodies, strict=True)]
        h[name] = embed_sequences(lm.model, ids).numpy()

    half = np.random.default_rng(0).random(len(rows)) < 0.5  # no prompt stands on both sides of a probe
    sorts = np.array([sort_of_negative(row["sentence"], row["rejected"]) for row in rows])
    probes = {sort: probe(h["positive"][half], h["static"][~half & (sorts == sort)]) for sort in sorted(set(sorts))}
    probes["own answers, right against wrong"] = probe(h["own"][own_right], h["own"][~own_right])
    wrong = [(row["sentence"], task.answer(a)) for row, a, y in zip(rows, answers, own_right, strict=True) if not y]
    errors = dict(Counter(sort_of_error(*pair) for pair in wrong))
    results: dict[str, Any] = {"model": args.model, "own_answers_right": float(own_right.mean()), "own_errors": errors}
    results["probes"] = probes
    print(json.dumps(results, indent=1), flush=True)

    positive = np.random.default_rng(1).random(len(rows)) < 0.5
    negatives = np.where(own_right[:, None], h["static"], h["own"])
    documents = np.where(positive[:, None], h["positive"], negatives)
    results["layers"] = []
    for spec, n, epochs, seed in product(args.layers, args.rows or [len(rows)], args.epochs, args.seeds):
        dim, rate = spec.split(":")
        y = positive[:n].astype(np.int64)
        results["layers"].append(layer(documents[:n], y, int(dim), float(rate), epochs, seed, args.alpha))
        print(json.dumps(results["layers"][-1]), flush=True)
        write_text_atomically(args.output, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
