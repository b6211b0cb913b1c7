"""The paper's four tables over runs, with intervals and spread, and a statement that compares two settings.

Within a run, intervals are 95% percentile intervals from resampled prompts (exact ones where all prompts agree). Over several seeds a number is given as mean,
standard deviation, smallest and largest.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from sdmlm.evaluation.metrics import (
    LATEX_TABLE,
    Cell,
    Row,
    SelectiveMetrics,
    Table,
    exact_bounds,
    latex_escape,
    markdown_rows,
    rounded,
    selective_metrics,
)
from sdmlm.experiments.runs import Run, dataset_order, setting_order

BOOTSTRAP = 1000
ALPHAS = (0.8, 0.85, 0.9, 0.95)  # at which two settings are compared, whatever alpha they were run with
FEW = 5  # seeds below which a statement says that they are few
_GROUPS = ("y=0", "y=1", "y_hat=0", "y_hat=1", "all")  # of the full table


# Numbers


@dataclass(frozen=True)
class Quantity:
    """A number by seed, None where there is none: accuracy if all was rejected, q'_min if it is infinite.

    `intervals` holds one (low, high) for each, or nothing for numbers that do not come from prompts. `weights`: of an
    accuracy, how many points it is over.
    """

    values: tuple[float | None, ...]
    intervals: tuple[tuple[float, float] | None, ...] = ()
    weights: tuple[int, ...] = ()

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float | None:
        """Over the seeds that have such a number."""
        return statistics.fmean(self.known) if self.known else None

    @property
    def sd(self) -> float | None:
        """The standard deviation between seeds (n - 1)."""
        return statistics.stdev(self.known) if len(self.known) > 1 else None

    @property
    def pooled(self) -> float | None:
        """An accuracy over the points of all seeds together: a seed with two points counts as two."""
        right = sum(value * n for value, n in zip(self.values, self.weights, strict=False) if value is not None)
        return right / sum(self.weights) if sum(self.weights) else None

    def json(self) -> dict[str, Any]:
        """Plain values."""
        bounds = [None if i is None else list(i) for i in self.intervals]
        out: dict[str, Any] = {"values": list(self.values), "intervals": bounds}
        if len(self.values) > 1:
            least, most = (min(self.known), max(self.known)) if self.known else (None, None)
            out |= {"mean": self.mean, "sd": self.sd, "min": least, "max": most}
            out |= {"pooled": self.pooled} if self.weights else {}
        return out

    def text(self, digits: int, none: str, brief: bool = False) -> str:
        """One seed: value [low, high]. Several: mean ± sd (min to max), pooled. Brief: value or mean alone."""
        if self.mean is None:
            return none

        def number(value: float) -> str:
            return rounded(value) if digits == 2 else f"{value:.{digits}f}"

        shown = number(self.mean)
        missing = len(self.values) - len(self.known)
        if brief:
            return f"{shown}, {none} in {missing}" if missing and none != "-" else shown
        if len(self.values) == 1:
            interval = self.intervals[0] if self.intervals else None
            return shown if interval is None else f"{shown} [{number(interval[0])}, {number(interval[1])}]"
        if self.sd is not None:
            shown += f" ± {self.sd:.{digits}f} ({number(min(self.known))} to {number(max(self.known))})"
            shown += "" if self.pooled is None else f", {number(self.pooled)} pooled"
        return f"{shown}, {none} in {missing} of {len(self.values)}" if missing else shown


def proportion(hits: NDArray[np.bool_], bootstrap: int, seed: int) -> tuple[float, tuple[float, float]]:
    """The share of hits and its percentile interval: resampling n points draws a binomial number of hits."""
    n, share = len(hits), float(hits.mean())
    if share in (0.0, 1.0):
        return share, exact_bounds(int(hits.sum()), n)
    low, high = np.percentile(np.random.default_rng(seed).binomial(n, share, size=bootstrap) / n, (2.5, 97.5))
    return share, (float(low), float(high))


@dataclass(frozen=True)
class Line:
    """A line of a table: one setting, on one test set and by one estimator where that matters, over its seeds."""

    table: str
    family: str
    setting: str
    model: str
    dataset: str
    estimator: str
    seeds: tuple[int, ...]
    quantities: dict[str, Quantity]

    def json(self) -> dict[str, Any]:
        """Plain values."""
        names = ("family", "setting", "model", "dataset", "estimator")
        plain: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name)}
        quantities = {name: quantity.json() for name, quantity in self.quantities.items()}
        return {**plain, "seeds": list(self.seeds), "quantities": quantities}


# The tables


@dataclass(frozen=True)
class Column:
    """How a quantity is shown."""

    head: str
    latex: str
    quantity: str
    digits: int = 2
    none: str = "-"


@dataclass(frozen=True)
class Layout:
    """How a table is shown."""

    title: str
    columns: tuple[Column, ...]
    caption: str
    by_alpha: bool = True  # whether alpha has a part in it


def _calibration_columns() -> Iterator[Column]:
    for head, latex, name, digits in (
        ("loss", r"\textsc{SDM} loss", "sdm_loss", 2),
        ("acc.", r"\textsc{Acc.}", "sdm_accuracy", 2),
        ("q", r"\textsc{Mean} $q$", "mean_q", 1),
        ("psi", r"$\psi$", "psi", 3),
    ):
        for c in (0, 1):
            yield Column(f"{head} {c}", rf"{latex} ($y={c}$)", f"{name}_{c}", digits)
    yield Column("q'min", r"$q'_{\min}$", "q_min", 1, "∞")


LAYOUTS = {
    "selective": Layout(
        "Selective classification in the high-reliability region",
        (Column("Acc.", r"\textsc{Acc.}", "accuracy", 2, "R"), Column("n/|D|", "$n/|D|$", "share")),
        "Accuracy among the admitted, and their share. R: all rejected. Pooled: over the admitted of all seeds.",
    ),
    "generation": Layout(
        "Generation",
        (
            Column("Sentence acc.", r"\textsc{Sentence Acc.}", "sentence"),
            Column("Exact match", r"\textsc{Exact Match}", "exact_match"),
        ),
        "How good the LM itself is, whatever the SDM layer says. Sentence acc.: the answer in its tags is right. Exact match: "
        "all that the LM wrote is, its own verdict included.",
        by_alpha=False,
    ),
    "calibration": Layout(
        "The final SDM layer over its calibration half",
        tuple(_calibration_columns()),
        "Over documents of class 0 (wrong answers) and class 1 (right ones): SDM loss, accuracy, mean q (how many of the nearest "
        "known documents agree), and the thresholds psi and q'min. q'min ∞: none reaches alpha, so everything is rejected.",
    ),
}


@dataclass(frozen=True)
class Tables:
    """The paper's tables: `lines` has those of "selective", "generation", "full" and "calibration" in turn."""

    alpha: float
    lines: tuple[Line, ...]
    comparisons: tuple[Comparison, ...]
    by_alpha: tuple[Comparison, ...]  # the same at ALPHAS

    def of(self, table: str) -> list[Line]:
        """The lines of one table."""
        return [line for line in self.lines if line.table == table]

    def full(self) -> Table:
        """The class- and prediction-conditional table; over several seeds accuracies are pooled, shares are means."""
        rows, lines = [], self.of("full")
        whole = {(line.family, line.setting, line.dataset): line for line in lines if line.estimator == "no-reject"}
        for line in lines:
            points = whole[line.family, line.setting, line.dataset].quantities
            cells = [_pooled_cell(line, group, points[f"{group} n"]) for group in _GROUPS]
            metrics = SelectiveMetrics((cells[0], cells[1]), (cells[2], cells[3]), cells[4])
            rows.append(Row(line.dataset, line.model, line.estimator, metrics))
        return Table(rows, self.alpha, ["0", "1"], max(len(line.seeds) for line in lines))

    def json(self) -> dict[str, Any]:
        """Everything, by seed and over the seeds."""
        names = dict.fromkeys(line.table for line in self.lines)
        tables = {name: [line.json() for line in self.of(name)] for name in names}
        pairs = {"comparisons": self.comparisons, "by_alpha": self.by_alpha}
        return {"alpha": self.alpha, "tables": tables, **{k: [c.json() for c in v] for k, v in pairs.items()}}

    def _points(self) -> dict[tuple[str, str, str, int], dict[str, float | None]]:
        """How many points of each group there are, by family, setting, test set and seed."""
        whole = [line for line in self.of("full") if line.estimator == "no-reject"]
        return {
            (line.family, line.setting, line.dataset, seed): {
                group: line.quantities[f"{group} n"].values[i] for group in _GROUPS
            }
            for line in whole
            for i, seed in enumerate(line.seeds)
        }

    def csv(self) -> str:
        """One number a line; `seed` is mean, sd, min or max where it is over the seeds, `mark` says why there is none."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["table", "dataset", "model", "estimator", "seed", "quantity", "value", "low", "high", "mark"])
        points = self._points()
        for line in self.lines:
            for name, quantity in line.quantities.items():
                names = [line.table, line.dataset, line.model, line.estimator]
                for i, (seed, value) in enumerate(zip(line.seeds, quantity.values, strict=True)):
                    interval = quantity.intervals[i] if quantity.intervals else None
                    known = points.get((line.family, line.setting, line.dataset, seed), {})
                    mark = None if value is not None else _mark(name, known)
                    writer.writerow([*names, seed, name, value, *(interval or (None, None)), mark])
                plain = quantity.json()
                for kind in ("mean", "sd", "min", "max", "pooled"):
                    if kind in plain:
                        writer.writerow([*names, kind, name, plain[kind], None, None, None])
        several = len({line.family for line in self.lines}) > 1
        own = [(c.family, c.dataset, c.alpha) for c in self.comparisons]  # alpha may be one of ALPHAS
        for c in (*self.comparisons, *(c for c in self.by_alpha if (c.family, c.dataset, c.alpha) not in own)):
            label = f"{c.family}: " if several else ""
            estimator = f"HR at alpha {c.alpha:g}"
            for i, model in enumerate((c.first, c.second)):
                names = ["comparison", c.dataset, label + model, estimator]
                for seed, share, accuracy in zip(c.seeds, c.shares, c.accuracies, strict=True):
                    rejected = "all rejected" if accuracy[i] is None else None
                    writer.writerow([*names, seed, "share", share[i], None, None, None])
                    writer.writerow([*names, seed, "accuracy", accuracy[i], None, None, rejected])
            difference = [f"{label}{c.first} minus {c.second}", estimator, "mean", "share", c.mean, *c.interval]
            writer.writerow(["comparison", c.dataset, *difference, None])
        return out.getvalue()

    def latex(self) -> str:
        """All four, for booktabs."""
        parts = [self._latex("selective"), self._latex("generation"), self.full().latex(), self._latex("calibration")]
        return "\n".join(parts)

    def _latex(self, table: str) -> str:
        layout = LAYOUTS[table]
        names = 1 if table == "calibration" else 2
        heads = ["Dataset", "Model"][2 - names :] + [column.latex for column in layout.columns]
        lines = [
            r"% \usepackage{booktabs,graphicx}",
            LATEX_TABLE,
            rf"\begin{{tabular}}{{{'l' * names}{'c' * len(layout.columns)}}}\toprule",
            " & ".join(heads) + r" \\",
        ]
        before = None
        for line in self.of(table):
            if line.dataset != before:
                lines.append(r"\midrule")
            before = line.dataset
            escaped = [_latex_number(_shown(line, column)) for column in layout.columns]
            lines.append(" & ".join([*map(latex_escape, [line.dataset, line.model][2 - names :]), *escaped]) + r" \\")
        alpha = rf", $\alpha={self.alpha:g}$" if layout.by_alpha else ""
        caption = rf"{latex_escape(layout.title)}{alpha}. {_latex_number(layout.caption)}"
        return "\n".join([*lines, r"\bottomrule\end{tabular}}", rf"\caption{{{caption}}}", r"\end{table*}", ""])

    def markdown(self) -> str:
        """All four for a page, and what the comparisons say."""
        full = "By class and by prediction: accuracy among the admitted (their share), bold below alpha"
        parts = [
            self._markdown("selective"),
            self._markdown("generation"),
            f"**{full} = {self.alpha:g}.** {self.full().marks()}.\n\n{self.full().markdown()}",
            self._markdown("calibration"),
            *(comparison.statement() + "\n" for comparison in self.comparisons),
        ]
        return "\n".join(parts)

    def _markdown(self, table: str) -> str:
        layout = LAYOUTS[table]
        names = [] if table == "calibration" else ["Dataset"]
        heads = [*names, "Model", *(column.head for column in layout.columns)]
        lines = [heads, ["---"] * (len(names) + 1) + ["---:"] * len(layout.columns)]
        for line in self.of(table):
            shown = [_shown(line, column, brief=table == "calibration") for column in layout.columns]
            lines.append([*([line.dataset] if names else []), line.model, *shown])
        return f"**{self.title(table)}.** {layout.caption}\n\n{markdown_rows(lines).replace('<', '&lt;')}"

    def title(self, table: str) -> str:
        """What a table is about, and alpha where it has a part in it."""
        layout = LAYOUTS[table]
        return layout.title + (f", alpha = {self.alpha:g}" if layout.by_alpha else "")

    def rich(self) -> list[RichTable]:
        """For a terminal, in the order of the paper."""
        return [self._rich("selective"), self._rich("generation"), self.full().rich(), self._rich("calibration")]

    def _rich(self, table: str) -> RichTable:
        layout = LAYOUTS[table]
        out = RichTable(
            title=layout.title,
            title_justify="left",
            caption=layout.caption,
            box=box.SIMPLE_HEAD,
            padding=0,
            min_width=60,
        )
        out.add_column("Model", no_wrap=True)
        for column in layout.columns:
            out.add_column(Text(column.head), justify="right")
        before = None
        for line in self.of(table):
            if line.dataset and line.dataset != before:
                out.add_section()
                out.add_row(Text(line.dataset, "bold"))
            before = line.dataset
            # The calibration table has nine columns: in a terminal there is no room for more than the means.
            cells = [_shown(line, column, brief=table == "calibration") for column in layout.columns]
            out.add_row(Text(f" {line.model}"), *(Text(f" {cell}") for cell in cells))
        return out


def _shown(line: Line, column: Column, brief: bool = False) -> str:
    return line.quantities[column.quantity].text(column.digits, column.none, brief)


def _latex_number(text: str) -> str:
    return latex_escape(text).replace("±", r"$\pm$").replace("∞", r"$\infty$").replace(r"\textless{}", "$<$")


def _mark(quantity: str, points: Mapping[str, float | None]) -> str:
    """Why a number of one seed is missing; `points` is how many there are in each group."""
    if not quantity.endswith("accuracy"):
        return "infinite"  # a threshold
    return "all rejected" if points.get(quantity.split()[0] if " " in quantity else "all") else "no points"


def _pooled_cell(line: Line, group: str, points: Quantity) -> Cell:
    """Of one seed with its interval, of several with their range; `points` are those that could be admitted, by seed.

    Pooled, as a mean over seeds would let a seed that admits one answer weigh as much as one that admits a hundred.
    """
    accuracy, share, n = (line.quantities[f"{group} {what}"] for what in ("accuracy", "share", "n"))
    low, high = accuracy.intervals[0] or (None, None)
    if len(line.seeds) > 1 and accuracy.known:
        low, high = min(accuracy.known), max(accuracy.known)
    rejected = sum(value is None and bool(some) for value, some in zip(accuracy.values, points.values, strict=True))
    # R alone says that all seeds reject all
    return Cell(
        round(n.mean or 0),
        share.mean or 0.0,
        accuracy.pooled,
        low,
        high,
        not points.mean,
        rejected if accuracy.known else 0,
    )


def tables(runs: Sequence[Run], bootstrap: int = BOOTSTRAP, seed: int = 0) -> Tables:
    """The paper's tables over runs; those of one family and setting that differ in the seed share their lines."""
    if not runs:
        raise ValueError("There are no runs to make tables of.")
    alphas = sorted({run.alpha for run in runs})
    if len(alphas) > 1:
        raise ValueError(f"The runs have alpha {' and '.join(f'{a:g}' for a in alphas)}: tables need one alpha.")
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.family, setting_order(run.setting), run.seed)):
        groups.setdefault((run.family, run.setting), []).append(run)
    several = len({family for family, _ in groups}) > 1
    lines = [
        line
        for (family, _), group in groups.items()
        for line in _lines(group, f"{family}: {group[0].label}" if several else group[0].label, bootstrap, seed)
    ]
    order = ("selective", "generation", "full", "calibration")
    lines.sort(
        key=lambda line: (order.index(line.table), dataset_order(line.dataset))
    )  # stable: the rest stays in order
    by_alpha = [c for alpha in ALPHAS for c in compare(runs, alpha, bootstrap=bootstrap, seed=seed)]
    by_alpha.sort(key=lambda c: (c.family, dataset_order(c.dataset)))
    return Tables(alphas[0], tuple(lines), tuple(compare(runs, bootstrap=bootstrap, seed=seed)), tuple(by_alpha))


