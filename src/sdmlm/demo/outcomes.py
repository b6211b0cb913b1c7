"""The picture that the demo's report opens with: which answers are verified, and rightly so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdmlm.experiments.answer_comparison import AnswerComparison


def outcomes_html(comparison: AnswerComparison) -> str:
    """What became of each kind of answers under the model's own rule: a picture, and a sentence for each."""
    import matplotlib

    from sdmlm.experiments.answer_comparison import RULE
    from sdmlm.report import page, plots

    rows = [row for row in comparison.table.rows if row.estimator == RULE]
    parts = [
        ("verified, right", plots.BLUE, None, [float((row.accepted & row.correct).mean()) for row in rows]),
        ("verified, wrong", plots.ORANGE, "//", [float((row.accepted & ~row.correct).mean()) for row in rows]),
        ("not verified: a person should look", "none", None, [float((~row.accepted).mean()) for row in rows]),
    ]
    says = []
    for row in rows:
        n, right = int(row.accepted.sum()), int((row.accepted & row.correct).sum())
        also = f", of which {right} are right" if n else ""
        says.append(
            f"{row.dataset}: {n} of {len(row.accepted)} answers are verified{also}; {row.correct.mean():.1%} of all are right."
        )
    caption = (
        f"At alpha {comparison.table.alpha:g}. test: new sentences. shifted: far longer ones than any in training. answers to other "
        "prompts: right answers, but to another prompt than the one they are judged for. Not verified does not mean wrong."
    )
    with matplotlib.rc_context(plots.STYLE):
        drawn = plots.shares(
            [row.dataset.replace("to other", "to\nother") for row in rows], parts, "the answers", inches=6.2
        )
        picture = page.figure("verified", drawn, "Verified answers by kind", caption)
    return picture + "".join(f"<p class='lead'>{page.text(sentence)}</p>" for sentence in says)
