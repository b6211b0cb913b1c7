"""The results of a model on test sets, as `sdmlm replicate` or the demo saved them in the model's folder."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdmlm.evaluation.lm_evaluation import Evaluation, read_evaluations
from sdmlm.language_model.sdm_folder import layer_sha256
from sdmlm.storage.artifacts import SDM_FOLDER

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel


@dataclass(frozen=True)
class Measured:
    """Counts over the prompts of one test set: greedy answers, judged by the SDM layer as it was fitted."""

    name: str
    prompts: int
    right: int  # answers that follow the instructions
    alpha: float
    accepted: int  # in the high-reliability region
    accepted_right: int  # of these, with a right verdict
    verified: int
    verified_right: int


def measured(lm: SDMLanguageModel) -> list[Measured]:
    """One entry for each test set on which this SDM layer was evaluated, by name."""
    if lm.folder is None:
        return []
    evaluations: dict[str, Evaluation] = {}
    with contextlib.suppress(OSError, ValueError):  # unreadable evaluations count as missing
        evaluations, _ = read_evaluations(lm.folder, layer_sha256(lm.folder / SDM_FOLDER))
    counts = []
    for name, e in evaluations.items():
        right, yes = e.prediction == e.y, e.accepted & (e.prediction == 1)
        counts.append(
            Measured(
                name,
                len(e),
                int(e.y.sum()),
                e.alpha,
                int(e.accepted.sum()),
                int((right & e.accepted).sum()),
                int(yes.sum()),
                int((right & yes).sum()),
            )
        )
    return counts