def _lines(group: list[Run], model: str, bootstrap: int, seed: int) -> Iterator[Line]:
    """All lines of one setting."""
    first = group[0]

    def line(table: str, dataset: str, estimator: str, runs: list[Run], quantities: dict[str, Quantity]) -> Line:
        seeds = tuple(run.seed for run in runs)
        return Line(table, first.family, first.setting, model, dataset, estimator, seeds, quantities)

    for dataset in sorted({name for run in group for name in run.evaluations}, key=dataset_order):
        runs = [run for run in group if dataset in run.evaluations]
        found = [run.evaluations[dataset] for run in runs]

        def share(name: str, among: Any = found) -> Quantity:
            pairs = [proportion(getattr(e, name), bootstrap, seed) for e in among]
            return Quantity(tuple(value for value, _ in pairs), tuple(interval for _, interval in pairs))

        for estimator in found[0].estimators():
            metrics = [
                selective_metrics(e.y, e.prediction, e.estimators()[estimator], 2, bootstrap, seed) for e in found
            ]
            cells = [[*m.class_conditional, *m.prediction_conditional, m.marginal] for m in metrics]
            full = {}
            for i, name in enumerate(_GROUPS):
                column = [by_seed[i] for by_seed in cells]
                full[f"{name} accuracy"] = Quantity(
                    tuple(c.accuracy for c in column), tuple(map(_interval, column)), tuple(c.n for c in column)
                )
                full[f"{name} share"] = Quantity(tuple(c.share for c in column))
                full[f"{name} n"] = Quantity(tuple(float(c.n) for c in column))
            yield line("full", dataset, estimator, runs, full)
            if estimator == "HR":
                pair = {"accuracy": full["all accuracy"], "share": share("accepted")}
                yield line("selective", dataset, "", runs, pair)
        generation = {"sentence": share("answer_right"), "exact_match": share("exact_match")}
        yield line("generation", dataset, "", runs, generation)
    names = [column.quantity for column in LAYOUTS["calibration"].columns]
    yield line(
        "calibration",
        "",
        "",
        group,
        {name: Quantity(tuple(_known(r.calibration[name]) for r in group)) for name in names},
    )


