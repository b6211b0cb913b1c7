"""Which score tells right from wrong answers of a language model best? The SDM layer and its rivals on the same answers.

The rows are split into three parts. The first is used to fit a linear probe and to fix candidate thresholds. The second is
used to certify every score in the same way (`certify_answers`). The third is the test set of the table, together with inputs
of another kind and right answers to other prompts. So no score has seen the answers that it is compared on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdmlm.evaluation.score_table import ScoredPoints, ScoreTable
from sdmlm.experiments.evaluate import generation_length
from sdmlm.generation.answers import Answer
from sdmlm.generation.certification import own_answers
from sdmlm.generation.prompts import read_completion
from sdmlm.language_model.answer_rule import DELTA, EPSILON, JudgedAnswers, UsualLikelihood, certify_answers
from sdmlm.language_model.encoding import completion_text
from sdmlm.language_model.forward import inner_lm
from sdmlm.language_model.likelihood import FIGURES, VerdictTokens, answer_summaries
from sdmlm.rewards import Reward, check_reward, reward_as_fitted

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Rows = Sequence[Mapping[str, Any]]
TEST, SHIFTED, OTHER = "test", "shifted", "answers to other prompts"
LEAST_ROWS, LEAST_WRONG = 90, 5
RULE, REGION = "SDM: the model's own rule", "SDM: region of the papers"
USUAL = "mean log-probability, usual likelihood"


@dataclass(frozen=True)
class JudgedSet:
    """Answers with all that the scores need."""

    right: Mask
    h: Floats  # the summary "states+likelihood", whatever the SDM layer reads
    output: Floats  # of the SDM layer, for Yes
    yes: Mask
    verified: Mask
    in_region: Mask
    agreement: Floats | None  # share of sampled answers that equal the greedy one

    def __len__(self) -> int:
        return len(self.right)

    def figure(self, name: str) -> Floats:
        """A likelihood figure by its name."""
        return np.asarray(self.h[:, FIGURES.index(name) - len(FIGURES)])

    def part(self, index: NDArray[Any]) -> JudgedSet:
        """Some of the answers."""
        agreement = None if self.agreement is None else self.agreement[index]
        return JudgedSet(
            self.right[index],
            self.h[index],
            self.output[index],
            self.yes[index],
            self.verified[index],
            self.in_region[index],
            agreement,
        )


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
    shifted: Rows | None = None,
    reward: Reward | str | None = None,
    *,
    samples: int = 5,
    delta: float = DELTA,
    epsilon: float = EPSILON,
    seed: int = 0,
    progress: bool = True,
) -> AnswerComparison:
    """Compare scores of the model's own answers to `rows`, which must be new to it; see the module docstring.

    shifted: rows of another kind. samples: sampled answers per prompt for self-consistency; 0 leaves it out.
    """
    if len(rows) < LEAST_ROWS:
        raise ValueError(f"{len(rows)} rows are too few to compare scores on: give at least {LEAST_ROWS}.")
    r = reward_as_fitted(reward, lm.metadata)
    for some in (rows, shifted or ()):
        if some:
            check_reward(r, some)
    own = judge_own(lm, rows, r, samples, seed, progress)
    order = np.random.default_rng(seed).permutation(len(rows))
    fitted, tested, reported = (np.sort(part) for part in np.array_split(order, 3))
    sets = {TEST: own.part(reported)}
    if shifted:
        sets[SHIFTED] = judge_own(lm, shifted, r, samples, seed, progress)
    sets[OTHER] = judge_others(lm, [rows[i] for i in reported], progress)
    first, second = own.part(fitted), own.part(tested)
    usual = UsualLikelihood.fit(first.h)

    points: list[ScoredPoints] = []
    for name, score in _scores(lm, first).items():
        gated = name == USUAL

        def judged(answers: JudgedSet, score: Any = score, gated: bool = gated) -> JudgedAnswers | None:
            values = score(answers)
            if values is None:
                return None
            everywhere = np.ones(len(answers))
            distance = usual.d(answers.h) if gated else everywhere
            return JudgedAnswers(everywhere == 1, values, distance, answers.right)

        known, held_out = judged(first), judged(second)
        if known is None or held_out is None:
            continue
        bound = epsilon if gated else 0.0
        rule = certify_answers(known, held_out, alpha=lm.alpha, delta=delta, epsilon=bound, estimator="")
        for dataset, answers in sets.items():
            each = judged(answers)
            if each is not None:
                accepted = rule.accepts(each.yes, each.output, each.d)
                points.append(ScoredPoints(dataset, "", name, each.output, accepted, answers.right))
    for dataset, answers in sets.items():
        points.append(ScoredPoints(dataset, "", REGION, answers.output, answers.in_region, answers.right))
        points.append(ScoredPoints(dataset, "", RULE, answers.output, answers.verified, answers.right))
    points.sort(key=lambda one: list(sets).index(one.dataset))
    return AnswerComparison(
        ScoreTable(points, lm.alpha),
        {name: len(answers) for name, answers in sets.items()},
        {name: float(answers.right.mean()) for name, answers in sets.items()},
        samples,
    )


def _scores(lm: SDMLanguageModel, fitted: JudgedSet) -> dict[str, Any]:
    """Every score by name, as a function of answers; None where a score does not exist for some answers."""
    scores: dict[str, Any] = {
        "mean log-probability": lambda a: a.figure("mean_log_probability"),
        USUAL: lambda a: a.figure("mean_log_probability"),
        "least log-probability": lambda a: a.figure("least_log_probability"),
        "P(Yes) of the LM": lambda a: a.figure("yes_minus_no"),
        "self-consistency": lambda a: a.agreement,
    }
    if min(fitted.right.sum(), (~fitted.right).sum()) >= LEAST_WRONG:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        width = 2 * inner_lm(lm.model).config.get_text_config().hidden_size
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
        probe.fit(fitted.h[:, :width], fitted.right)
        scores["linear probe on the states"] = lambda a: probe.decision_function(a.h[:, :width])
    kind = "states and likelihood" if lm.reads_likelihood else "states"
    scores[f"SDM output ({kind})"] = lambda a: np.where(a.yes, a.output, 0.0)
    return scores


def judge_own(
    lm: SDMLanguageModel, rows: Rows, reward: Reward, samples: int, seed: int, progress: bool = True
) -> JudgedSet:
    """The model's greedy answers to the prompts of rows."""
    length = generation_length(lm, rows)
    answers, right = own_answers(lm, rows, reward, length, progress)
    agreement = None
    if samples:
        prompts = lm.read_prompts([row["prompt"] for row in rows])
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
    lm: SDMLanguageModel, answers: Sequence[Answer], right: Mask, agreement: Floats | None, progress: bool
) -> JudgedSet:
    verifications = lm.judge(answers, lm.alpha, 0, progress)
    if lm.reads_likelihood:
        h = lm.summaries(answers, progress)
    else:
        ids, starts = [answer.ids for answer in answers], [answer.start for answer in answers]
        h = answer_summaries(lm.model, ids, starts, VerdictTokens.of(lm.encoder), lm.tokens_per_batch, progress)
    return JudgedSet(
        right,
        h.double().numpy(),
        np.array([one.probability_of_yes for one in verifications]),
        np.array([one.verdict == one.yes for one in verifications]),
        np.array([one.verified for one in verifications]),
        np.array([one.accepted and one.verdict == one.yes for one in verifications]),
        agreement,
    )
