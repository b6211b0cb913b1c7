"""The plots of the report. Each function returns a matplotlib Figure; none uses pyplot or other global state.

Colour is never the only sign: shapes, fill or line styles say the same. Axes and text are drawn in INK, which the HTML report
replaces by the colour of the page's text, so that a figure is readable on light and on dark screens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter
from numpy.typing import NDArray

from sdmlm.estimator.acceptance import Evidence
from sdmlm.estimator.layer import ALPHA_GRID, activate, confidence_of
from sdmlm.estimator.region import membership
from sdmlm.evaluation import metrics
from sdmlm.storage.text_files import visible

if TYPE_CHECKING:
    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.estimator.region import HighReliabilityRegion
    from sdmlm.estimator.scores import Scores
    from sdmlm.evaluation.score_table import ScoredPoints

INK = "#010203"
BLUE, ORANGE, GREEN = (
    "#2f8fd8",
    "#e8702a",
    "#2fa866",
)  # distinguishable to most colour-blind readers, on white and black
PALETTE = (BLUE, ORANGE, GREEN, "#c45fc0", "#b09020", "#8b7be0", "#d85f7f", "#3aa6a6", "#8a8a8a", "#a5714f")
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "svg.hashsalt": "sdmlm",  # the same data give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
MOST_POINTS = 3000  # of a scatter plot: more would only make the file larger
MOST_CLASSES = len(PALETTE)  # of a plot with one line per class
_MOST_STEPS = 200  # of a line


@dataclass(frozen=True)
class View:
    """The points that a report shows, as arrays; `labels` is None if they are not known."""

    labels: NDArray[np.int64] | None
    predictions: NDArray[np.int64]
    z: NDArray[np.float64]
    p: NDArray[np.float64]
    q: NDArray[np.int64]
    d: NDArray[np.float64]
    d_nearest: NDArray[np.float64]
    q_prime: NDArray[np.float64]
    accepted: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.predictions)

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which predictions are right; all, if there are no labels."""
        return np.ones(len(self), dtype=bool) if self.labels is None else self.predictions == self.labels

    def evidence(self) -> Evidence:
        """The evidence that a certified rule decides by."""
        confidence = confidence_of(torch.from_numpy(self.z), torch.from_numpy(self.q)).numpy()
        return Evidence(confidence, self.d, self.predictions, self.labels)


def calibration_view(estimator: SDMEstimator) -> View:
    """The calibration points of the estimator."""
    ca = estimator.calibration_
    if estimator.rule == "certified":
        accepted = torch.from_numpy(estimator.certificate_.accepts(estimator.calibration_evidence()))
    else:
        accepted = estimator.region_.contains(ca.q_prime, ca.p, ca.predictions)
    tensors = (ca.labels, ca.predictions, ca.z, ca.p, ca.q, ca.d, ca.d_nearest, ca.q_prime, accepted)
    return View(*(t.numpy() for t in tensors))


def scored_view(scores: Scores, labels: NDArray[np.int64] | None) -> View:
    """Points that were scored."""
    s = scores
    return View(labels, s.prediction, s.z, s.p, s.q, s.d, s.d_nearest, s.q_prime, s.accepted)


