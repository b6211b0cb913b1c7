"""The HTML report over runs: the comparison of two losses, the paper's tables beside its published figures, training curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sdmlm.experiments import published as paper
from sdmlm.experiments.answer_runs import CAPTION, MEASURES, TEST, comparison_rows
from sdmlm.experiments.layouts import LAYOUTS
from sdmlm.experiments.loss_comparison import LossComparison
from sdmlm.experiments.runs import Run, dataset_order, setting_order
from sdmlm.experiments.tables import Tables
from sdmlm.report import page, plots

_PANELS = (
    ("eval_admitted", "Accepted, static negatives"),
    ("eval_sdm_loss", "SDM loss, static negatives"),
    ("eval_q_min", "q'min, static negatives"),
    ("base", "Mean base b"),
    ("eval_loss", "Next-token loss over D_ca"),
)
_FEWEST = 20  # accepted generations below which an accuracy is not drawn
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))


def write_report(
    path: str | Path,
    runs: Sequence[Run],
    tables: Tables,
    title: str = "SDM language models: replication",
    more: Sequence[tuple[str, str]] = (),
    intro: str = "",
    first: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the page in one step; `intro` is its first paragraph, `first` and `more` are sections, as (title, HTML)."""
    published = all(run.task == "word_ordering" for run in runs)  # the only task in the paper
    with matplotlib.rc_context(plots.STYLE):
        sections = [
            f"<p>{page.text(intro)}</p>" if intro else "",
            *(page.section(*section) for section in first),
            page.section("At a glance", _glance(runs, tables)),
            _scores(runs),
            page.section("By alpha", _by_alpha(runs, tables)),
            page.section(
                "The LMs' own answers to test prompts",
                paper_table(tables, "selective", paper.SELECTIVE if published else {})
                + paper_table(tables, "generation", paper.GENERATION if published else {}),
            ),
            page.section("By class and by prediction", _full(tables, published)),
            page.section(
                "The final SDM layers over calibration documents",
                paper_table(tables, "calibration", paper.CALIBRATION if published else {}),
            ),
            page.section("Over training", _training(runs)),
            *(page.section(*section) for section in more),
            page.section("Runs", _runs(runs)),
            page.section("Words", page.words(_meanings(tables.alpha))),
        ]
    page.write_page(path, title, sections)


def _glance(runs: Sequence[Run], tables: Tables) -> str:
    says = [comparison.statement() for comparison in tables.comparisons]
    says = says or ["There is no pair of SDM + HN and CE + HN with the same seed, so nothing is compared."]
    caption = (
        f"Decisions about the LM's own answers to test prompts, at alpha = {tables.alpha:g}. Accepted: the verdict of the SDM "
        "layer on the answer (right or wrong) lies in the high-reliability region. Not verified: the layer does not "
        "decide, and a person should look; that does not mean that the answer is wrong. Mean over the seeds."
    )
    picture = page.figure("outcomes", outcomes(runs), "Decisions about the answers on each test set", caption)
    return picture + "".join(f"<p class='lead'>{page.text(sentence)}</p>" for sentence in says)


def _scores(runs: Sequence[Run]) -> str:
    """Which score tells right from wrong answers: the picture of the last setting's first seed, and the table of all."""
    compared = [run for run in runs if run.answers is not None]
    if not compared:
        return ""
    shown = max(compared, key=lambda run: (setting_order(run.setting), -run.seed))
    assert shown.answers is not None
    points = [one for one in shown.answers.points if one.dataset == TEST]
    caption = (
        f"{shown.label}, seed {shown.seed}. If the answers with the highest scores are accepted: the share of errors among them "
        "against the share accepted. A dot is what is accepted under the certificate."
    )
    picture = page.figure("answers", plots.risk_coverage(points, shown.answers.alpha), "Risk against coverage", caption)
    samples = shown.answers.samples
    cost = (
        f" Self-consistency writes {samples} further answers to every prompt; the others write none." if samples else ""
    )
    heads = ["model", "answers", "score", *MEASURES.values()]
    return page.section(
        "Which score tells right answers from wrong ones?",
        picture + page.table(CAPTION + cost, heads, comparison_rows(compared)),
    )


