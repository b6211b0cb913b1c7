"""Tables of the runs of benchmarks/loss_runs.py, from the small files in docs/results: what each form of the loss changes.

    python benchmarks/loss_tables.py > docs/results/loss.md

Differences are paired by seed, with their 95% interval (Student's t). An effect of half the width of that interval would have shown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t

RESULTS = Path(__file__).parents[1] / "docs" / "results"
FILES = {
    "demo": "loss-demo.json",
    "stories15m": "loss-stories15m.json",
    "SmolLM2-135M": "loss-smollm2.json",
}
Run = Mapping[str, Any]


def stored() -> dict[str, dict[str, Any]]:
    """The files that there are, by the name of the model."""
    paths = {name: RESULTS / file for name, file in FILES.items()}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def region(run: Run, test: str, measure: str, k: int | None = None) -> float:
    """A measure of the papers' region, averaged over the draws of the documents; `k` is the position of alpha."""
    values = [draw[test][measure] for draw in run["region"]]
    return statistics.fmean(number(value if k is None else value[k]) for value in values)


def number(value: float | None) -> float:
    """NaN for a measure that does not exist, such as the AUROC where no answer is right."""
    return math.nan if value is None else value


def measures(alphas: Sequence[float]) -> Iterator[tuple[str, Any, str]]:
    """(name, function of a run and a test set, number format); shares in points."""
    for alpha in (0.9, 0.95):
        k = alphas.index(alpha)
        yield f"region, alpha {alpha:g}", lambda run, test, k=k: 100 * region(run, test, "accepted", k), ".1f"
        yield (
            f"certified, alpha {alpha:g}",
            lambda run, test, k=k: 100 * run["certified"][test]["accepted"][k],
            ".1f",
        )
    yield "answers right", lambda run, test: 100 * run["right"][test], ".1f"
    yield "AUROC, region", lambda run, test: region(run, test, "auroc"), ".3f"
    yield "AURC, region", lambda run, test: region(run, test, "aurc"), ".4f"
    yield "AUROC, certified", lambda run, test: number(run["certified"][test]["auroc"]), ".3f"
    yield "AURC, certified", lambda run, test: number(run["certified"][test]["aurc"]), ".4f"
    yield "mean q", lambda run, test: region(run, test, "mean_q"), ".1f"


def interval(differences: Sequence[float]) -> float | None:
    """Half of the 95% interval of their mean; None for fewer than two."""
    n = len(differences)
    return float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n) if n > 1 else None


def pairs(runs: Sequence[Run], form: str, base: str = "ce") -> list[tuple[Run, Run]]:
    """(run with the form, run with the base) of each seed that has both."""
    by = {(run["form"], run["seed"]): run for run in runs}
    return [(by[form, seed], by[base, seed]) for of, seed in sorted(by) if of == form and (base, seed) in by]


def pair_rows(name: str, file: Mapping[str, Any], form: str) -> list[str]:
    """A row for each test set and measure: cross-entropy, the form, the difference with its interval."""
    found, rows = pairs(file["runs"], form), []
    if not found:
        return []
    for test in file["settings"]["tests"]:
        for measure, value, spec in measures(file["alphas"]):
            both = [(value(a, test), value(b, test)) for a, b in found]
            differences = [a - b for a, b in both]
            mean, half = statistics.fmean(differences), interval(differences)
            shown = f"{mean:+{spec}}"
            if half is not None:
                shown += f" ({mean - half:+{spec}} to {mean + half:+{spec}})"
            form_mean, base_mean = (statistics.fmean(column) for column in zip(*both, strict=True))
            cells = (name, test, measure, str(len(found)), f"{base_mean:{spec}}", f"{form_mean:{spec}}", shown)
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def form_rows(file: Mapping[str, Any], seed: int | None, test: str = "test") -> list[str]:
    """A row for each form: means over its seeds, or one seed."""
    rows = []
    for form in dict.fromkeys(run["form"] for run in file["runs"]):
        runs = [run for run in file["runs"] if run["form"] == form and seed in (None, run["seed"])]
        cells = [form, str(len(runs))]
        for measure, value, spec in measures(file["alphas"]):
            if not measure.startswith("AURC"):
                mean = statistics.fmean(value(run, test) for run in runs)
                cells.append("-" if math.isnan(mean) else f"{mean:{spec}}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def header(*names: str) -> str:
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    files = stored()
    print("# Runs of the loss\n\nMade by `python benchmarks/loss_tables.py`. Shares and answers right are in percent.")
    for form in ("sdm", "through"):
        rows = [row for name, file in files.items() for row in pair_rows(name, file, form)]
        print(f"\n## `{form}` against cross-entropy (`ce`), paired by seed\n")
        print(header("model", "test set", "measure", "pairs", "`ce`", f"`{form}`", "difference (95% interval)"))
        print("\n".join(rows))
    for name, file in files.items():
        used = [measure for measure, _, _ in measures(file["alphas"]) if not measure.startswith("AURC")]
        for seed, which in ((None, "means over seeds"), (0, "seed 0")):
            print(f"\n## All forms, {name}, test set, {which}\n")
            print(header("form", "seeds", *used))
            print("\n".join(form_rows(file, seed)))


if __name__ == "__main__":
    main()
