"""The HTML report: one file, no requests to anywhere, for light and dark screens.

Every figure is inline SVG with a caption that says what it shows; every table is a real table.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from sdmlm import __version__
from sdmlm.artifacts import write_text_atomically
from sdmlm.report import plots

if TYPE_CHECKING:
    from sdmlm.embedding_files import Embeddings
    from sdmlm.estimator import SDMEstimator
    from sdmlm.evaluation import Cell, Table
    from sdmlm.explain import Exemplar, Explanation
    from sdmlm.report.plots import View
    from sdmlm.scores import Scores

_FEW = 4  # classes that a comparison table shows one by one


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
    tables: Sequence[tuple[str, Table]] = (),
    examples: Sequence[Example] = (),
    title: str = "SDM estimator",
    class_names: Sequence[str] | None = None,
    more: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the report about `data` (default: the calibration points) to `path`, in one step.

    `scores` are those of `data` where they are at hand; `tables` come with a caption each; `more` are further sections, as
    (title, HTML).
    """
    names = [str(c) for c in (class_names or estimator.classes_)]
    if data is None:
        view, what = plots.calibration_view(estimator), "calibration points"
    else:
        view, what = plots.scored_view(scores or estimator.score(data.X), data.y), "scored points"
    shown = None if data is None else view
    with matplotlib.rc_context(plots.STYLE):
        sections = [
            _headline(estimator, view, what, names),
            _section("Similarity and Distance", _similarity_distance(estimator, view, what)),
            _section("What the thresholds rest on", _distributions(estimator, shown, names)),
            _section("Other values of alpha", _against_alpha(estimator, view, what)),
            _section("Reliability of the outputs", _reliability(view, what)) if view.labels is not None else "",
            _section("Training", _history(estimator)),
            _section("Comparison", "".join(_comparison(*entry) for entry in tables)) if tables else "",
            _section("Examples", "".join(_example(e, names) for e in examples)) if examples else "",
            *(_section(*section) for section in more),
        ]
    write_text_atomically(
        path, _PAGE.format(title=_text(title), style=_STYLE, body="".join(sections), version=__version__)
    )


# The sections


def _headline(estimator: SDMEstimator, view: View, what: str, names: Sequence[str]) -> str:
    region, n = estimator.region_, len(view)
    accepted, strange = int(view.accepted.sum()), int((view.q == 0).sum())
    if math.isinf(region.q_min):
        says = (
            f"At alpha {region.alpha:g} there is no high-reliability region: every point is rejected. More data, a "
            "longer training or a lower alpha may give one."
        )
    else:
        says = (
            f"At alpha {region.alpha:g} the estimator accepts {_share(accepted, n)} of the {n} {what}: those with q' "
            f"of at least {region.q_min:.4g} whose SDM output reaches the threshold psi of the predicted class and of "
            "no other."
        )
    if view.labels is not None and accepted:
        says += f" Of these, {_share(int(view.right[view.accepted].sum()), accepted)} are right; "
        says += f"over all points {_share(int(view.right.sum()), n)} are."
    if len(estimator.layers_) > 1:
        says += f" (An ensemble of {len(estimator.layers_)} models; the plots show the best one.)"
    facts = [
        ["alpha", f"{region.alpha:g}"],
        ["q'min", _number(region.q_min)],
        ["accepted", f"{accepted} ({_share(accepted, n)})"],
        ["rejected", f"{n - accepted - strange} ({_share(n - accepted - strange, n)})"],
        ["out of distribution (q = 0)", f"{strange} ({_share(strange, n)})"],
        ["support vectors", str(len(estimator.layers_[0].support))],
        ["calibration points", str(len(estimator.layers_[0].calibration.labels))],
        ["balanced calibration loss", _number(estimator.loss_)],
    ]
    body = f"<p class='lead'>{_text(says)}</p>" + _table("In numbers", None, facts)
    return _section("At a glance", body + _by_class(estimator, view, what, names))