def similarity_distance(region: HighReliabilityRegion, view: View, seed: int = 0) -> Figure:
    """q against d. Shape and colour show right and wrong, fill shows accepted and rejected, shading shows the region."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    top = max(float(view.q.max(initial=1)), 2.0) * 1.6
    _shade_region(axes, region, view, top)
    some = np.sort(np.random.default_rng(seed).permutation(len(view))[:MOST_POINTS])
    kinds = [("right", True, "o", BLUE), ("wrong", False, "^", ORANGE)]
    for name, right, marker, color in kinds if view.labels is not None else [("", True, "o", BLUE)]:
        for decision, accepted in (("rejected", False), ("accepted", True)):
            here = some[(view.right[some] == right) & (view.accepted[some] == accepted)]
            axes.plot(
                view.d[here],
                view.q[here],
                linestyle="",
                marker=marker,
                markersize=5 if right else 6.5,
                markeredgecolor=color,
                markerfacecolor=color if accepted else "none",
                markeredgewidth=0.9,
                alpha=0.75,
                zorder=3 if right else 4,  # the few wrong ones above the many right ones
                label=f"{name} {decision} ({len(here)})".strip(),
            )
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylim(-0.15, top)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("Distance d (1 = nearest to the support)")
    axes.set_ylabel("Similarity q")
    figure.legend(loc="outside upper left", ncols=3)
    return figure


def _shade_region(axes: Any, region: HighReliabilityRegion, view: View, top: float) -> None:
    """Shade where a typical point (of median margin between its classes) would be accepted in the (d, q) plane."""
    if not np.isfinite(region.q_min) or not len(view):
        return
    axes.axhline(region.q_min, color=INK, linewidth=1.2, linestyle="--", label=f"q'min = {region.q_min:.4g}")
    among = np.flatnonzero(view.accepted) if view.accepted.any() else np.arange(len(view))
    margins = np.diff(np.sort(view.z[among], axis=1)[:, -2:], axis=1)[:, 0]
    typical = among[np.argsort(margins, kind="stable")[len(margins) // 2]]
    d, q = np.meshgrid(np.linspace(0.0, 1.0, 81), np.concatenate([[0.0], np.geomspace(0.5, top, 80)]))
    z = torch.from_numpy(np.broadcast_to(view.z[typical], (d.size, view.z.shape[1])).copy())
    p, q_prime = activate(z, torch.from_numpy(q.ravel()), torch.from_numpy(d.ravel()))
    inside = region.contains(q_prime, p, z.argmax(dim=1)).numpy().reshape(d.shape)
    if inside.any():
        axes.contourf(d, q, inside.astype(float), levels=[0.5, 1.5], colors=[GREEN], alpha=0.18, zorder=1)


def distributions(estimator: SDMEstimator, view: View | None, class_names: Sequence[str]) -> Figure:
    """Left: eCDFs of d_nearest by class; right: of the SDM output at the true class, with alpha and psi."""
    figure = Figure(figsize=(9.2, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    ca, region = estimator.calibration_, estimator.region_
    known = (ca.q > 0).numpy()
    labels, outputs = ca.labels.numpy(), ca.p.gather(1, ca.labels[:, None])[:, 0].numpy()
    beyond = ca.q_prime.numpy() >= region.q_min
    for i, c in enumerate(shown_classes(estimator)):
        style = {"color": PALETTE[i], "linestyle": ("-", "--", "-.", ":")[i % 4], "linewidth": 1.6}
        _ecdf(left, ca.d_nearest.numpy()[(labels == c) & known], label=plain(class_names[c]), **style)
        own = outputs[(labels == c) & beyond]
        _ecdf(right, _inside(own), **style)
        if np.isfinite(region.psi[c]):
            level = float(np.mean(own < region.psi[c]))
            right.plot(_inside(region.psi[c]), level, marker="D", markersize=5, color=PALETTE[i], zorder=5)
    if view is not None:
        _ecdf(left, view.d_nearest, label="the points shown", color=INK, linewidth=2.4, linestyle=(0, (1, 1)))
    inside = region.contains(ca.q_prime, ca.p, ca.predictions).numpy()
    if inside.any():
        farthest = float(ca.d_nearest.numpy()[inside].max())
        left.axvline(farthest, color=INK, linewidth=1.2, linestyle="--", label="farthest accepted")
    left.set(xlabel="Distance to the nearest support vector", ylabel="Share of points below", title="d_nearest (q > 0)")
    right.axvline(_inside(region.alpha), color=INK, linewidth=1.2, linestyle="-.", label=f"alpha = {region.alpha:g}")
    right.axhline(1.0 - region.alpha, color=INK, linewidth=0.9, linestyle=":", label="1 - alpha")
    right.set(xlabel="SDM output at the true class", title="Points with q' ≥ q'min; ◆ = psi", xscale="logit")
    right.set_xticks([0.01, 0.1, 0.5, 0.9, 0.99, 0.9999], minor=False)
    right.set_xticks([], minor=True)
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if not beyond.any():
        right.text(0.5, 0.5, "none at this alpha", ha="center", transform=right.transAxes)
    for axes in (left, right):
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(loc="outside right center")
    return figure


def plain(name: str) -> str:
    """A name for matplotlib, which would read text between dollars as a formula and hide names that start with _.

    Characters that control a terminal or hide text are shown as escapes.
    """
    return ("\u200b" if name.startswith("_") else "") + visible(name).replace("$", r"\$")


def _inside(values: Any) -> Any:
    """Outputs clipped for a logit axis, which has no 0 and no 1."""
    return np.clip(values, 1e-3, 1.0 - 1e-5)


def shown_classes(estimator: SDMEstimator) -> list[int]:
    """The classes with the most calibration points, as many as there are colours, in their own order."""
    counts = np.bincount(estimator.calibration_.labels.numpy(), minlength=len(estimator.classes_))
    return sorted(np.argsort(-counts, kind="stable")[:MOST_CLASSES].tolist())


def _ecdf(axes: Any, values: NDArray[np.float64], **style: Any) -> None:
    if not len(values):
        axes.plot([], [], **style)
        return
    levels = np.linspace(0.0, 1.0, min(len(values), _MOST_STEPS))
    axes.step(np.quantile(values, levels, method="inverted_cdf"), levels, where="post", **style)


def against_alpha(estimator: SDMEstimator, view: View) -> Figure:
    """Left: the accepted share against alpha; right: accuracy among the accepted, overall and of the worst class."""
    alphas = np.array(ALPHA_GRID)
    if estimator.rule == "certified":
        accepted = np.stack([estimator.certified_rule(a).accepts(view.evidence()) for a in ALPHA_GRID], axis=1)
    else:
        accepted = membership([estimator.region(a) for a in ALPHA_GRID], view.q_prime, view.p, view.predictions)
    figure = Figure(figsize=(9.2, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(alphas, accepted.mean(axis=0), color=BLUE, linewidth=1.8)
    left.set(xlabel="alpha", ylabel="Share accepted", title="Accepted")
    left.set_ylim(-0.02, 1.02)
    if view.labels is not None:
        lowest: list[tuple[float, float, float]] = []
        for inside in accepted.T:
            by_class, by_prediction = (_lowest(view.right, inside, g) for g in (view.labels, view.predictions))
            lowest.append((view.right[inside].mean() if inside.any() else np.nan, by_class, by_prediction))
        columns = np.array(lowest).T
        right.plot(alphas, columns[0], color=BLUE, linewidth=1.8, label="all accepted")
        right.plot(alphas, columns[1], color=ORANGE, linewidth=1.6, linestyle="--", label="worst true class")
        right.plot(alphas, columns[2], color=GREEN, linewidth=1.6, linestyle="-.", label="worst predicted class")
        figure.legend(loc="outside lower center", ncols=3)
        finite = columns[np.isfinite(columns)]
        right.set_ylim(min(0.5, float(finite.min(initial=1.0))) - 0.02, 1.01)
    right.plot([0.5, 1.0], [0.5, 1.0], color=INK, linewidth=1.0, linestyle=":")
    right.text(0.76, 0.75, "accuracy = alpha", fontsize=9, rotation=0, ha="left", va="top")
    right.set(xlabel="alpha", ylabel="Accuracy among the accepted", title="Accuracy")
    for axes in (left, right):
        axes.axvline(estimator.alpha_, color=INK, linewidth=1.0, linestyle="--")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def _lowest(right: NDArray[np.bool_], inside: NDArray[np.bool_], groups: NDArray[np.int64]) -> float:
    """The lowest accuracy of any group among the points inside, NaN where there are none."""
    chosen = groups[inside]
    if not len(chosen):
        return float("nan")
    counts = np.bincount(chosen)
    hits = np.bincount(chosen, weights=right[inside])
    return float((hits[counts > 0] / counts[counts > 0]).min())


def softmax(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """softmax(z'): the output of the same adaptor without q and d."""
    return np.asarray(torch.softmax(torch.from_numpy(z), dim=1).numpy())


def reliability_bins(
    probability: NDArray[np.float64], right: NDArray[np.bool_], bins: int = 10
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], float]:
    """(mean output, accuracy, count) of the non-empty bins of equal width, and the expected calibration error."""
    which = np.minimum((probability * bins).astype(np.int64), bins - 1)
    count = np.bincount(which, minlength=bins)
    full = count > 0
    mean = np.bincount(which, weights=probability, minlength=bins)[full] / count[full]
    accuracy = np.bincount(which, weights=right, minlength=bins)[full] / count[full]
    error = float((np.abs(mean - accuracy) * count[full]).sum() / max(1, len(probability)))
    return mean, accuracy, count[full], error