def _interval(cell: Cell) -> tuple[float, float] | None:
    return None if cell.low is None or cell.high is None else (cell.low, cell.high)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


# The comparison


@dataclass(frozen=True)
class Comparison:
    """Does the first setting admit more than the second? Paired by seed, on one test set."""

    family: str
    dataset: str
    first: str
    second: str
    alpha: float
    seeds: tuple[int, ...]
    shares: tuple[tuple[float, float], ...]  # admitted by the first and by the second, for each seed
    accuracies: tuple[tuple[float | None, float | None], ...]  # among the admitted
    pooled: tuple[float | None, float | None]  # among the admitted of all seeds together
    interval: tuple[float, float]  # 95%: over resampled prompts (bootstrap), and over the seeds (Student's t) if wider

    @property
    def differences(self) -> list[float]:
        return [first - second for first, second in self.shares]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def sd(self) -> float | None:
        return statistics.stdev(self.differences) if len(self.seeds) > 1 else None

    def below(self, which: int) -> int:
        """In how many seeds the accuracy among the admitted is below alpha."""
        return sum((a := pair[which]) is not None and a < self.alpha for pair in self.accuracies)

    def admitting(self, which: int) -> int:
        """In how many seeds anything is admitted."""
        return sum(pair[which] is not None for pair in self.accuracies)

    @property
    def verdict(self) -> str:
        """ "more", "less" or "open": what the interval of the difference allows to say."""
        return "more" if self.interval[0] > 0 else "less" if self.interval[1] < 0 else "open"

    def statement(self) -> str:
        """What the numbers say, and how sure one can be, in plain sentences."""
        n, (low, high) = len(self.seeds), (f"{100 * bound:+.1f}" for bound in self.interval)
        where = f"{self.dataset} ({self.family}, {'one run' if n == 1 else f'{n} seeds'} each)"
        if not any(share for pair in self.shares for share in pair):
            return f"On {where} both {self.first} and {self.second} reject every answer."
        shares = [f"{statistics.fmean(pair[i] for pair in self.shares):.1%}" for i in (0, 1)]
        says = f"On {where} {self.first} admits {shares[0]} of the generations and {self.second} {shares[1]}: "
        says += f"{100 * self.mean:+.1f} points"
        if n == 1:
            says += f" (95% interval over resampled prompts {low} to {high}). "
        else:
            above = sum(difference > 0 for difference in self.differences)
            says += f" on average, paired by seed, over the same rows (sd {100 * (self.sd or 0):.1f}, more in {above} of {n}, 95% interval "
            says += f"{low} to {high}). "
        below = [f"in {self.below(i)} of {self.admitting(i)}" if self.admitting(i) else "nowhere" for i in (0, 1)]
        says += f"Of the runs that admit any, accuracy among the admitted falls below alpha = {self.alpha:g} {below[0]} with "
        says += f"{self.first} and {below[1]} with {self.second}. "
        if self.verdict == "open":
            says += "This shows no difference either way."
        else:
            says += f"Here {self.first} admits {self.verdict}"
            more = 0 if self.verdict == "more" else 1
            accuracy = self.pooled[more]
            if accuracy is not None and accuracy < self.alpha:
                says += f", but what {(self.first, self.second)[more]} admits is not as accurate as asked for ({accuracy:.1%})"
            says += "."
        if n == 1:
            says += " One run says nothing about the spread between runs."
        elif n < FEW:
            says += f" {n} seeds are few: the interval is a rough one."
        return says

    def json(self) -> dict[str, Any]:
        """Plain values, with the statement."""
        more = {"differences": self.differences, "mean": self.mean, "sd": self.sd, "verdict": self.verdict}
        return {**asdict(self), **more, "statement": self.statement()}