def outcomes(runs: Sequence[Run]) -> Figure:
    """A bar for each test set and setting: accepted and right, accepted and wrong, not verified; means over the seeds."""
    groups: dict[tuple[tuple[int, str], str, tuple[int, str], str], list[Any]] = {}
    several = len({run.family for run in runs}) > 1
    for run in runs:
        label = f"{run.family}: {run.label}" if several else run.label
        for test, e in run.evaluations.items():
            key = (dataset_order(test), run.family, setting_order(run.setting), f"{test}, {label}")
            groups.setdefault(key, []).append(e)
    kinds = (
        ("accepted, verdict right", plots.BLUE, None, lambda e: e.accepted & e.correct),
        ("accepted, verdict wrong", plots.ORANGE, "//", lambda e: e.accepted & ~e.correct),
        ("not verified: a person should look", "none", None, lambda e: ~e.accepted),
    )
    parts = [
        (label, color, hatch, [fmean(float(which(e).mean()) for e in groups[key]) for key in sorted(groups)])
        for label, color, hatch, which in kinds
    ]
    return plots.shares([key[-1] for key in sorted(groups)], parts, "the answers")


def _runs(runs: Sequence[Run]) -> str:
    rows = []
    for run in sorted(runs, key=lambda run: (run.family, setting_order(run.setting), run.seed)):
        minutes = sum(row.get("train_runtime", 0.0) for row in run.history) / 60
        sizes = ", ".join(f"{name} {len(e)}" for name, e in run.evaluations.items())
        steps = max((int(row.get("step", 0)) for row in run.history), default=0)
        rows.append([f"{run.family}: {run.label}", str(run.seed), str(steps), f"{minutes:.1f}", sizes])
    return page.table(
        "One line per run",
        ["run", "seed", "steps", "minutes of training (after the last interruption)", "prompts"],
        rows,
    )


def _meanings(alpha: float) -> dict[str, str]:
    """The terms that the tables use."""
    return {
        "CE, SDM": "fine-tuned with cross-entropy, or with the SDM loss",
        "HN": "with hard negatives: wrong answers that the model gives while it is being trained",
        "verdict, ŷ": "the prediction of the SDM layer about an answer: 1 (Yes, it is right) or 0 (No)",
        "y": "whether the answer is right, by comparison with the reference: 1 right, 0 wrong",
        "accepted, HR": f"the verdict lies in the high-reliability region, where at least alpha = {alpha:g} of the verdicts "
        "should be right, for each y and each ŷ",
        "HR lower": "the same with d lowered by the uncertainty of its estimate",
        "q": "Similarity: how many of the nearest known documents, counted outwards, have this verdict and were predicted correctly",
        "d": "Distance: a quantile, 1 near the known documents and 0 beyond them",
        "q'min, psi": "the least q' (q, lowered by the output) and the least output of the SDM layer in the region",
        "D_ca": "the calibration rows; the final SDM layer is fitted over one half of them and calibrated over the other",
        "base b": "the base of the logarithm in the SDM loss of a document: 2 + the output of the SDM layer for its label y; "
        "cross-entropy has base e",
    }


def paper_table(tables: Tables, name: str, published: dict[tuple[str, ...], tuple[str, ...]]) -> str:
    """A table of ours. The paper's figures, where it has the same setting and test set, are in columns to the right, or in a
    wide table below each line."""
    layout, lines = LAYOUTS[name], tables.of(name)
    wide = len(layout.columns) > 4  # no room for the spread over seeds, which the CSV has
    keys = [(line.dataset, line.setting) if line.dataset else (line.setting,) for line in lines]
    heads = [column.head for column in layout.columns]
    rows = []
    for line, key in zip(lines, keys, strict=True):
        ours = [line.quantities[c.quantity].text(c.digits, c.none, wide) for c in layout.columns]
        theirs = published.get(key, ("",) * len(heads)) if published and not wide else ()
        rows.append([*([line.dataset] if line.dataset else []), line.model, *ours, *theirs])
        if wide and key in published:
            rows.append([*([line.dataset] if line.dataset else []), f"paper: {line.model}", *published[key]])
    names = (["dataset"] if any(line.dataset for line in lines) else []) + ["model"]
    seeds = " With several seeds: mean ± standard deviation (smallest to largest); with one: [95% interval]: bootstrap, exact at 0 and 1."
    if wide:
        seeds = " With several seeds: means; tables.csv has all." if any(len(line.seeds) > 1 for line in lines) else ""
    caption = f"{tables.title(name)}. {layout.caption}{seeds}"
    if published:
        caption += f" paper: {paper.MODEL}, word ordering, alpha 0.95, as published."
    beside = [f"paper: {head}" for head in heads] if published and not wide else []
    return page.table(caption, [*names, *heads, *beside], rows)


