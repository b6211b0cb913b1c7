"""The final SDM layer, fitted on the LM's own answers, and a certificate for these answers (docs/method.md, 9).

The calibration rows are split. The SDM layer is fitted on the answers to one part (`own_documents`). The rule of acceptance is
certified with the answers to the other part, whose prompts the layer has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sdmlm.errors import NoOwnAnswers
from sdmlm.estimator.acceptance import Evidence
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning.config import SDMConfig
from sdmlm.finetuning.held_out import part_rows
from sdmlm.finetuning.own_documents import OwnDocument, Rows, greedy_answers, more_documents, unique_names
from sdmlm.language_model.answer_rule import AnswerCertificate, certify_answers, evidence_of
from sdmlm.language_model.encoding import Encoder
from sdmlm.language_model.forward import inner_lm
from sdmlm.language_model.likelihood import LIKELIHOOD, VerdictTokens, answer_summaries
from sdmlm.language_model.reading import embed_sequences
from sdmlm.language_model.reduction import Reduction
from sdmlm.language_model.usual import UsualLikelihood
from sdmlm.rewards import Reward

LEAST_WRONG, LEAST_PROMPTS = 10, 4


@dataclass(frozen=True)
class OwnLayer:
    """The SDM layer, its certificate, and how the LM answered the calibration prompts."""

    estimator: SDMEstimator
    reduction: Reduction | None  # of the summaries that the layer reads
    certificate: AnswerCertificate
    prompts: int
    right: int
    held_out: tuple[int, ...]  # the rows of the certificate
    warning: str | None  # if there was too little to learn from
    known: Evidence  # of the fitted greedy answers, out of sample
    fresh: Evidence  # of the greedy answers to held-out rows

    def certificate_at(self, alpha: float) -> AnswerCertificate:
        """The certificate for another alpha, from the same answers."""
        now = self.certificate
        how: dict[str, Any] = {"delta": now.rule.delta, "epsilon": now.rule.epsilon, "estimator": now.rule.estimator}
        return certify_answers(self.known, self.fresh, alpha=alpha, usual=now.usual, **how)


def fit_over_own_answers(
    model: Any, encoder: Encoder, rows: Rows, args: SDMConfig, reward: Reward, room: int, progress: bool = True
) -> OwnLayer:
    """Fit the SDM layer on own answers to some of the rows, and certify it with those to the others."""
    fitted, held_out = part_rows([row["prompt"] for row in rows], args)
    used = sorted([*fitted, *held_out])
    answers = dict(zip(used, greedy_answers(model, encoder, rows, used, args, reward, room, progress), strict=True))
    known = [answers[i] for i in fitted]
    documents = [*known, *more_documents(model, encoder, rows, known, args, reward, room, progress)]
    fresh = [answers[i] for i in held_out]
    summaries = _summaries(model, encoder, [*documents, *fresh], args, progress)
    reduction = Reduction.fit(summaries[: len(documents)]) if args.summary == LIKELIHOOD else None
    summaries = summaries if reduction is None else reduction(summaries)
    h, h_fresh = summaries[: len(documents)], summaries[len(documents) :]
    estimator = _fit(encoder, documents, h, args, progress)
    greedy = np.array([document.source == "greedy" for document in documents])
    usual = UsualLikelihood.fit(h.numpy()[greedy], reduced=True) if reduction is not None else None
    known_evidence = _out_of_sample(estimator, documents, h, usual)
    fresh_evidence = evidence_of(
        estimator.score(h_fresh), h_fresh.numpy(), usual, [document.right for document in fresh]
    )
    certificate = certify_answers(
        known_evidence,
        fresh_evidence,
        alpha=args.alpha,
        delta=args.certificate_delta,
        epsilon=args.certificate_epsilon,
        usual=usual,
        estimator=estimator.digest(),
    )
    right = sum(document.right for document in answers.values())
    too_little = _too_little(documents, right, len(used))
    evidence = known_evidence, fresh_evidence
    return OwnLayer(estimator, reduction, certificate, len(used), right, tuple(held_out), too_little, *evidence)


def _out_of_sample(
    estimator: SDMEstimator, documents: Sequence[OwnDocument], h: Tensor, usual: UsualLikelihood | None
) -> Evidence:
    """The rule's input for the greedy answers among the documents, each judged by layers that were fitted without it."""
    evidence = estimator.calibration_evidence()  # in the order of `calibration_ids_`
    where = {name: i for i, name in enumerate(estimator.calibration_ids_)}
    names = unique_names(documents)
    picked = [i for i, document in enumerate(documents) if document.source == "greedy"]
    at = np.array([where[names[i]] for i in picked])
    d = evidence.d[at] if usual is None else usual.d(h.numpy()[picked])
    labels = np.array([int(documents[i].right) for i in picked])
    return Evidence(evidence.confidence[at], d, evidence.predictions[at], labels)


def _summaries(
    model: Any, encoder: Encoder, documents: Sequence[OwnDocument], args: SDMConfig, progress: bool
) -> Tensor:
    ids, starts, lm = [list(d.ids) for d in documents], [d.start for d in documents], inner_lm(model)
    if args.summary == LIKELIHOOD:
        return answer_summaries(lm, ids, starts, VerdictTokens.of(encoder), args.tokens_per_batch, progress)
    return embed_sequences(lm, ids, tokens_per_batch=args.tokens_per_batch, progress=progress)


def _fit(
    encoder: Encoder, documents: Sequence[OwnDocument], h: Tensor, args: SDMConfig, progress: bool
) -> SDMEstimator:
    """The SDM layer. All documents of a prompt are in the same part: near copies across the split would make it look too good."""
    names, labels = unique_names(documents), np.array([int(document.right) for document in documents])
    groups = np.array([document.row for document in documents])
    for label, word in ((1, "right"), (0, "wrong")):
        if len(np.unique(groups[labels == label])) < LEAST_PROMPTS:
            raise NoOwnAnswers(
                f"The calibration rows give too few {word} answers for an SDM layer over own answers: give more rows, or check the "
                "reward."
            )
    texts: dict[int | str, str] = {name: encoder.decode(d.ids) for name, d in zip(names, documents, strict=True)}
    seed = int(np.random.default_rng([args.seed, 4]).integers(2**31))
    how: dict[str, Any] = {
        "rule": "region",
        "alpha": args.alpha,
        "seed": seed,
        "device": args.device,
        "progress": progress,
    }
    return SDMEstimator(**how).fit(h, labels, names, documents=texts, groups=groups)


def _too_little(documents: Sequence[OwnDocument], right: int, prompts: int) -> str | None:
    """A warning if the LM is nearly always right or nearly always wrong, so that there is too little to learn from; otherwise None."""
    own = [document for document in documents if document.source in ("greedy", "sampled")]
    wrong = sum(not document.right for document in own)
    answered = f"The language model answered {right} of {prompts} calibration prompts correctly"
    if len(own) - wrong < LEAST_WRONG:
        return (
            f"{answered}: improve the language model first. Its SDM layer had to learn from the reference answers what a right "
            "answer looks like."
        )
    if wrong < LEAST_WRONG:
        return (
            f"{answered}, and only {wrong} of its own answers are wrong: too few to learn its errors from. The SDM layer learned "
            "what is wrong from static negatives and answers to other prompts; the certificate still holds."
        )
    return None
