"""What can be accepted: SDMEstimator with its defaults against the usual rivals, on the same points, under the same promise.

    python benchmarks/selective.py --output docs/results/selective [--cache EMBEDDINGS] [--seeds 5]

Every data set is split 60 / 40 into points to fit on and test points, anew for each seed. Part of the former is held out for
the certificate (as SDMEstimator does by itself); every method gets the same parts. Each method gives a prediction and a score
for a point. A threshold on the score is certified at alpha 0.95 and delta 0.05, for all accepted ("overall") and for each
predicted class ("predicted"). Columns: accuracy of all test points; AUROC of the score for right against wrong; coverage
(the share accepted) and the accuracy among the accepted; the share of shifted points that is wrongly accepted. The lines of
OUTPUT.jsonl have more: all measures of the score (`sdmlm.evaluation.metrics`), those of the probabilities for SDM and the logistic
regression, and how well d and q' tell shifted points from known ones.

Designs were chosen on the data sets of DEVELOPMENT (with other seeds); the others were only looked at with this script.
Resumable: what is in OUTPUT.jsonl is not computed again. Writes OUTPUT.jsonl, OUTPUT.md and OUTPUT.svg.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from selective_data import DataSet, data_sets

from sdmlm import SDMEstimator
from sdmlm.estimator.acceptance import Promise, least_points
from sdmlm.estimator.splits import held_out_split
from sdmlm.evaluation.certified import rival_methods, sdm_method
from sdmlm.evaluation.embedding_baselines import fit_logistic
from sdmlm.evaluation.metrics import calibration_measures, fpr_at_95, score_measures, shift_auroc

ALPHA, DELTA = 0.95, 0.05
PROMISES: tuple[Promise, ...] = ("overall", "predicted")
DEVELOPMENT = ("digits", "breast cancer", "3% label noise", "20 classes", "6 classes in clusters", "moons",
               "docstrings-minilm", "polarity-minilm")  # fmt: skip
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def run(data: DataSet, seed: int) -> list[dict[str, Any]]:
    """One line for each method on one split of a data set."""
    rng = np.random.default_rng([seed, 7])
    order = rng.permutation(len(data.X))
    fit, test = order[: int(0.6 * len(order))], order[int(0.6 * len(order)) :]
    n_classes = int(data.y.max()) + 1
    kept, held = held_out_split(data.y[fit], least_points(ALPHA, DELTA), rng)
    X, y, X_held, y_held = data.X[fit][kept], data.y[fit][kept], data.X[fit][held], data.y[fit][held]
    X_test, y_test = data.X[test], data.y[test]
    shifts = {}
    for name, (X_shift, y_shift, source) in data.shifts.items():
        fresh = np.ones(len(y_shift), dtype=bool) if source is None else np.isin(source, test)
        shifts[name] = X_shift[fresh], y_shift[fresh]
    lines = []
    head = {"data": data.name, "seed": seed, "n": len(X), "held_out": len(X_held), "classes": n_classes}

    start = time.perf_counter()
    estimator = SDMEstimator(alpha=ALPHA, delta=DELTA, seed=seed, progress=False)
    estimator.fit(X, y, held_out=(X_held, y_held) if len(X_held) else None)
    seconds = time.perf_counter() - start
    scores = estimator.score(X_test)
    shifted = {name: estimator.score(x) for name, (x, _) in shifts.items()}
    for name, inside, far in (
        ("SDM, HR region", scores.in_region, [s.in_region for s in shifted.values()]),
        ("SDM, HR lower", scores.accepted_lower, [s.accepted_lower for s in shifted.values()]),
    ):
        line = {**head, "method": name, **_quality(scores.confidence, scores.prediction, y_test)}
        wrong = [
            (mask & (s.prediction != shifts[k][1])).mean() for mask, (k, s) in zip(far, shifted.items(), strict=True)
        ]
        for promise in PROMISES:
            line |= {
                **_outcome(promise, inside, scores.prediction == y_test),
                f"{promise} shifted": float(np.mean(wrong)),
            }
        lines.append(line)
    for name, method in {"SDM": sdm_method(estimator), **rival_methods(X, y, seed)}.items():
        new, away = method.score(X_test), {k: method.score(x) for k, (x, _) in shifts.items()}
        line = {**head, "method": name, **_quality(new.confidence, new.predictions, y_test)}
        for promise in PROMISES:
            rule = method.rule(X_held, y_held, n_classes, ALPHA, DELTA, promise)
            line |= _outcome(promise, rule.accepts(new), new.predictions == y_test)
            wrong = [(rule.accepts(e) & (e.predictions != shifts[k][1])).mean() for k, e in away.items()]
            line[f"{promise} shifted"] = float(np.mean(wrong))
        if name == "SDM":
            line["seconds"] = seconds
            line |= calibration_measures(scores.p, y_test)
            for signal in ("d", "q_prime"):
                known, far = getattr(scores, signal), [getattr(e, signal) for e in shifted.values()]
                line[f"shift AUROC of {signal}"] = float(np.mean([shift_auroc(known, f) for f in far]))
                line[f"shift FPR95 of {signal}"] = float(np.mean([fpr_at_95(known, f) for f in far]))
            line["known points below the Distance bound"] = 1 - float(rule.near_enough(new.d).mean())
        if name == "logistic regression":
            line |= calibration_measures(fit_logistic((X, y)).predict_proba(X_test), y_test)
        lines.append(line)
    return sorted(lines, key=lambda line: line["method"] != "SDM")


def _quality(score: Floats, prediction: Ints, y: Ints) -> dict[str, float]:
    right, finite = prediction == y, np.where(np.isfinite(score), score, -1e9)
    return {"accuracy": float(right.mean()), **score_measures(finite, right)}


def _outcome(promise: str, accepted: NDArray[np.bool_], right: NDArray[np.bool_]) -> dict[str, Any]:
    return {
        f"{promise} coverage": float(accepted.mean()),
        f"{promise} accuracy": float(right[accepted].mean()) if accepted.any() else None,
        f"{promise} accepted": int(accepted.sum()),
        f"{promise} right": int((right & accepted).sum()),
    }


def table(lines: list[dict[str, Any]]) -> str:
    """The tables of docs/results.md."""
    import pandas as pd  # type: ignore[import-untyped]

    frame = pd.DataFrame(lines)
    out = []
    for title, part in (
        ("All data sets", frame),
        ("Chosen on (development)", frame[frame["data"].isin(DEVELOPMENT)]),
        ("Not looked at before", frame[~frame["data"].isin(DEVELOPMENT)]),
    ):
        if not len(part):
            continue
        groups = part.groupby("method", sort=False)
        columns = [
            "accuracy",
            "auroc",
            "aurc",
            "overall coverage",
            "overall shifted",
            "predicted coverage",
            "predicted shifted",
        ]
        means = groups[columns].mean()
        pooled = groups[["overall right", "overall accepted"]].sum()
        means["accuracy of accepted"] = pooled["overall right"] / pooled["overall accepted"]
        spread = part.groupby(["method", "data"], sort=False)["overall coverage"].std().groupby("method").mean()
        means["sd over seeds"] = spread
        out.append(
            f"{title} ({part['data'].nunique()} data sets, {part['seed'].nunique()} seeds)\n\n{_markdown(means)}"
        )
    by_data = frame.pivot_table(index="data", columns="method", values="overall coverage", sort=False)
    out.append(f"Coverage certified overall, by data set\n\n{_markdown(by_data)}")
    return "\n\n".join(out) + "\n"


def _markdown(frame: Any) -> str:
    head = [frame.index.name or "", *map(str, frame.columns)]
    rows = [
        [str(i), *("-" if v != v else f"{v:.3f}" for v in values)]
        for i, values in zip(frame.index, frame.values, strict=True)
    ]
    body = [f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]
    return "\n".join(body)


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Coverage against shifted points wrongly accepted: right and low is good."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas as pd  # type: ignore[import-untyped]

    means = pd.DataFrame(lines).groupby("method", sort=False)[["overall coverage", "overall shifted"]].mean()
    figure, axes = plt.subplots(figsize=(6, 4))
    for name, (coverage, shifted) in zip(means.index, means.values, strict=True):
        axes.scatter(coverage, shifted, color="C1" if str(name).startswith("SDM") else "C0")
        axes.annotate(str(name), (coverage, shifted), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set_xlabel("share of test points accepted (certified at alpha 0.95)")
    axes.set_ylabel("share of shifted points wrongly accepted")
    figure.tight_layout()
    figure.savefig(path)


def read(store: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []


def known(store: Path, name: str, seed: int) -> bool:
    """Whether the file has the lines of a data set and seed."""
    return any((line["data"], line["seed"]) == (name, seed) for line in read(store))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="embeddings made by selective_data.py")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", help="part of the name of a data set")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    store = args.output.with_suffix(".jsonl")
    store.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for data in data_sets(args.cache):
            if known(store, data.name, seed) or (args.only and args.only not in data.name):
                continue
            new = run(data, seed)
            if known(store, data.name, seed):
                continue  # another process was first
            with store.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in new)
            print(data.name, seed, f"{new[0]['seconds']:.1f} s, coverage {new[0]['overall coverage']:.2f}", flush=True)
    lines = read(store)
    args.output.with_suffix(".md").write_text(table(lines))
    plot(lines, args.output.with_suffix(".svg"))
    print(table(lines))


if __name__ == "__main__":
    main()