def _full(tables: Tables, published: bool) -> str:
    ours = page.comparison("Ours", tables.full())
    if not published:
        return ours
    heads = ["true 0", "true 1", "predicted 0", "predicted 1", "all"]
    rows = [
        [*key, *(f"{cells[i]} ({cells[i + 1]})" for i in range(0, len(cells), 2))] for key, cells in paper.FULL.items()
    ]
    caption = f"The paper's ({paper.MODEL}), as published: accuracy, and in brackets n/|D|. R: all rejected."
    return ours + page.table(caption, ["dataset", "setting", "estimator", *heads], rows)


def _by_alpha(runs: Sequence[Run], tables: Tables) -> str:
    parts = [_compared(tables.by_alpha)] if tables.by_alpha else []
    caption = (
        "The share that the final SDM layers would accept at other alphas, one line for each run; settings differ in colour and "
        f"line style. Accuracy is drawn where at least {_FEWEST} generations are accepted; it should not fall below the dotted "
        "line, accuracy = alpha. The vertical line is the alpha of the tables."
    )
    families = sorted({run.family for run in runs})
    for n, family in enumerate(families):
        title = f"<h3>{page.text(family)}</h3>" if len(families) > 1 else ""
        curves = alpha_curves([run for run in runs if run.family == family])
        parts.append(title + page.figure(f"alpha{n}", curves, f"Accepted and accuracy by alpha, {family}", caption))
    return "".join(parts)


def _compared(comparisons: Sequence[LossComparison]) -> str:
    """A line for each test set and alpha."""
    rows = []
    for c in comparisons:
        low, high = (f"{100 * bound:+.1f}" for bound in c.interval)
        shares = [f"{100 * fmean(pair[i] for pair in c.shares):.1f}%" for i in (0, 1)]
        below = [f"{c.below(i)} of {c.admitting(i)}" if c.admitting(i) else "-" for i in (0, 1)]
        difference = f"{100 * c.mean:+.1f} ({low} to {high})" if any(map(any, c.shares)) else "nothing accepted"
        rows.append([c.family, c.dataset, f"{c.alpha:g}", *shares, difference, *below])
    first, second = comparisons[0].first, comparisons[0].second
    heads = [f"{first} accepts", f"{second} accepts", "points more (95% interval)"]
    heads += [f"{name}: accuracy below alpha in" for name in (first, second)]
    caption = (
        f"{first} and {second} at several alphas, over the same SDM layers, paired by seed: mean shares accepted. The "
        "interval is over resampled prompts, and over the seeds (Student's t) where that is wider."
    )
    return page.table(caption, ["family", "dataset", "alpha", *heads], rows)


def alpha_curves(runs: Sequence[Run]) -> Figure:
    """A row for each test set: the share accepted, and the accuracy among the accepted, against alpha."""
    tests = sorted({test for run in runs for test in run.evaluations}, key=dataset_order)
    settings = sorted({run.setting for run in runs}, key=setting_order)
    figure = Figure(figsize=(9.2, 0.6 + 2.9 * len(tests)), layout="constrained")
    grid = figure.subplots(len(tests), 2, squeeze=False, sharex=True)
    handles: dict[str, Any] = {}
    for (left, right), test in zip(grid, tests, strict=True):
        for run in sorted(runs, key=lambda run: (setting_order(run.setting), run.seed)):
            if (e := run.evaluations.get(test)) is None:
                continue
            alphas = [region[0] for region in e.regions]
            admitted = e.accepted_by_alpha().T
            enough = admitted.sum(axis=1) >= _FEWEST
            accuracy = [
                (e.y == e.prediction)[mask].mean() if ok else np.nan for mask, ok in zip(admitted, enough, strict=True)
            ]
            n = settings.index(run.setting) % len(_LINES)
            style = {"color": plots.PALETTE[n], "linestyle": _LINES[n], "linewidth": 1.3}
            (handles[plots.plain(run.label)],) = left.plot(alphas, admitted.mean(axis=1), **style)
            right.plot(alphas, accuracy, **style)
        right.plot([0.5, 1.0], [0.5, 1.0], color=plots.INK, linewidth=1.0, linestyle=":")
        left.set(ylabel=plots.plain(test), ylim=(-0.02, 1.02))
        right.set_ylim(-0.02, 1.02)
        for axes in (left, right):
            axes.axvline(runs[0].alpha, color=plots.INK, linewidth=1.0, linestyle="--")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes, title in zip(grid[0], ("Share accepted", "Accuracy among the accepted"), strict=True):
        axes.set_title(title)
    for axes in grid[-1]:
        axes.set_xlabel("alpha")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, len(handles)))
    return figure


