"""What SDMEstimator() costs with its defaults, all layers and the certificate included: time and memory against the number of points.

    python benchmarks/scaling.py --output docs/results/scaling [--sizes 1000 3000 10000 30000 100000]

Three kinds of data: scikit-learn's digits; 2,000 points with 384 columns and 6 classes; and N points with 256 columns and 10 classes. Each is
fitted in a process of its own. A ratio is CPU time / CPU time of scikit-learn's logistic regression on the same points (standardised,
one fit). CPU time is that of all threads, so it hardly depends on what else the machine does; wall time does. A single point is
the median of 200. Resumable: what is in OUTPUT.json is not measured again. Writes OUTPUT.json, OUTPUT.md and OUTPUT.svg.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits, make_classification

from sdmlm import SDMEstimator
from sdmlm.evaluation.embedding_baselines import fit_logistic

SIZES = [1_000, 3_000, 10_000, 30_000, 100_000]
COLUMNS = {
    "cpu_seconds": "fit, CPU s",
    "wall_seconds": "fit, wall s",
    "ratio": "ratio to logistic regression",
    "memory_mb": "peak memory, MB",
    "one_point_cpu_ms": "one point, CPU ms",
    "one_point_wall_ms": "one point, wall ms",
}


def points(name: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The data of a measurement: "digits", or "N x D"."""
    if name == "digits":
        X, y = load_digits(return_X_y=True)
    else:
        n, width = (int(part.replace(",", "")) for part in name.split(" x "))
        classes = 6 if width == 384 else 10
        X, y = make_classification(
            n, width, n_informative=24, n_classes=classes, n_clusters_per_class=1, class_sep=2.0, random_state=0
        )
    return X.astype(np.float32), y.astype(np.int64)


def cpu(call: Callable[[], Any]) -> tuple[float, float]:
    """(CPU seconds of all threads, wall seconds)."""
    start = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - start[0], time.perf_counter() - start[1]


def measure(name: str) -> dict[str, Any]:
    """Fit, score single points, and the reference."""
    X, y = points(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    estimator = SDMEstimator(progress=False)
    fit = cpu(lambda: estimator.fit(X, y))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    estimator.score(X[:1])
    one = np.array([cpu(lambda i=i: estimator.score(X[i : i + 1])) for i in range(200)])  # type: ignore[misc]
    reference = cpu(lambda: fit_logistic((X, y)))
    median = 1000 * np.median(one, axis=0)
    return {
        "name": name,
        "layers": len(estimator.layers_),
        "cpu_seconds": fit[0],
        "wall_seconds": fit[1],
        "ratio": fit[0] / reference[0],
        "memory_mb": peak - before,
        "one_point_cpu_ms": float(median[0]),
        "one_point_wall_ms": float(median[1]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    head = ["points", "layers", *COLUMNS.values()]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    lines += [[row["name"], str(row["layers"]), *(f"{row[name]:.3g}" for name in COLUMNS)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """CPU time against N."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sized = sorted((int(r["name"].split(" x ")[0].replace(",", "")), r) for r in rows if r["name"].endswith("x 256"))
    sizes = [n for n, _ in sized]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.loglog(sizes, [r["cpu_seconds"] for _, r in sized], "o-", label="SDMEstimator(), all layers")
    axes.loglog(sizes, [r["cpu_seconds"] / r["ratio"] for _, r in sized], "o-", label="logistic regression, one fit")
    axes.set_xlabel("points (256 columns, 10 classes)")
    axes.set_ylabel("CPU seconds to fit")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    store = args.output.with_suffix(".json")
    rows: list[dict[str, Any]] = json.loads(store.read_text()) if store.exists() else []
    for name in ["digits", "2,000 x 384", *(f"{n:,} x 256" for n in args.sizes)]:
        if name in {row["name"] for row in rows}:
            continue
        command = [sys.executable, __file__, "--output", str(args.output), "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        store.write_text(json.dumps(rows, indent=1) + "\n")
        print(table(rows[-1:]), flush=True)
    args.output.with_suffix(".md").write_text(table(rows))
    plot(rows, args.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