def _by_class(estimator: SDMEstimator, view: View, what: str, names: Sequence[str]) -> str:
    psi, rows = estimator.region_.psi, []
    for c, name in enumerate(names):
        own, row = view.predictions == c, [name, _number(psi[c])]
        if view.labels is not None:
            true = view.labels == c
            row += [str(int(true.sum())), *_accuracy_among(view, true)]
        rows.append([*row, str(int(own.sum())), *(_accuracy_among(view, own) if view.labels is not None else [])])
        if view.labels is None:
            rows[-1].append(_share(int((own & view.accepted).sum()), int(own.sum())))
    split = ["points", "accepted", "accuracy among them"]
    if view.labels is None:
        head = ["class", "psi", "predicted so", "accepted"]
    else:
        head = ["class", "psi", *(f"true class: {s}" for s in split), *(f"predicted class: {s}" for s in split)]
    return _table(f"By class, over the {what}", head, rows)


def _accuracy_among(view: View, group: Any) -> list[str]:
    """[share of the group that is accepted, share of those that are right]."""
    inside = group & view.accepted
    return [_share(int(inside.sum()), int(group.sum())), _share(int((inside & view.right).sum()), int(inside.sum()))]


def _similarity_distance(estimator: SDMEstimator, view: View, what: str) -> str:
    caption = (
        "Similarity q (how many of the nearest training documents agree, in an unbroken run) against Distance d for "
        f"the {what}. Filled marks are accepted, hollow ones rejected"
        + ("; circles are right, triangles wrong" if view.labels is not None else "")
        + ". The dashed line is q'min; the shaded part is where a point with a typical margin between its classes "
        "would be accepted. Points on the line q = 0 are out of distribution."
    )
    if len(view) > plots.MOST_POINTS:
        caption += f" A random sample of {plots.MOST_POINTS} of {len(view)} points."
    return _figure(
        "qd", plots.similarity_distance(estimator, view), "Scatter plot of Similarity q against Distance d", caption
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
            " If the thick dotted line of the points shown lies right of the others, they come from farther away."
        )
    if len(names) > plots.MOST_CLASSES:
        caption += f" Only the {plots.MOST_CLASSES} classes with the most points are drawn."
    return _figure(
        "cdf", plots.distributions(estimator, view, names), "Distributions by class with thresholds", caption
    )


def _against_alpha(estimator: SDMEstimator, view: View, what: str) -> str:
    caption = (
        f"What other values of alpha would admit of the {what}, and how accurate that would be; the dashed line is "
        "the alpha in use. At a low alpha the share can grow with alpha: psi is itself the (1 - alpha) quantile, so "
        "a low alpha cuts off more of each class."
    )
    if view.labels is not None:
        caption += " Accuracy should stay above the dotted diagonal for the worst class too."
    return _figure("alpha", plots.against_alpha(estimator, view), "Admitted share and accuracy against alpha", caption)


def _reliability(view: View, what: str) -> str:
    caption = (
        f"Accuracy of the {what} in ten bins of the output at the predicted class: on the diagonal an output of 80% "
        "is right 80% of the time, below it the output promises too much. Vertical bars are 95% intervals; the lower "
        "part shows how many points each bin holds. Softmax over the same z' is what one would have without "
        "Similarity and Distance."
    )
    return _figure("rel", plots.reliability(view), "Reliability diagram of the SDM output and of softmax", caption)


def _history(estimator: SDMEstimator) -> str:
    caption = (
        "Loss and calibration accuracy by epoch, of the best round. The weights of the epoch with the lowest balanced "
        "calibration loss were kept (dotted line)."
    )
    return _figure("hist", plots.training_history(estimator), "Training history", caption)


def _comparison(caption: str, table: Table) -> str:
    """Accuracy among the admitted and their share, by class while there are few of them, else of the worst class."""
    few = len(table.class_names) <= _FEW
    groups = [f"{kind} {name}" for kind in ("true", "predicted") for name in table.class_names]
    head = ["dataset", "model", "estimator", *(groups if few else ["worst true class", "worst predicted class"]), "all"]
    rows = []
    for row in table.rows:
        m = row.metrics
        sides = m.class_conditional, m.prediction_conditional
        cells = [cell for side in sides for cell in (side if few else [_worst(side)])]
        rows.append([row.dataset, row.model, row.estimator, *(_cell(c, table.alpha) for c in (*cells, m.marginal))])
    note = (
        f" Accuracy among the admitted, and in brackets their share of all points; ▼ is below alpha = {table.alpha:g}."
    )
    return _table(caption + "." + note, head, rows)


def _worst(cells: Sequence[Cell]) -> Cell:
    return min(cells, key=lambda cell: 2.0 if cell.accuracy is None else cell.accuracy)


