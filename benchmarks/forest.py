"""Does the SDM loss help? A forest plot of all models and seeds there are, from the small files in docs/results.

    python benchmarks/forest.py --output docs/results/loss-effect.svg

Each line is the share of the test answers that SDM layers accept after fine-tuning with the SDM loss, minus that after cross-entropy (both
with hard negatives), in points. A small dot is a seed, averaged over the layers fitted on its two language models; the large dot is the
mean over the seeds, the bar its 95% interval (Student's t, paired by seed) where there are three seeds or more.
The paper's figures have no seeds. It prints the lines as a table too; the last column is the difference that would have shown in four of five such
experiments.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loss_tables import PAIRS, RESULTS, detectable, interval, measures, pairs, stored
from matplotlib import rc_context
from matplotlib.figure import Figure

from sdmlm.experiments.published import SELECTIVE

Line = tuple[str, list[float]]  # what was compared, and the difference of each seed in points


def unpacked(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def mean_share(layers: Iterable[dict[str, Any]], alpha: int, answers: int) -> float:
    return 100 * statistics.fmean(layer["admitted"][alpha] / answers for layer in layers)


def spread_lines(path: Path, name: str) -> list[Line]:
    """From a file of benchmarks/spread.py."""
    spread, lines = json.loads(unpacked(path)), []
    for a, alpha in enumerate(spread["alphas"]):
        shares: dict[str, dict[int, float]] = {"ce_hn": {}, "sdm_hn": {}}
        for run in spread["runs"].values():
            layers = [layer["test"] for layer in run["layers"]]
            shares[run["setting"]][run["seed"]] = mean_share(layers, a, layers[0]["answers"])
        seeds = sorted(shares["sdm_hn"].keys() & shares["ce_hn"].keys())
        lines.append((f"{name}, alpha {alpha:g}", [shares["sdm_hn"][seed] - shares["ce_hn"][seed] for seed in seeds]))
    return lines


def pair_lines(name: str, file: dict[str, Any]) -> list[Line]:
    """From a file of benchmarks/loss_runs.py."""
    found, lines = pairs(file["runs"], "sdm"), []
    for measure, value, _ in measures(file):
        if measure.startswith(("region, alpha", "published, alpha", "certified, alpha")):
            lines.append((f"{name}, {measure}", [value(run, "test") - value(base, "test") for run, base in found]))
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
    for model, file in stored(PAIRS).items():
        lines += pair_lines(model, file)
    lines += spread_lines(RESULTS / "spread-stories15m.json.gz", "stories15m before it could copy")
    lines.append(table_line(RESULTS / "smollm2-135m.csv.gz", "SmolLM2-135M, alpha 0.95"))
    lines += paper_lines()
    for name, differences in lines:
        least = detectable(differences)
        shown = "-" if least is None else f"{least:.1f}"
        print(f"| {name} | {len(differences)} | {statistics.fmean(differences):+.1f} | {shown} |")
    plot(lines, args.output)


if __name__ == "__main__":
    main()
