"""The HTML report about an estimator: one file, no requests to other servers, for light and dark screens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

from sdmlm.report import page, plots

if TYPE_CHECKING:
    from sdmlm.estimator.embedding_files import Embeddings
    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.estimator.explain import Exemplar, Explanation
    from sdmlm.estimator.region import HighReliabilityRegion
    from sdmlm.estimator.scores import Scores
    from sdmlm.evaluation.score_table import ScoredPoints, ScoreTable
    from sdmlm.evaluation.selective_table import SelectiveTable
    from sdmlm.report.plots import View


_LABEL_ERRORS = 10  # shown in a report; `sdmlm explain --label-errors` lists more


@dataclass(frozen=True)
class Example:
    """A point to show with its explanation."""

    title: str
    text: str | None
    explanation: Explanation


def write_report(
    path: str | Path,
    estimator: SDMEstimator,
    data: Embeddings | None = None,
    scores: Scores | None = None,
    tables: Sequence[tuple[str, SelectiveTable]] = (),
    examples: Sequence[Example] = (),
    title: str = "SDM estimator",
    class_names: Sequence[str] | None = None,
    more: Sequence[tuple[str, str]] = (),
    region: HighReliabilityRegion | None = None,
    first: Sequence[tuple[str, str]] = (),
    compared: ScoreTable | None = None,
) -> None:
    """Write the report about `data` (default: the calibration points) to `path`, atomically.

    Parameters
    ----------
    scores : the scores of `data`, if they were already computed.
    tables : (caption, table) of selective classification.
    examples : points to show with their explanations.
    more : sections at the end, as (title, HTML).
    region : the region that decided `scores`, if it is not the estimator's own.
    first : sections at the beginning, as (title, HTML).
    compared : all estimators on the same points, for a risk-coverage plot and a table of measures.
    """
    names = [str(c) for c in (class_names or estimator.classes_)]
    region = region or estimator.region_
    if data is None:
        view, what = plots.calibration_view(estimator), "calibration points"
    else:
        view, what = plots.scored_view(scores or estimator.score(data.X), data.y), "scored points"
    shown = None if data is None else view
    with matplotlib.rc_context(plots.STYLE):
        sections = [
            *(page.section(*section) for section in first),
            _headline(estimator, region, view, what, names),
            page.section("Similarity and Distance", _similarity_distance(region, view, what)),
            page.section("Where the thresholds come from", _distributions(estimator, shown, names)),
            page.section("Other values of alpha", _against_alpha(estimator, view, what)),
            page.section("Reliability of the outputs", _reliability(view, what)) if view.labels is not None else "",
            page.section("Training", _history(estimator)),
            page.section("Suspected label errors", _label_errors(estimator, names)),
            page.section("All estimators by their scores", _compared(compared)) if compared is not None else "",
            page.section("Comparison", "".join(page.comparison(*entry) for entry in tables)) if tables else "",
            page.section("Examples", "".join(_example(e, names) for e in examples)) if examples else "",
            *(page.section(*section) for section in more),
            page.section("Words", page.words(WORDS)),
        ]
    page.write_page(path, title, sections)


WORDS = {
    "q": "Similarity: how many of the nearest known points, counted outwards, have this prediction and were predicted correctly",
    "d": "Distance: a quantile, 1 near the known points and 0 beyond them",
    "q', q'min": "q rescaled by the output, and the least q' in the high-reliability region",
    "psi": "the least output for a class in the high-reliability region",
    "alpha": "the accuracy that accepted points are to have",
    "high-reliability region": "q' of at least q'min, and an output that reaches psi for the predicted class only; an estimate",
    "support vectors": "the known points that others are compared with",
    "calibration points": "labelled points that the thresholds were chosen on",
    "balanced calibration loss": "the SDM loss over the calibration points, as the mean over the classes",
    "out of distribution": "q = 0: the nearest known point has another class, or was predicted wrongly",
}

# The sections


def _headline(
    estimator: SDMEstimator, region: HighReliabilityRegion, view: View, what: str, names: Sequence[str]
) -> str:
    n = len(view)
    accepted, strange = int(view.accepted.sum()), int((view.q == 0).sum())
    certified = estimator.rule == "certified"
    if certified:
        says = (
            f"At alpha {region.alpha:g} the certified rule accepts {page.share(accepted, n)} of the {n} {what}: those whose "
            "confidence and whose Distance d are high enough."
        )
    elif math.isinf(region.q_min):
        says = (
            f"At alpha {region.alpha:g} there is no high-reliability region: every point is rejected. More data, "
            "longer training or a lower alpha may give one."
        )
    else:
        says = (
            f"At alpha {region.alpha:g} the estimator accepts {page.share(accepted, n)} of the {n} {what}: those with q' "
            f"of at least {region.q_min:.4g} whose SDM output reaches the threshold psi of the predicted class and of "
            "no other."
        )
    if view.labels is not None and accepted:
        says += f" Of these, {page.share(int(view.right[view.accepted].sum()), accepted)} are right; "
        says += f"over all points {page.share(int(view.right.sum()), n)} are."
    says += " A point that is not accepted is not verified: a person should look. That does not mean that it is wrong."
    if what == "calibration points":
        says += " The thresholds were chosen on these points, so the accuracy of new points can be lower."
    if estimator.combine == "average":
        says += f" All figures are averages over {len(estimator.layers_)} cross-fitted layers."
    elif len(estimator.layers_) > 1:
        says += f" (An ensemble of {len(estimator.layers_)} models; the plots show the best one.)"
    rows = [
        ["alpha", f"{region.alpha:g}"],
        ["q'min", page.number(region.q_min)],
        ["accepted", f"{accepted} ({page.share(accepted, n)})"],
        ["not verified: a person should look", f"{n - accepted - strange} ({page.share(n - accepted - strange, n)})"],
        ["out of distribution (q = 0)", f"{strange} ({page.share(strange, n)})"],
        ["support vectors", str(len(estimator.support_ids_))],
        ["calibration points", str(len(estimator.calibration_.labels))],
        ["balanced calibration loss", page.number(estimator.loss_)],
    ]
    body = f"<p class='lead'>{page.text(says)}</p>"
    if certified:
        rule = estimator.certificate_
        body += f"<p>{page.text('The estimator: ' + rule.sentence(names))}</p>"
        near = rule.near_enough(view.d)
        low, far = int((near & ~view.accepted).sum()), int((~near).sum())
        rows[1:2] = [
            ["least Distance d", page.number(rule.least_distance)],
            ["not accepted because d is smaller", f"{far} ({page.share(far, n)})"],
            ["not accepted because the confidence is too low", f"{low} ({page.share(low, n)})"],
        ]
    body += page.table("In numbers", None, rows)
    title = "The SDM layer over its calibration points" if what == "calibration points" else "At a glance"
    return page.section(title, body + _by_class(region, view, what, names))


def _by_class(region: HighReliabilityRegion, view: View, what: str, names: Sequence[str]) -> str:
    rows = []
    for c, name in enumerate(names):
        own, row = view.predictions == c, [name, page.number(region.psi[c])]
        if view.labels is not None:
            true = view.labels == c
            row += [str(int(true.sum())), *_accuracy_among(view, true)]
        rows.append([*row, str(int(own.sum())), *(_accuracy_among(view, own) if view.labels is not None else [])])
        if view.labels is None:
            rows[-1].append(page.share(int((own & view.accepted).sum()), int(own.sum())))
    split = ["points", "accepted", "accuracy among them"]
    if view.labels is None:
        head = ["class", "psi", "predicted as it", "accepted"]
    else:
        head = ["class", "psi", *(f"true class: {s}" for s in split), *(f"predicted class: {s}" for s in split)]
    return page.table(f"By class, over the {what}. psi: the least output for the class in the region.", head, rows)


def _accuracy_among(view: View, group: Any) -> list[str]:
    """[share of the group that is accepted, share of those that are right]."""
    inside = group & view.accepted
    return [
        page.share(int(inside.sum()), int(group.sum())),
        page.share(int((inside & view.right).sum()), int(inside.sum())),
    ]


def _similarity_distance(region: HighReliabilityRegion, view: View, what: str) -> str:
    caption = (
        "Similarity q (how many of the nearest training documents agree, in an unbroken run) against Distance d for "
        f"the {what}. Filled marks are accepted, hollow ones rejected"
        + ("; circles are right, triangles wrong" if view.labels is not None else "")
        + ". The dashed line is q'min; the shaded part is where a point with a typical margin between its classes "
        "would be accepted. Points on the line q = 0 are out of distribution."
    )
    if len(view) > plots.MOST_POINTS:
        caption += f" A random sample of {plots.MOST_POINTS} of {len(view)} points."
    return page.figure(
        "qd", plots.similarity_distance(region, view), "Scatter plot of Similarity q against Distance d", caption
    )


def _distributions(estimator: SDMEstimator, view: View | None, names: Sequence[str]) -> str:
    caption = (
        "Left: for each true class, how the distance to the nearest support vector is distributed over the "
        "calibration points with q > 0; d of a point is the smallest share, over the classes, that lies beyond its "
        "distance. The vertical line is the farthest calibration point that is accepted. Right: the SDM output at "
        "the true class of the calibration points from q'min on, on a logit scale; at most a share 1 - alpha of each "
        "class lies below its psi (the diamonds), and every psi is at least alpha."
    )
    if view is not None:
        caption += (
            " If the thick dotted line of the points shown lies right of the others, they are farther from the support."
        )
    if len(names) > plots.MOST_CLASSES:
        caption += f" Only the {plots.MOST_CLASSES} classes with the most points are drawn."
    return page.figure(
        "cdf", plots.distributions(estimator, view, names), "Distributions by class with thresholds", caption
    )


def _against_alpha(estimator: SDMEstimator, view: View, what: str) -> str:
    caption = (
        f"The share of the {what} that other values of alpha would accept, and its accuracy; the dashed line is the alpha in "
        "use."
    )
    if estimator.rule != "certified":
        caption += (
            " At a low alpha the share can grow with alpha: psi is itself the (1 - alpha) quantile, so a low alpha cuts "
            "off more of each class."
        )
    if view.labels is not None:
        caption += " Accuracy should stay above the dotted diagonal for the worst class too."
    return page.figure(
        "alpha", plots.against_alpha(estimator, view), "Accepted share and accuracy against alpha", caption
    )


def _reliability(view: View, what: str) -> str:
    caption = (
        f"Accuracy of the {what} in ten bins of the output at the predicted class: on the diagonal an output of 80% "
        "is right 80% of the time, below it the output is too high. Vertical bars are 95% intervals; the lower "
        "part shows how many points each bin holds. Softmax over the same z' is the output without Similarity and Distance."
    )
    return page.figure("rel", plots.reliability(view), "Reliability diagram of the SDM output and of softmax", caption)


def _compared(table: ScoreTable) -> str:
    """A risk-coverage plot for each data set, then all measures."""
    caption = (
        "If the points with the highest scores are accepted: the share of errors among them (risk) against the share "
        "accepted (coverage), for each estimator. Lower is better. AURC is the mean height of a line. A dot is what the "
        "estimator's own rule accepts; the dotted line is the risk that alpha allows, 1 - alpha. Of the LM's and the "
        "adaptor's scores only temperature scaling is drawn."
    )
    parts = []
    for n, dataset in enumerate(dict.fromkeys(row.dataset for row in table.rows)):
        rows = [row for row in table.rows if row.dataset == dataset and not _redundant(row)]
        drawn = plots.risk_coverage(rows, table.alpha)
        parts.append(page.figure(f"risk{n}", drawn, f"Risk against coverage on {dataset}", f"{dataset}. {caption}"))
    return "".join(parts) + page.scores("All estimators on the same points", table)


def _redundant(row: ScoredPoints) -> bool:
    """Whether another line of the plot shows the same ranking, or nearly so."""
    return row.estimator in ("no-reject", "softmax", "APS", "RAPS", "SDM HR lower") or (
        row.estimator == "temperature" and row.model.endswith("logistic regression")
    )


def _history(estimator: SDMEstimator) -> str:
    if not any("epoch" in row for row in estimator.history_):
        return _layers(estimator)
    caption = (
        "Loss and calibration accuracy by epoch, of the best round. The weights of the epoch with the lowest balanced "
        "calibration loss were kept (dotted line)."
    )
    return page.figure("hist", plots.training_history(estimator), "Training history", caption)


def _layers(estimator: SDMEstimator) -> str:
    """One line per layer, if there are no epochs because the minimum of a convex loss was computed."""
    head = ["layer", "inverse penalty", "width of h'", "balanced calibration loss", "calibration accuracy"]
    rows = [
        [
            str(i),
            page.number(row["inverse_penalty"]),
            f"{row['exemplar_dim']:.0f}",
            page.number(row["calibration_loss"]),
            f"{row['calibration_accuracy']:.1%}",
        ]
        for i, row in enumerate((layer.history[-1] for layer in estimator.layers_), start=1)
    ]
    caption = (
        "Layers, each over the points that it was not fitted on. inverse penalty: a larger number allows larger weights. width "
        "of h': length of the vectors that neighbours are searched in."
    )
    return page.table(caption, head, rows)


def _label_errors(estimator: SDMEstimator, names: Sequence[str]) -> str:
    errors = estimator.label_errors(_LABEL_ERRORS)
    if not errors:
        return "<p>No label of a calibration point is suspected to be wrong.</p>"
    head = ["id", "label", "suggested", "confidence", "q", "d", "text"]
    rows = [
        [
            str(error.id),
            names[error.label],
            names[error.prediction],
            f"{error.confidence:.2f}",
            page.number(error.q),
            f"{error.d:.2f}",
            error.text or "",
        ]
        for error in errors
    ]
    if not any(error.text for error in errors):
        head, rows = head[:-1], [row[:-1] for row in rows]
    caption = (
        "Calibration points that are confidently predicted as another class (suggested) by layers that were not fitted on them, "
        "the most suspicious first. The label may be wrong."
    )
    return page.table(caption, head, rows)


def _example(example: Example, names: Sequence[str]) -> str:
    e = example.explanation
    body = f"<h3>{page.text(example.title)} <span class='tag'>{page.text(e.decision)}</span></h3><p>{page.text(e.reason)}</p>"
    if example.text:
        body += f"<pre>{page.text(example.text)}</pre>"
    body += _exemplars("Nearest training documents", e.exemplars, names)
    peers = f"Nearest of the {e.peers.count} calibration points with this prediction and decision"
    if e.peers.count:
        peers += f" ({page.share(round(e.peers.accuracy * e.peers.count), e.peers.count)} of them right)"
    return f"<article>{body}{_exemplars(peers, e.peers.nearest, names)}</article>"


def _exemplars(caption: str, exemplars: Sequence[Exemplar], names: Sequence[str]) -> str:
    def name(c: int) -> str:
        return names[c] if 0 <= c < len(names) else f"outside the classes ({c})"

    rows = [[str(x.id), name(x.label), name(x.prediction), f"{x.distance:.4g}"] for x in exemplars]
    head = ["id", "label", "predicted", "distance"]
    if any(x.text for x in exemplars):
        head.append("text")
        rows = [[*row, x.text or ""] for row, x in zip(rows, exemplars, strict=True)]
    return page.table(caption, head, rows)
