"""Renew the certificate of an SDM language model with fresh rows (`sdmlm certify DIR --data ROWS`)."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdmlm.estimator.region import check_alpha
from sdmlm.estimator.scores import Scores
from sdmlm.generation.answers import Answer
from sdmlm.language_model.answer_rule import (
    DELTA,
    EPSILON,
    AnswerCertificate,
    certify_answers,
    evidence_of,
    save_certificate,
)
from sdmlm.language_model.rows import first_rows
from sdmlm.language_model.usual import UsualLikelihood
from sdmlm.rewards import Reward, apply_reward, check_reward, reward_as_fitted
from sdmlm.storage.artifacts import SDM_FOLDER

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel

CANDIDATE_SHARE = 0.2  # share of the rows that fix the candidate thresholds; the others test them
LEAST_USUAL = 50  # number of own answers needed to say which answers are usual
MOST_KNOWN = 0.25  # share of the prompts that may be known to the SDM layer: short prompts may recur by chance


def new_rows(lm: SDMLanguageModel, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows with new prompts, each prompt once; refused if many are known to the SDM layer, or if there are none at all.

    Which rows the LM was trained on is not known here.
    """
    if not rows:
        raise ValueError("No rows are given: a certificate needs new ones.")
    texts = sorted(lm.estimator.documents_.values())

    def known(row: Mapping[str, Any]) -> bool:
        start = lm.encoder.decode(lm.encoder.encode_prompt(row["prompt"]))
        at = bisect_left(texts, start)
        return at < len(texts) and texts[at].startswith(start)

    distinct = [rows[i] for i in first_rows(row["prompt"] for row in rows)]
    new = [row for row in distinct if not known(row)]
    if (n := len(distinct) - len(new)) > MOST_KNOWN * len(distinct):
        raise ValueError(
            f"The SDM layer was fitted over the prompts of {n} of these {len(distinct)} rows: a certificate needs new rows."
        )
    if len(new) < len(rows):
        warnings.warn(
            f"{len(rows) - len(new)} of {len(rows)} rows are left out: their prompts stand in other rows, or are known to the "
            "SDM layer.",
            stacklevel=3,
        )
    return new


def own_answers(
    lm: SDMLanguageModel, rows: Sequence[Mapping[str, Any]], reward: Reward, max_new_tokens: int | None, progress: bool
) -> tuple[list[Answer], NDArray[np.bool_]]:
    """Greedy answers to the prompts of rows, and which of them are right."""
    prompts = lm.read_prompts([row["prompt"] for row in rows])
    answers = lm.write(prompts, lm.sampling(max_new_tokens), [[n] for n in range(len(prompts))], progress=progress)
    labels = apply_reward(reward, rows, [answer.text for answer in answers], lm.tags)
    return answers, np.asarray(labels) == 1


def certify_lm(
    lm: SDMLanguageModel,
    rows: Sequence[Mapping[str, Any]],
    reward: Reward | str | None = None,
    *,
    alpha: float | None = None,
    delta: float = DELTA,
    epsilon: float = EPSILON,
    source: str = "fresh rows",
    save: bool = True,
    progress: bool = True,
) -> AnswerCertificate:
    """Certify which greedy answers of a model are verified, with rows that were not used for training or calibration.

    The certificate replaces the present one, in `lm` and, with `save`, in its folder. Certificates of searches that stopped by the
    present one no longer apply.
    """
    alpha = lm.alpha if alpha is None else check_alpha(alpha)
    if save and lm.folder is None:
        raise ValueError("This model has no folder of its own to keep the certificate in: give save=False.")
    rows = new_rows(lm, rows)
    r = reward_as_fitted(reward, lm.metadata)
    check_reward(r, rows)
    answers, right = own_answers(lm, rows, r, None, progress)
    scores = lm.score(lm.summaries(answers, progress), alpha)
    how: dict[str, Any] = {"alpha": alpha, "delta": delta, "epsilon": epsilon, "source": source}
    certificate = certified_rule(lm, answers, scores, right, **how)
    lm.answer_certificate = certificate
    if save and lm.folder is not None:
        save_certificate(lm.folder / SDM_FOLDER, certificate)
        lm.saved_certificate = certificate
    return certificate


def certified_rule(
    lm: SDMLanguageModel,
    answers: Sequence[Answer],
    scores: Scores,
    right: NDArray[np.bool_],
    *,
    alpha: float,
    delta: float,
    epsilon: float,
    source: str,
) -> AnswerCertificate:
    """A certificate from judged answers to fresh prompts: some of them fix the candidate thresholds, the others test these."""
    h = lm.summaries(answers).numpy()
    some = np.random.default_rng(0).random(len(answers)) < CANDIDATE_SHARE
    before = lm.answer_certificate
    usual = None if before is None else before.usual
    if usual is None and lm.reads_likelihood:
        if some.sum() < LEAST_USUAL:
            need = round(LEAST_USUAL / CANDIDATE_SHARE)
            raise ValueError(
                f"{len(answers)} rows are too few to say which answers are usual: give about {need} or more."
            )
        usual = UsualLikelihood.fit(h[some], lm.reduction is not None)
    return certify_answers(
        evidence_of(scores[some], h[some], usual, right[some]),
        evidence_of(scores[~some], h[~some], usual, right[~some]),
        alpha=alpha,
        delta=delta,
        epsilon=epsilon,
        estimator=lm.digest(),
        usual=usual,
        source=source,
    )
