"""From scores to verifications: the deciding region or certificate, and the reason in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from torch import Tensor

from sdmlm.estimator.acceptance import percent
from sdmlm.estimator.explain import Exemplar, reason
from sdmlm.estimator.layer import ALPHA_GRID, highest_alpha
from sdmlm.estimator.region import HighReliabilityRegion, membership
from sdmlm.estimator.scores import Scores
from sdmlm.generation.answers import Answer
from sdmlm.generation.verification import Verification
from sdmlm.language_model.answer_rule import AnswerCertificate
from sdmlm.language_model.encoding import VerificationTags

# Two float32 passes of an LM over the same document (with a cache, in another batch) may differ by rounding. The margin for
# an SDM output is _OUTPUT_NOISE, but no more than _OUTPUT_NOISE_SHARE of its distance to 1. The margin for q' is
# _Q_NOISE_SHARE of q', but no more than _MAX_Q_NOISE.
_OUTPUT_NOISE, _OUTPUT_NOISE_SHARE, _Q_NOISE_SHARE, _MAX_Q_NOISE = 1e-5, 1e-2, 1e-4, 0.1


def widened(region: HighReliabilityRegion) -> HighReliabilityRegion:
    """A region with thresholds lowered by the rounding error of a pass of the LM.

    The thresholds are outputs of calibration documents. When the LM reads such a document again, its output differs in
    the last digits, so without a margin the document could fall on either side of its own threshold.
    """
    psi = tuple(value - min(_OUTPUT_NOISE, _OUTPUT_NOISE_SHARE * max(0.0, 1 - value)) for value in region.psi)
    slack = min(region.q_min * _Q_NOISE_SHARE, _MAX_Q_NOISE)  # always less than one neighbour
    return HighReliabilityRegion(region.alpha, region.q_min - slack, psi)


def decided(scores: Scores, region: Callable[[float], HighReliabilityRegion], alpha: float) -> Scores:
    """Scores with the decisions of other regions (one for each alpha) than the estimator's."""
    own = region(alpha)
    at = membership([region(a) for a in ALPHA_GRID], scores.q_prime, scores.p, scores.prediction)
    return dataclasses.replace(
        scores,
        accepted=own.contains(scores.q_prime, scores.p, scores.prediction),
        accepted_lower=own.contains(scores.q_prime_lower, scores.p_lower, scores.prediction),
        highest_alpha=highest_alpha(at),
    )


def verifications(
    answers: Sequence[Answer],
    scores: Scores,
    exemplars: Sequence[tuple[Exemplar, ...]],
    region: HighReliabilityRegion,
    tags: VerificationTags,
) -> list[Verification]:
    """Answers with their scores and the reason in words; `region` is the one to quote there (not widened)."""
    judged = []
    for i, answer in enumerate(answers):
        c = int(scores.prediction[i])
        highest = float(scores.highest_alpha[i])
        judged.append(
            Verification(
                text=answer.text,
                accepted=bool(scores.accepted[i]),
                verdict=tags.yes if c else tags.no,
                probability=float(scores.p[i, c]),
                probability_lower=float(scores.p_lower[i, c]),
                probability_upper=float(scores.p_upper[i, c]),
                q=int(scores.q[i]),
                d=float(scores.d[i]),
                d_nearest=float(scores.d_nearest[i]),
                q_prime=float(scores.q_prime[i]),
                accepted_lower=bool(scores.accepted_lower[i]),
                out_of_distribution=bool(scores.out_of_distribution[i]),
                highest_alpha=None if math.isnan(highest) else highest,
                exemplars=exemplars[i],
                reason=reason(scores, i, region, (tags.no, tags.yes)),
                alpha=region.alpha,
                completion=answer.text + tags.suffix(bool(c)),
                generated=answer.generated,
                lm_verdict=answer.lm_verdict,
                finish_reason=answer.finish_reason,
                prompt_tokens=answer.prompt_tokens,
                completion_tokens=answer.completion_tokens,
                yes=tags.yes,
            )
        )
    return judged


def applicable(
    certificate: AnswerCertificate | None, alpha: float, digest: Callable[[], str]
) -> AnswerCertificate | None:
    """The certificate, if it was made for this SDM layer and promises at least alpha."""
    if certificate is None or certificate.alpha < alpha or certificate.rule.estimator != digest():
        return None
    return certificate


