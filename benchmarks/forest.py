"""Does the SDM loss help? A forest plot of all models and seeds there are, from the small files in docs/results.

    python benchmarks/forest.py --output docs/results/loss-effect.svg

Each line is the share of the test answers that SDM layers accept after fine-tuning with the SDM loss, minus that after cross-entropy (both
with hard negatives), in points. A small dot is a seed, averaged over the layers fitted on its two language models; the large dot is the
mean over the seeds, the bar its 95% interval (Student's t, paired by seed) where there are three seeds or more.
The paper's figures have no seeds. It prints the lines as a table too; the last column is half the interval: an effect of that size would have shown.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from scipy.stats import t

from sdmlm.experiments.published import SELECTIVE

RESULTS = Path(__file__).parents[1] / "docs" / "results"
Line = tuple[str, list[float]]  # what was compared, and the difference of each seed in points


def unpacked(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def mean_share(layers: Iterable[dict[str, Any]], alpha: int, answers: int) -> float:
    return 100 * statistics.fmean(layer["admitted"][alpha] / answers for layer in layers)


def paired(first: dict[int, float], second: dict[int, float]) -> list[float]:
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def spread_lines(path: Path, name: str) -> list[Line]:
    """From a file of benchmarks/spread.py."""
    stored, lines = json.loads(unpacked(path)), []
    for a, alpha in enumerate(stored["alphas"]):
        shares: dict[str, dict[int, float]] = {"ce_hn": {}, "sdm_hn": {}}
        for run in stored["runs"].values():
            layers = [layer["test"] for layer in run["layers"]]
            shares[run["setting"]][run["seed"]] = mean_share(layers, a, layers[0]["answers"])
        lines.append((f"{name}, alpha {alpha:g}", paired(shares["sdm_hn"], shares["ce_hn"])))
    return lines


def form_lines(path: Path, name: str) -> list[Line]:
    """From a file of benchmarks/loss_runs.py: each form of the SDM loss against cross-entropy."""
    if not path.exists():
        return []
    stored, lines = json.loads(unpacked(path)), []
    test = stored["settings"]["tests"][0]

    def share(run: dict[str, Any], what: str, a: int) -> float:
        of = run["region"] if what == "region" else [run["certified"]]
        return 100 * statistics.fmean(one[test]["accepted"][a] for one in of)

    for form, words in (("sdm", "SDM loss"), ("through", "and through the verdict")):
        for what, alpha in (("region", 0.9), ("region", 0.95), ("certified", 0.95)):
            a = stored["alphas"].index(alpha)
            shares: dict[str, dict[int, float]] = {"ce": {}, form: {}}
            for run in stored["runs"]:
                if run["form"] in shares:
                    shares[run["form"]][run["seed"]] = share(run, what, a)
            if differences := paired(shares[form], shares["ce"]):
                lines.append((f"{name}, {words}, {what}, alpha {alpha:g}", differences))
    return lines


def table_line(path: Path, name: str) -> Line:
    """From a table of `sdmlm tables`: one run of each setting."""
    rows = list(csv.DictReader(io.StringIO(unpacked(path))))
    share = {
        row["model"]: 100 * float(row["value"])
        for row in rows
        if (row["table"], row["dataset"], row["quantity"], row["seed"]) == ("selective", "test", "share", "0")
    }
    return name, [share["SDM + HN"] - share["CE + HN"]]


def paper_lines() -> list[Line]:
    def share(test: str, setting: str) -> float:
        return 100 * float(SELECTIVE[test, setting][1])

    names = {"test": "Wikipedia", "harvard": "Harvard", "shifted": "longest"}
    return [
        (f"paper, Phi-3.5-mini, {name}, alpha 0.95", [share(test, "sdm_hn") - share(test, "ce_hn")])
        for test, name in names.items()
    ]


def interval(differences: list[float]) -> float | None:
    """Half of the 95% interval of their mean."""
    n = len(differences)
    return float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n) if n > 1 else None


def plot(lines: list[Line], path: Path) -> None:
    figure = Figure(figsize=(8, 0.32 * len(lines) + 1.1), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color="0.6", linewidth=1)
    for y, (name, differences) in enumerate(lines):
        color = "0.35" if name.startswith("paper") else "C0"
        half = interval(differences) if len(differences) > 2 else None  # that of two seeds is wider than the plot
        if len(differences) > 1:
            axes.plot(differences, [y] * len(differences), "o", color=color, markersize=3, alpha=0.4)
        axes.errorbar(statistics.fmean(differences), y, xerr=half, fmt="o", color=color, capsize=3)
    axes.set_yticks(range(len(lines)), [name for name, _ in lines])
    axes.invert_yaxis()
    axes.set_xlabel("accepted with the SDM loss minus accepted with cross-entropy, points")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "sdmlm"}):  # text as text, and the same file every time
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    lines = spread_lines(RESULTS / "spread-demo.json.gz", "demo, open orders")
    for model in ("demo", "stories15m", "smollm2"):
        lines += form_lines(RESULTS / f"loss-{model}.json", f"{model}, averaged layers")
    lines += spread_lines(RESULTS / "spread-stories15m.json.gz", "stories15m")
    lines.append(table_line(RESULTS / "smollm2-135m.csv.gz", "SmolLM2-135M, alpha 0.95"))
    lines += paper_lines()
    for name, differences in lines:
        half = interval(differences)
        shown = "-" if half is None else f"{half:.1f}"
        print(f"| {name} | {len(differences)} | {statistics.fmean(differences):+.1f} | {shown} |")
    plot(lines, args.output)


if __name__ == "__main__":
    main()
