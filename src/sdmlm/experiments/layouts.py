"""The layout of the paper's tables: columns, titles, and the text below each table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
    by_alpha: bool = True  # whether the numbers depend on alpha
    brief: bool = False  # show means only in a terminal and on a page, because there are many columns


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
        "Acc.: accuracy among the accepted. n/|D|: their share of all answers. R: all rejected. Pooled: over the accepted "
        "of all seeds.",
    ),
    "generation": Layout(
        "Generation",
        (
            Column("Sentence acc.", r"\textsc{Sentence Acc.}", "sentence"),
            Column("Exact match", r"\textsc{Exact Match}", "exact_match"),
        ),
        "How good the LM itself is, whatever the SDM layer says. Sentence acc.: the answer between its tags is right. "
        "Exact match: everything that the LM wrote is right, its own verdict included.",
        by_alpha=False,
    ),
    "calibration": Layout(
        "The final SDM layer over its calibration half",
        tuple(_calibration_columns()),
        "Measured on calibration documents, not on the LM's answers to test prompts. Class 0: wrong answers; class 1: right "
        "ones. loss: SDM loss; acc.: accuracy; q: mean number of nearest known documents that agree; psi and q'min: the "
        "thresholds of the region. q'min ∞: no threshold reaches alpha, so everything is rejected.",
        brief=True,
    ),
}