def by_certificate(
    answers: Sequence[Answer],
    judged: Sequence[Verification],
    certificate: AnswerCertificate,
    scores: Scores,
    h: Tensor,
    search: bool | None = None,
) -> list[Verification]:
    """Verifications whose acceptance follows the certificate; the region of the papers stays in `accepted`.

    `search`: for the answers of a search, whether the certificate was made for that search.
    """
    evidence = certificate.evidence(scores, h.numpy())
    accepted, certainty = certificate.rule.accepts(evidence), certificate.certainty(evidence)
    return [
        dataclasses.replace(
            one,
            certified=bool(accepted[i]),
            usual=float(evidence.d[i]),
            certainty=float(certainty[i]),
            reason=certificate_reason(
                certificate,
                bool(accepted[i]),
                one,
                float(evidence.d[i]),
                float(certainty[i]),
                promise(certificate, answers[i], search),
            ),
        )
        for i, one in enumerate(judged)
    ]


def guarded(
    judged: Sequence[Verification], certificate: AnswerCertificate, scores: Scores, h: Tensor
) -> list[Verification]:
    """Verifications where the certificate promises nothing: the region decides, but what the certificate rejects stays rejected."""
    evidence = certificate.evidence(scores, h.numpy())
    accepted, certainty = certificate.rule.accepts(evidence), certificate.certainty(evidence)
    return [
        one
        if accepted[i]
        else dataclasses.replace(
            one,
            certified=False,
            usual=float(evidence.d[i]),
            certainty=float(certainty[i]),
            reason=certificate_reason(certificate, False, one, float(evidence.d[i]), float(certainty[i]), "")
            if one.verified
            else one.reason,
        )
        for i, one in enumerate(judged)
    ]


def promise(certificate: AnswerCertificate, answer: Answer, search: bool | None) -> str:
    """What the certificate promises about an answer that it accepts: it covers what is written as its held-out answers were."""
    promises_nothing = "The certificate promises nothing about answers"
    if answer.finish_reason == "given":
        return f"{promises_nothing} that the model did not write itself."
    if search is False:
        return f"{promises_nothing} of a search that it was not made for (sdmlm certify --search makes one)."
    if search is None and not answer.as_certified:
        return f"{promises_nothing} that are sampled or cut short: it was made with greedy, whole ones."
    rule, of_search = certificate.rule, " of this search" if search else ""
    return (
        f"With probability {1 - rule.delta:g}, at least {percent(rule.alpha)} of the answers{of_search} that pass this rule are "
        "right, for prompts like those it was certified with."
    )


def certificate_reason(
    certificate: AnswerCertificate, accepted: bool, one: Verification, usual: float, certainty: float, promised: str
) -> str:
    """Why the certificate accepts an answer, or which part of its rule the answer fails, in plain words."""
    rule = certificate.rule
    known = (
        f"about {one.q} of the most similar known answers were" if one.q > 1 else "hardly any similar known answer was"
    )
    seen = f"{known} judged {'right' if one.verdict == one.yes else 'wrong'}, and rightly so"
    if accepted:
        return (
            f"Verified by the certificate: {seen}, and the model is as sure of its words as it usually is ({usual:.0%} of its "
            f"known answers are more unusual). {promised}"
        )
    start = "Not verified by the certificate, so a person should look: "
    if not certificate.certified:
        return f"{start}nothing could be certified at alpha {rule.alpha:g}."
    if one.verdict != one.yes:
        return f"{start}the answer is judged wrong ({seen})." if one.q > 1 else f"{start}the answer is judged wrong."
    if usual < rule.least_distance or (usual <= 0 and rule.epsilon > 0):
        seldom = (
            "all of its known answers are more usual"
            if usual <= 0
            else f"only {usual:.1%} of its known answers are more unusual"
        )
        return f"{start}the model seldom writes answers like this one ({seldom}; at least {rule.least_distance:.0%} must be)."
    least = certificate.least_certainty
    return f"{start}it is judged right, but not surely enough: {seen} ({certainty:.3f}, {least:.3f} is asked for)."
