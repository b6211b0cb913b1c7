"""Tables of the runs of benchmarks/loss_runs.py, from the small files in docs/results: what each form of the loss changes.

    python benchmarks/loss_tables.py > docs/results/loss.md

Differences are paired by seed, with their 95% interval (Student's t). "80% power": a true difference of this size would have given an interval without 0 in
four of five such experiments, if the seeds spread as they do here.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.optimize import brentq
from scipy.stats import nct, t

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PAIRS = {
    "demo": "loss-demo.json",
    "demo, ten epochs": "loss-demo-slow.json",
    "stories15m": "loss-stories15m.json",
    "stories15m, half of the rows": "loss-stories15m-4000.json",
    "SmolLM2-135M": "loss-smollm2.json",
}
FORMS = {"demo": "loss-demo-forms.json", "stories15m, half of the rows": "loss-stories15m-4000.json"}
Run = Mapping[str, Any]


def stored(files: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The files that there are, by the name of the model."""
    paths = {name: RESULTS / file for name, file in files.items()}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def over_draws(run: Run, layers: str, test: str, measure: str, k: int | None = None) -> float:
    """A measure of the region, averaged over the draws of the documents; `layers`: region (averaged ones) or published."""
    values = [draw[test][measure] for draw in run[layers]]
    return statistics.fmean(number(value if k is None else value[k]) for value in values)


def number(value: float | None) -> float:
    """NaN for a measure that does not exist, such as the AUROC where no answer is right."""
    return math.nan if value is None else value


def measures(file: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(name, function of a run and a test set, number format) of what a file holds; shares in points."""
    more = "published" in file["runs"][0]
    for alpha in (0.9, 0.95):
        k = file["alphas"].index(alpha)
        at = f", alpha {alpha:g}"
        yield f"region{at}", lambda run, test, k=k: 100 * over_draws(run, "region", test, "accepted", k), ".1f"
        if more:
            yield f"region, Yes{at}", lambda run, test, k=k: 100 * over_draws(run, "region", test, "yes", k), ".1f"
            yield (
                f"published{at}",
                lambda run, test, k=k: 100 * over_draws(run, "published", test, "accepted", k),
                ".1f",
            )
        yield f"certified{at}", lambda run, test, k=k: 100 * run["certified"][test]["accepted"][k], ".1f"
        yield f"certified and right{at}", lambda run, test, k=k: 100 * run["certified"][test]["right"][k], ".1f"
    yield "answers right", lambda run, test: 100 * run["right"][test], ".1f"
    yield "AUROC, region", lambda run, test: over_draws(run, "region", test, "auroc"), ".3f"
    yield "AURC, region", lambda run, test: over_draws(run, "region", test, "aurc"), ".4f"
    if more:
        yield "AUROC, published", lambda run, test: over_draws(run, "published", test, "auroc"), ".3f"
    yield "AUROC, certified", lambda run, test: number(run["certified"][test]["auroc"]), ".3f"
    yield "AURC, certified", lambda run, test: number(run["certified"][test]["aurc"]), ".4f"
    if more:
        for k, accuracy in enumerate(file["accuracies"]):
            yield (
                f"coverage at {accuracy:.0%} right, certified",
                lambda run, test, k=k: 100 * run["certified"][test]["coverage"][k],
                ".1f",
            )
    yield "mean q", lambda run, test: over_draws(run, "region", test, "mean_q"), ".1f"


def interval(differences: Sequence[float]) -> float | None:
    """Half of the 95% interval of their mean; None for fewer than two."""
    n = len(differences)
    return float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n) if n > 1 else None


def detectable(differences: Sequence[float], power: float = 0.8) -> float | None:
    """The true difference that such an experiment shows with this probability; None for fewer than three or equal ones."""
    n = len(differences)
    if n < 3 or len(set(differences)) == 1:
        return None
    limit = t.ppf(0.975, n - 1)
    shift = brentq(lambda c: nct.sf(limit, n - 1, c) - power, 0, 100)
    return float(shift * statistics.stdev(differences) / math.sqrt(n))


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
        for measure, value, spec in measures(file):
            both = [(value(a, test), value(b, test)) for a, b in found]
            differences = [a - b for a, b in both]
            mean, half = statistics.fmean(differences), interval(differences)
            shown = f"{mean:+{spec}}"
            if half is not None:
                shown += f" ({mean - half:+{spec}} to {mean + half:+{spec}})"
            form_mean, base_mean = (statistics.fmean(column) for column in zip(*both, strict=True))
            least = detectable(differences)
            power = "-" if least is None else f"{least:{spec}}"
            cells = (name, test, measure, str(len(found)), f"{base_mean:{spec}}", f"{form_mean:{spec}}", shown, power)
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def form_rows(file: Mapping[str, Any], test: str, seed: int | None = None) -> list[str]:
    """A row for each form: one seed, or means over all."""
    rows = []
    for form in dict.fromkeys(run["form"] for run in file["runs"]):
        runs = [run for run in file["runs"] if run["form"] == form and seed in (None, run["seed"])]
        cells = [form, str(len(runs))]
        for measure, value, spec in measures(file):
            if shown_for_forms(measure):
                mean = statistics.fmean(value(run, test) for run in runs)
                cells.append("-" if math.isnan(mean) else f"{mean:{spec}}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def shown_for_forms(measure: str) -> bool:
    """Whether the tables of the forms have a column for a measure."""
    return not measure.startswith(("AURC", "certified and right"))


def form_table(file: Mapping[str, Any], test: str, seed: int | None = None) -> str:
    """The rows of all forms under their header."""
    used = [measure for measure, _, _ in measures(file) if shown_for_forms(measure)]
    return "\n".join([header("form", "seeds", *used), *form_rows(file, test, seed)])


def print_forms(file: Mapping[str, Any], tests: Sequence[str]) -> None:
    """Print the means of all forms on each test set."""
    for test in tests:
        print(f"\n{test}\n{form_table(file, test)}")


def header(*names: str) -> str:
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("# Runs of the loss\n\nMade by `python benchmarks/loss_tables.py`. Shares and answers right are in percent.")
    for form, files in (("sdm", stored(PAIRS)), ("through", stored(FORMS))):
        rows = [row for name, file in files.items() for row in pair_rows(name, file, form)]
        print(f"\n## `{form}` against cross-entropy (`ce`), paired by seed\n")
        print(
            header(
                "model", "test set", "measure", "pairs", "`ce`", f"`{form}`", "difference (95% interval)", "80% power"
            )
        )
        print("\n".join(rows))
    for name, file in stored(FORMS).items():
        print(f"\n## All forms, {name}, test set, seed 0\n\n{form_table(file, 'test', 0)}")


if __name__ == "__main__":
    main()