def compare(
    runs: Sequence[Run],
    alpha: float | None = None,
    first: str = "sdm_hn",
    second: str = "ce_hn",
    bootstrap: int = BOOTSTRAP,
    seed: int = 0,
) -> list[Comparison]:
    """Two settings (by the names of their recipes) on every test set that both have, over the seeds that both have.

    With `alpha` by the regions that the same SDM layers have there, without it by those of the runs' own alpha.
    """
    by = {(run.family, run.setting, run.seed): run for run in runs}
    out = []
    for family in sorted({run.family for run in runs}):
        both = [
            (by[family, first, s], by[family, second, s])
            for s in sorted({run.seed for run in runs})
            if (family, first, s) in by and (family, second, s) in by
        ]
        for dataset in sorted(
            {name for a, b in both for name in a.evaluations.keys() & b.evaluations}, key=dataset_order
        ):
            pairs = [(a, b) for a, b in both if dataset in a.evaluations and dataset in b.evaluations]
            out.append(_comparison(family, dataset, pairs, alpha, bootstrap, seed))
    return out


def _comparison(
    family: str, dataset: str, pairs: list[tuple[Run, Run]], alpha: float | None, bootstrap: int, seed: int
) -> Comparison:
    found = [(a.evaluations[dataset], b.evaluations[dataset]) for a, b in pairs]
    if len({len(e) for pair in found for e in pair}) > 1:
        raise ValueError(
            f"The runs of {family} were evaluated on different rows of {dataset}: they cannot be compared."
        )
    admitted = [[e.accepted if alpha is None else e.accepted_at(alpha) for e in pair] for pair in found]
    shares = tuple((float(a.mean()), float(b.mean())) for a, b in admitted)
    differences = [a - b for a, b in shares]
    # By prompt, mean over the seeds
    low, high = _bootstrap(np.mean([a.astype(float) - b for a, b in admitted], axis=0), bootstrap, seed)
    if len(pairs) > 1:
        from scipy.stats import t

        # Alone it would be a point where all seeds differ by the same few answers
        half = float(t.ppf(0.975, len(pairs) - 1)) * statistics.stdev(differences) / math.sqrt(len(pairs))
        low, high = min(low, statistics.fmean(differences) - half), max(high, statistics.fmean(differences) + half)
    right = [
        [(e.y == e.prediction)[mask] for e, mask in zip(*pair, strict=True)]
        for pair in zip(found, admitted, strict=True)
    ]
    return Comparison(
        family,
        dataset,
        pairs[0][0].label,
        pairs[0][1].label,
        pairs[0][0].alpha if alpha is None else alpha,
        tuple(a.seed for a, _ in pairs),
        shares,
        tuple((_mean(a), _mean(b)) for a, b in right),
        (_mean(np.concatenate([a for a, _ in right])), _mean(np.concatenate([b for _, b in right]))),
        (low, high),
    )


def _mean(right: NDArray[np.bool_]) -> float | None:
    return float(right.mean()) if len(right) else None


def _bootstrap(values: NDArray[np.float64], bootstrap: int, seed: int) -> tuple[float, float]:
    """Percentile interval of the mean over resampled prompts; there are few different values, so their counts are drawn."""
    kinds, counts = np.unique(values, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(values), counts / len(values), size=bootstrap)
    low, high = np.percentile(drawn @ kinds / len(values), (2.5, 97.5))
    return float(low), float(high)