def _training(runs: Sequence[Run]) -> str:
    caption = (
        "By evaluation, one line for each run; settings differ in colour and in line style. Accepted share, SDM loss and "
        "q'min are those of the SDM layer that an evaluation fits over the calibration set D_ca with its static negatives, "
        "which are easier than the LM's own errors: the final layers of the tables, fitted with those, accept less. A gap in "
        "q'min is where it is infinite. The mean base is over the training documents since the evaluation before. Runs with cross-entropy "
        "have the next-token loss alone, in natural logarithms, so it does not compare with that of the SDM loss."
    )
    families = sorted({run.family for run in runs})
    parts = []
    for n, family in enumerate(families):
        curves = training_curves([run for run in runs if run.family == family])
        if curves is not None:
            label = f"Training curves of {family}"
            parts.append(
                (f"<h3>{page.text(family)}</h3>" if len(families) > 1 else "")
                + page.figure(f"train{n}", curves, label, caption)
            )
    return "".join(parts) or "<p>No run was trained.</p>"


def evaluations_of(history: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Columns with one value per evaluation: the epoch and the quantity of each panel, NaN where it is missing or infinite.

    `base` is logged with training steps, so its value is the mean over the logs since the previous evaluation.
    """
    out: dict[str, list[float]] = {name: [] for name in ("epoch", *(name for name, _ in _PANELS))}
    bases: list[float] = []
    for row in history:
        if row.get("base") is not None:
            bases.append(row["base"])
        if "eval_loss" not in row:
            continue
        entry = {**row, "base": float(np.mean(bases)) if bases else None}
        bases = []
        for name, values in out.items():
            value = entry.get(name)
            values.append(float("nan") if value is None else float(value))
    return out


def training_curves(runs: Sequence[Run]) -> Figure | None:
    """One panel for each quantity; None if no run was evaluated during training."""
    settings = sorted({run.setting for run in runs}, key=setting_order)
    ordered = sorted(runs, key=lambda run: (setting_order(run.setting), run.seed))
    curves = [(run, evaluations_of(run.history)) for run in ordered]
    if not any(curve["epoch"] for _, curve in curves):
        return None
    # Fine-tuning with cross-entropy logs only the last panel's quantity
    shown = [panel for panel in _PANELS if any(np.isfinite(curve[panel[0]]).any() for _, curve in curves)]
    columns = min(3, len(shown) + 1)  # one for the legend
    rows = -(-(len(shown) + 1) // columns)
    figure = Figure(figsize=(9.2, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(shown) :]:
        axes.axis("off")
    for axes, (name, title) in zip(panels, shown, strict=False):
        named: set[str] = set()
        for run, curve in curves:
            if not np.isfinite(curve[name]).any():
                continue
            n = settings.index(run.setting) % len(_LINES)
            style = {
                "color": plots.PALETTE[n],
                # A line through one or two points would suggest a trend.
                "linestyle": _LINES[n] if len(curve["epoch"]) > 2 else "",
                "linewidth": 1.3,
                "marker": "os^Dvp"[n],
                "markersize": 3 if len(curve["epoch"]) > 3 else 6,
            }
            axes.plot(
                curve["epoch"], curve[name], label=None if run.setting in named else plots.plain(run.label), **style
            )
            named.add(run.setting)
        axes.set(title=title, xlabel="Epoch")
        if name == "eval_admitted":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    handles, labels = panels[len(shown) - 1].get_legend_handles_labels()
    panels[-1].legend(handles, labels, loc="center left")
    return figure