def _wilson(share: NDArray[np.float64], n: NDArray[np.int64], z: float = 1.96) -> tuple[Any, Any]:
    """Middle and half width of the Wilson interval of a share among n."""
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return center, half


def reliability(view: View) -> Figure:
    """Accuracy against output, for the SDM output and for softmax of the same z'; below, how many points there are."""
    figure = Figure(figsize=(6.2, 5.2), layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    rows = np.arange(len(view)), view.predictions
    kinds = (("SDM", view.p[rows], "o", BLUE, "-"), ("softmax(z')", softmax(view.z)[rows], "s", ORANGE, "--"))
    edges = np.linspace(0.0, 1.0, 11)
    for i, (name, probability, marker, color, line) in enumerate(kinds):
        mean, accuracy, count, error = reliability_bins(probability, view.right)
        label = f"{name} (calibration error {error:.3f})"
        # A bar per bin: the 95% Wilson interval, since a bin may hold a handful of points.
        center, half = _wilson(accuracy, count)
        axes.vlines(mean, center - half, center + half, color=color, linewidth=1.0, alpha=0.6)
        axes.plot(mean, accuracy, color=color, linestyle=line, linewidth=1.0, marker=marker, markersize=6, label=label)
        counts, _ = np.histogram(probability, bins=edges)
        below.bar(
            edges[:-1] + 0.03 + 0.04 * i, counts / max(1, len(view)), width=0.036, color=color, alpha=1.0 - 0.35 * i
        )
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1.0, linestyle=":")
    axes.set(ylabel="Accuracy", xlim=(-0.02, 1.02), ylim=(-0.02, 1.04))
    figure.legend(loc="outside upper center", ncols=2)
    below.set(xlabel="Output at the predicted class", ylabel="Points")
    for each in (axes, below):
        each.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def risk_coverage(points: Sequence[ScoredPoints], alpha: float) -> Figure:
    """The share of errors among the accepted against the share accepted, one line per estimator; a dot is its own rule."""
    figure = Figure(figsize=(9.2, 4.8), layout="constrained")
    axes = figure.add_subplot()
    for i, one in enumerate(points):
        coverage, risk = metrics.risk_coverage(one.scores, one.correct)
        some = np.unique(np.linspace(0, len(risk) - 1, _MOST_STEPS).astype(int))
        style: dict[str, Any] = {
            "color": PALETTE[i % len(PALETTE)],
            "linestyle": ("-", "--", "-.", ":")[i // len(PALETTE) % 4],
        }
        aurc = one.measures["aurc"]
        axes.plot(coverage[some], risk[some], linewidth=1.5, label=f"{plain(one.estimator)} (AURC {aurc:.3f})", **style)
        if one.accepted.any():
            errors = 1.0 - one.correct[one.accepted].mean()
            axes.plot(one.accepted.mean(), errors, marker="o", markersize=6, color=style["color"])
    axes.axhline(1.0 - alpha, color=INK, linewidth=1.0, linestyle=":")
    axes.set(xlabel="Coverage (share accepted)", ylabel="Risk (share of errors among the accepted)")
    axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(loc="outside right center")
    return figure


def shares(
    names: Sequence[str], parts: Sequence[tuple[str, str, str | None, Sequence[float]]], what: str, inches: float = 9.2
) -> Figure:
    """A bar for each name, of parts (label, colour, hatch, share of each name) that follow one another; `what` they share."""
    figure = Figure(figsize=(inches, 1.2 + 0.36 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    left = np.zeros(len(names))
    for label, color, hatch, width in parts:
        axes.barh(range(len(names)), width, left=left, color=color, edgecolor=INK, hatch=hatch, label=label)
        left += np.asarray(width)
    axes.set_yticks(range(len(names)), [plain(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"Share of {what}")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(loc="outside upper center", ncols=len(parts))
    return figure


def training_history(estimator: SDMEstimator) -> Figure:
    """Losses and calibration accuracy by epoch, with the epoch whose weights were kept."""
    history = estimator.history_
    epochs = [row["epoch"] for row in history]
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(epochs, [row["train_loss"] for row in history], color=BLUE, label="training split")
    calibration = [row["calibration_loss"] for row in history]
    left.plot(epochs, calibration, color=ORANGE, linestyle="--", label="calibration split, balanced")
    left.set(xlabel="Epoch", ylabel="SDM loss", title="Loss")
    right.plot(epochs, [row["calibration_accuracy"] for row in history], color=ORANGE, linestyle="--")
    right.set(xlabel="Epoch", title="Calibration accuracy")
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (left, right):
        axes.axvline(epochs[int(np.argmin(calibration))], color=INK, linewidth=1.0, linestyle=":", label="kept")
    left.legend(loc="upper right")
    return figure
