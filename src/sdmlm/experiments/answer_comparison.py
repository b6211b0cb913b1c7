"""Which score tells right from wrong answers of a language model best? The SDM layer and its rivals on the same answers.

The rows are split into three parts. The first is used to fit what has to be fitted and to fix candidate thresholds. The second is
used to certify every score in the same way (`certify_rule`). The third is the test set of the table, together with inputs of
another kind and right answers to other prompts. So no score has seen the answers that it is compared on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdmlm.evaluation.score_table import ScoredPoints, ScoreTable
from sdmlm.experiments.answer_rivals import (
    CONSISTENCY,
    USUAL,
    JudgedSet,
    rivals,
    signed_confidence,
    with_usual,
)
from sdmlm.experiments.answer_runs import TEST
from sdmlm.experiments.evaluate import generation_length
from sdmlm.generation.answers import Answer
from sdmlm.generation.certification import own_answers
from sdmlm.generation.prompts import read_completion
from sdmlm.language_model.answer_rule import DELTA, EPSILON, YES
from sdmlm.language_model.encoding import completion_text
from sdmlm.language_model.likelihood import VerdictTokens, answer_summaries
from sdmlm.rewards import Reward, apply_reward, check_reward, reward_as_fitted

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel

Mask = NDArray[np.bool_]
Rows = Sequence[Mapping[str, Any]]
SHIFTED, OTHER = "shifted", "answers to other prompts"
LEAST_ROWS = 90
RULE, REGION = "SDM: the model's own rule", "SDM: region of the papers"
BOUNDED = ("mean log-probability", "summed log-probability")  # shown with the bound on unusual likelihood, too
COLUMNS = ("coverage", "accuracy_accepted", "auroc", "aurc", "prr")


@dataclass(frozen=True)
class AnswerComparison:
    """The scores on all sets of answers, and what self-consistency costs."""

    table: ScoreTable
    rows: dict[str, int]  # by set
    right: dict[str, float]  # share of right answers by set
    samples: int  # answers that self-consistency needs beside the greedy one; 0 where it was left out

    def json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "alpha": self.table.alpha,
            "rows": self.rows,
            "right": self.right,
            "samples": self.samples,
            "scores": self.table.json(),
        }


def compare_answers(
    lm: SDMLanguageModel,
    rows: Rows,
    shifted: Rows | Mapping[str, Rows] | None = None,
    reward: Reward | str | None = None,
    *,
    samples: int = 5,
    delta: float = DELTA,
    epsilon: float = EPSILON,
    seed: int = 0,
    written: Mapping[str, Sequence[str]] | None = None,
    progress: bool = True,
) -> AnswerComparison:
    """Compare scores of the model's own answers to `rows`, which must be new to it; see the module docstring.

    shifted: rows of another kind, or several sets of them by name. samples: sampled answers per prompt for
    self-consistency; 0 leaves it out. written: the greedy answers where they are known, by set ("test" for `rows`).
    """
    if len(rows) < LEAST_ROWS:
        raise ValueError(f"{len(rows)} rows are too few to compare scores on: give at least {LEAST_ROWS}.")
    r = reward_as_fitted(reward, lm.metadata)
    more: Mapping[str, Rows] = shifted if isinstance(shifted, Mapping) else {SHIFTED: shifted} if shifted else {}
    for some in (rows, *more.values()):
        check_reward(r, some)
    known = written or {}
    own = judge_own(lm, rows, r, samples, seed, known.get(TEST), progress)
    order = np.random.default_rng(seed).permutation(len(rows))
    fitted, tested, reported = (np.sort(part) for part in np.array_split(order, 3))
    sets = {TEST: own.part(reported)}
    for name, others in more.items():
        sets[name] = judge_own(lm, others, r, samples, seed, known.get(name), progress)
    sets[OTHER] = judge_others(lm, [rows[i] for i in reported], progress)
    first, second = own.part(fitted), own.part(tested)

    methods = rivals(first, seed)
    methods |= {name + USUAL: with_usual(methods[name], first, epsilon) for name in BOUNDED}
    points: list[ScoredPoints] = []
    for name, method in methods.items():
        rule = method.rule(second, second.right.astype(np.int64), 2, lm.alpha, delta)
        for dataset, answers in sets.items():
            if name == CONSISTENCY and answers.agreement is None:
                continue
            evidence = method.score(answers)
            points.append(ScoredPoints(dataset, "", name, evidence.confidence, rule.accepts(evidence), answers.right))
    for dataset, answers in sets.items():
        points.append(ScoredPoints(dataset, "", REGION, answers.score, answers.in_region, answers.right))
        points.append(ScoredPoints(dataset, "", RULE, answers.score, answers.verified, answers.right))
    points.sort(key=lambda one: list(sets).index(one.dataset))
    return AnswerComparison(
        ScoreTable(points, lm.alpha, COLUMNS),
        {name: len(answers) for name, answers in sets.items()},
        {name: float(answers.right.mean()) for name, answers in sets.items()},
        samples,
    )


def judge_own(
    lm: SDMLanguageModel,
    rows: Rows,
    reward: Reward,
    samples: int,
    seed: int,
    written: Sequence[str] | None = None,
    progress: bool = True,
) -> JudgedSet:
    """The model's greedy answers to the prompts of rows, which `written` holds where they are known."""
    length = generation_length(lm, rows)
    prompts = lm.read_prompts([row["prompt"] for row in rows])
    if written is None:
        answers, right = own_answers(lm, rows, reward, length, progress)
    else:
        answers = [read_completion(lm.encoder, *pair, i) for i, pair in enumerate(zip(prompts, written, strict=True))]
        right = np.asarray(apply_reward(reward, rows, [answer.text for answer in answers], lm.tags)) == 1
    agreement = None
    if samples:
        same = np.zeros(len(rows))
        for n in range(samples):
            seeds = [[seed, 21, n, i] for i in range(len(rows))]
            drawn = lm.write(prompts, lm.sampling(length, 1.0), seeds, progress=progress)
            same += [one.text == greedy.text for one, greedy in zip(drawn, answers, strict=True)]
        agreement = same / samples
    return _judged(lm, answers, right, agreement, progress)