def _cell(cell: Cell, alpha: float) -> str:
    if cell.accuracy is None:
        return "all rejected"
    return f"{'▼ ' if cell.accuracy < alpha else ''}{cell.accuracy:.3f} ({cell.share:.2f})"


def _example(example: Example, names: Sequence[str]) -> str:
    e = example.explanation
    body = f"<h3>{_text(example.title)} <span class='tag'>{_text(e.decision)}</span></h3><p>{_text(e.reason)}</p>"
    if example.text:
        body += f"<pre>{_text(example.text)}</pre>"
    body += _exemplars("Nearest training documents", e.exemplars, names)
    peers = f"Nearest of the {e.peers.count} calibration points with this prediction and decision"
    if e.peers.count:
        peers += f" ({_share(round(e.peers.accuracy * e.peers.count), e.peers.count)} of them right)"
    return f"<article>{body}{_exemplars(peers, e.peers.nearest, names)}</article>"


def _exemplars(caption: str, exemplars: Sequence[Exemplar], names: Sequence[str]) -> str:
    def name(c: int) -> str:
        return names[c] if 0 <= c < len(names) else f"outside the classes ({c})"

    rows = [[str(x.id), name(x.label), name(x.prediction), f"{x.distance:.4g}"] for x in exemplars]
    head = ["id", "label", "predicted", "distance"]
    if any(x.text for x in exemplars):
        head.append("text")
        rows = [[*row, x.text or ""] for row, x in zip(rows, exemplars, strict=True)]
    return _table(caption, head, rows)


# The pieces


def _svg(figure: Figure, prefix: str, label: str) -> str:
    """A figure as inline SVG that scales with the page and takes the page's text colour."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]  # no XML declaration and no DTD inside HTML
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"font-family: [^;\"]*; ?", "", text)  # the page's
    # Every figure numbers its parts alike: a prefix keeps them apart on one page.
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}-", text)
    text = text.replace(plots.INK, "currentColor")
    return text.replace("<svg", f'<svg role="img" aria-label="{_text(label)}"', 1)


def _figure(prefix: str, figure: Figure, label: str, caption: str) -> str:
    return f"<figure>{_svg(figure, prefix, label)}<figcaption>{_text(caption)}</figcaption></figure>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>\n"


def _table(caption: str, head: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    top = (
        ""
        if head is None
        else "<thead><tr>" + "".join(f"<th scope='col'>{_text(h)}</th>" for h in head) + "</tr></thead>"
    )
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in others)
        lines.append(f"<tr><th scope='row'>{_text(first)}</th>{cells}</tr>")
    body = f"<table><caption>{_text(caption)}</caption>{top}<tbody>{''.join(lines)}</tbody></table>"
    return f"<div class='wide' tabindex='0' role='region' aria-label='{_text(caption)}'>{body}</div>"


def _text(value: str) -> str:
    return html.escape(str(value), quote=True)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _number(value: float) -> str:
    return f"{value:.4g}" if np.isfinite(value) else "none"


_STYLE = """
:root { color-scheme: light dark; --ink: #1d2327; --page: #ffffff; --line: #d5dade; --soft: #f3f5f7; --faint: #57606a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --page: #15191d; --line: #39414a; --soft: #20262c; --faint: #a3adb7; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem 1.25rem 3rem; color: var(--ink); background: var(--page);
       font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; margin: 1rem 0 0; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .3rem; }
.lead { font-size: 1.1rem; }
figure { margin: 0; }
svg { display: block; width: 100%; max-width: 46rem; height: auto; margin: 0 auto; }
figcaption, footer { color: var(--faint); font-size: .92rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); padding-bottom: .3rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th[scope=row], thead th:first-child { text-align: left; font-weight: 500; }
td:last-child { white-space: pre-wrap; }
thead th { background: var(--soft); font-weight: 600; }
pre { background: var(--soft); padding: .6rem .8rem; overflow-x: auto; white-space: pre-wrap; }
article { border-left: 3px solid var(--line); padding-left: 1rem; margin: 1.2rem 0; }
article td:last-child { text-align: left; font-family: ui-monospace, Menlo, Consolas, monospace; line-height: 1.15; }
.tag { font-size: .8rem; font-weight: 500; border: 1px solid currentColor; border-radius: 1rem; padding: .05rem .6rem; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}</main>
<footer>Written by sdmlm {version}. The high-reliability region is an estimate; <code>sdmlm certify</code> tests it on
points that played no part in fitting.</footer>
</body>
</html>
"""
