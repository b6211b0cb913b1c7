"""The parts of reports: sections, tables, figures, and the page around them.

Every figure is inline SVG with a caption that says what it shows; every table is an HTML table.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from sdmlm import __version__
from sdmlm.evaluation.selective_table import MANY_CLASSES, worst_cell
from sdmlm.report import plots
from sdmlm.storage.artifacts import write_text_atomically
from sdmlm.storage.text_files import visible

if TYPE_CHECKING:
    from sdmlm.evaluation.metrics import Cell
    from sdmlm.evaluation.score_table import ScoreTable
    from sdmlm.evaluation.selective_table import SelectiveTable


def write_page(path: str | Path, title: str, sections: Sequence[str]) -> None:
    """Write a page of sections in one step."""
    write_text_atomically(
        path, _PAGE.format(title=text(title), style=_STYLE, body="".join(sections), version=__version__)
    )


def _svg(figure: Figure, prefix: str, label: str) -> str:
    """A figure as inline SVG that scales with the page and takes the page's text colour."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :]  # no XML declaration and no DTD inside HTML
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r"font-family: [^;\"]*; ?", "", drawn)  # the page's
    # All figures use the same ids: a prefix makes them unique on a page.
    drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}-", drawn)
    drawn = drawn.replace(plots.INK, "currentColor")
    return drawn.replace("<svg", f'<svg role="img" aria-label="{text(label)}"', 1)


def figure(prefix: str, drawn: Figure, label: str, caption: str) -> str:
    broad = (
        " class='broad'" if drawn.get_figwidth() > 7 else ""
    )  # small screens scroll those, to keep their text legible
    return f"<figure{broad}>{_svg(drawn, prefix, label)}<figcaption>{text(caption)}</figcaption></figure>"


def section(title: str, body: str) -> str:
    return f"<section><h2>{text(title)}</h2>{body}</section>\n"


def table(caption: str, head: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    top = (
        ""
        if head is None
        else "<thead><tr>" + "".join(f"<th scope='col'{_aligned(h)}>{text(h)}</th>" for h in head) + "</tr></thead>"
    )
    lines = []
    for first, *others in rows:
        heads = head[1:] if head is not None else [""] * len(others)
        cells = "".join(f"<td{_aligned(h)}>{text(cell)}</td>" for h, cell in zip(heads, others, strict=True))
        lines.append(f"<tr><th scope='row'>{text(first)}</th>{cells}</tr>")
    body = f"<table><caption><span>{text(caption)}</span></caption>{top}<tbody>{''.join(lines)}</tbody></table>"
    return f"<div class='wide' tabindex='0' role='region' aria-label='{text(caption)}'>{body}</div>"


def words(meanings: Mapping[str, str]) -> str:
    """The terms of a report and what they mean, folded away."""
    items = "".join(f"<dt>{text(word)}</dt><dd>{text(meaning)}</dd>" for word, meaning in meanings.items())
    return f"<details><summary>What the words and signs mean</summary><dl>{items}</dl></details>"


def _aligned(head: str) -> str:
    """Align names left and numbers right."""
    return " class='name'" if head in ("model", "estimator", "setting") else ""


def text(value: str) -> str:
    """Text for a page: markup is escaped, and characters that hide or reverse text become visible escapes."""
    return html.escape(visible(str(value)), quote=True)


def share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def number(value: float) -> str:
    return f"{value:.4g}" if np.isfinite(value) else "none"


def comparison(caption: str, compared: SelectiveTable) -> str:
    """Accuracy among the accepted and their share: by class, or of the worst class if there are many classes."""
    few = len(compared.class_names) <= MANY_CLASSES
    groups = [f"{kind} {name}" for kind in ("true", "predicted") for name in compared.class_names]
    head = ["dataset", "model", "estimator", *(groups if few else ["worst true class", "worst predicted class"]), "all"]
    rows = []
    for row in compared.rows:
        m = row.metrics
        sides = m.class_conditional, m.prediction_conditional
        cells = [cell for side in sides for cell in (side if few else [worst_cell(side)])]
        rows.append([row.dataset, row.model, row.estimator, *(_cell(c, compared.alpha) for c in (*cells, m.marginal))])
    several = " (over several seeds: pooled, and the range over the seeds)" if compared.seeds > 1 else ""
    note = (
        f" Each cell: accuracy among the accepted and its 95% interval (bootstrap, exact at 0 and 1){several}, then in "
        f"brackets their share of all points; ▼ is below alpha = {compared.alpha:g}. true: points of this class; "
        "predicted: points predicted as this class."
    )
    return table(caption + "." + note, head, rows)


def scores(caption: str, compared: ScoreTable) -> str:
    """One line per estimator with its main measures."""
    rows = [[row.dataset, row.model, row.estimator, *compared.cells(row)] for row in compared.rows]
    return table(f"{caption}. {compared.caption}", ["dataset", "model", "estimator", *compared.heads], rows)


def _cell(cell: Cell, alpha: float) -> str:
    if cell.accuracy is None:
        return "-" if cell.empty else "all rejected"
    between = "" if cell.low is None or cell.high is None else f" [{cell.low:.2f}, {cell.high:.2f}]"
    seeds = f"; all rejected in {cell.rejected} seed{'s' * (cell.rejected > 1)}" if cell.rejected else ""
    return f"{'▼ ' if cell.accuracy < alpha else ''}{cell.accuracy:.3f}{between} ({cell.share:.2f}){seeds}"


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
figure { margin: 0; overflow-x: auto; }
@media (max-width: 36rem) { figure.broad svg { min-width: 34rem; } figcaption { position: sticky; left: 0; } }
svg { display: block; width: 100%; max-width: 46rem; height: auto; margin: 0 auto; }
figcaption, footer { color: var(--faint); font-size: .92rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); padding-bottom: .3rem; }
caption span { position: sticky; left: 0; display: inline-block; max-width: min(58rem, 92vw); }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th[scope=row], thead th:first-child { text-align: left; font-weight: 500; }
th.name, td.name { text-align: left; }
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
points that were not used for fitting.</footer>
</body>
</html>
"""