def judge_others(lm: SDMLanguageModel, rows: Rows, progress: bool = True) -> JudgedSet:
    """Right answers, each to the prompt of the row before it, where it is wrong."""
    prompts = lm.read_prompts([row["prompt"] for row in rows])
    bodies = [lm.tags.strip_suffix(completion_text(row["chosen"])) for row in rows]
    others = [*bodies[1:], bodies[0]]
    answers = [
        read_completion(lm.encoder, prompt, body, i)
        for i, (prompt, body) in enumerate(zip(prompts, others, strict=True))
    ]
    right = np.array([body == other for body, other in zip(bodies, others, strict=True)])
    return _judged(lm, answers, right, None, progress)


def _judged(
    lm: SDMLanguageModel, answers: Sequence[Answer], right: Mask, agreement: NDArray[np.float64] | None, progress: bool
) -> JudgedSet:
    h = lm.whole_summaries(answers, progress)
    scores = lm.score(h if lm.reduction is None else lm.reduction(h), lm.alpha)
    in_region, certificate = scores.accepted & (scores.prediction == YES), lm.answer_certificate
    verified = in_region
    if certificate is not None:
        accepted = certificate.rule.accepts(certificate.evidence(scores, lm.summaries(answers, progress).numpy()))
        verified = accepted if lm.guard(lm.alpha) is None else accepted & in_region
    if not lm.reads_likelihood:
        ids, starts = [answer.ids for answer in answers], [answer.start for answer in answers]
        h = answer_summaries(lm.model, ids, starts, VerdictTokens.of(lm.encoder), lm.tokens_per_batch, progress)
    return JudgedSet(right, h.double().numpy(), signed_confidence(scores), verified, in_region, agreement)
