"""The second half of the demo: a certified SDM layer over the LM's own answers, and its comparison with other scores
(docs/method.md, section 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdmlm.experiments.answer_comparison import AnswerComparison
    from sdmlm.generation.language_model import SDMLanguageModel

VERIFIED, COMPARISON = "verified", "answers.json"
ALPHA = 0.95
LAYER: dict[str, Any] = {"alpha": ALPHA, "documents": "own"}
READING = (
    "Which score tells the language model's right answers from its wrong ones? Each gets the same certificate: the loosest "
    "threshold with which, with probability 95%, at least {alpha:.0%} of the accepted answers are right. cov. is the share "
    "accepted. A certificate says nothing about inputs of another kind: see what each accepts of the shifted answers and of right "
    "answers to other prompts, all of which are wrong here. The model's own rule asks also that the likelihood of an answer is "
    'usual; so do the lines that end in "if usual".'
)


def make_verified(model: Path, rows: Path, output: Path) -> SDMLanguageModel:
    """Copy a model, with an SDM layer that is fitted over the model's own answers and certified at alpha 0.95.

    `rows` are new: those of the calibration chose the checkpoint, so a certificate over them would promise a little too much.
    """
    from sdmlm.finetuning.calibration import CalibrationRun, calibrate
    from sdmlm.generation.language_model import SDMLanguageModel

    calibrate(CalibrationRun(str(model), str(rows), str(output), changes={**LAYER, "use_cpu": True}))
    return SDMLanguageModel.from_pretrained(output, device="cpu")


def compared(lm: SDMLanguageModel, splits: Mapping[str, Sequence[Mapping[str, str]]]) -> AnswerComparison:
    """The scores on the demo's test and shifted rows, without self-consistency, which needs many more answers."""
    from sdmlm.experiments.answer_comparison import compare_answers

    return compare_answers(lm, splits["test"], splits["shifted"], samples=0, progress=False)


def risk_coverage_html(comparison: AnswerComparison) -> str:
    """The risk-coverage plot of the test answers."""
    import matplotlib

    from sdmlm.experiments.answer_runs import TEST
    from sdmlm.report import page, plots

    rows = [row for row in comparison.table.rows if row.dataset == TEST]
    caption = (
        "If the answers with the highest scores are accepted: the share of errors among them (risk) against the share accepted "
        "(coverage). Lower is better. A dot shows what is accepted; the dotted line is the risk that alpha allows."
    )
    with matplotlib.rc_context(plots.STYLE):
        drawn = plots.risk_coverage(rows, comparison.table.alpha)
        return page.figure("answers", drawn, "Risk against coverage of the test answers", caption)


def comparison_html(comparison: AnswerComparison) -> str:
    """The table of all scores."""
    from sdmlm.report import page

    return page.scores("All scores on the same answers", comparison.table)
