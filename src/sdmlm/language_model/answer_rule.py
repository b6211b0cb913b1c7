"""Which answers of an LM may be used without a person looking, and what is promised about them (docs/method.md, 9).

The rule is a `CertifiedRule` of the estimator for the verdict Yes alone: the confidence of the SDM layer is at least a threshold,
and Distance is at least a bound. If the SDM layer reads likelihood, Distance is computed from the likelihood figures: it is the
share of known own answers that are less usual. The certificate is about the threshold. The bound is there to reject inputs of
another kind, about which no certificate can say anything; it also rejects the share epsilon of usual answers.

The promise holds for new prompts like the held-out ones, which were not used for fitting, if they are answered in the same way.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdmlm.estimator.acceptance import (
    CertifiedRule,
    Evidence,
    certify_rule,
    needed_points,
    percent,
    points_for_certificate,
)
from sdmlm.estimator.scores import Scores
from sdmlm.language_model.usual import UsualLikelihood
from sdmlm.storage.artifacts import none_as_infinity, write_text_atomically

FILE = "certificate.json"  # in sdm/
KIND, FORMAT_VERSION = "sdmlm answer certificate", 3
DELTA, EPSILON = 0.05, 0.1
_LOWER = (0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
YES = 1
Mask = NDArray[np.bool_]
OWN_ANSWERS = "the model's own answers"


@dataclass(frozen=True)
class AnswerCertificate:
    """A rule of acceptance for own answers, with its promise and the figures behind it.

    `right` of `prompts` held-out prompts were answered correctly, and the rule accepts `accepted` of these answers, of which
    `accepted_right` are right. `rule.estimator` is the digest of the SDM layer that it was made for.
    """

    rule: CertifiedRule
    prompts: int
    right: int
    accepted: int
    accepted_right: int
    usual: UsualLikelihood | None
    source: str = "held-out calibration prompts"
    threshold_on: Literal["confidence", "output"] = "confidence"  # "output": SDM(z') of Yes, in format 1
    reachable: float | None = None  # if nothing is certified: a lower alpha for which so many prompts may suffice

    @property
    def alpha(self) -> float:
        """The share of right answers among the accepted ones that is promised."""
        return self.rule.alpha

    @property
    def certified(self) -> bool:
        """Whether anything can be accepted."""
        return self.rule.certified

    @property
    def threshold(self) -> float:
        """The least confidence; infinite if nothing could be certified."""
        return self.rule.thresholds[YES]

    def evidence(self, scores: Scores, h: NDArray[Any]) -> Evidence:
        """The rule's input for answers with these scores and summaries."""
        evidence = evidence_of(scores, h, self.usual)
        return (
            evidence
            if self.threshold_on == "confidence"
            else dataclasses.replace(evidence, confidence=scores.p[:, YES])
        )

    def certainty(self, evidence: Evidence) -> NDArray[np.float64]:
        """How sure the SDM layer is of Yes, in [0, 1]; at least `least_certainty` for accepted answers."""
        if self.threshold_on == "output":
            return evidence.confidence
        sure = _sigmoid(evidence.confidence)
        return np.where(evidence.predictions == YES, sure, np.where(np.isfinite(evidence.confidence), 1 - sure, 0.0))

    @property
    def least_certainty(self) -> float | None:
        """The threshold as a certainty; None if nothing is accepted."""
        if not self.certified:
            return None
        return self.threshold if self.threshold_on == "output" else float(_sigmoid(np.array(self.threshold)))

    def sentence(self, covered: str = OWN_ANSWERS) -> str:
        """What is promised, or why nothing is, in words. `covered`: which answers it was made with."""
        lm = f"The language model answered {self.right} of {self.prompts} held-out prompts correctly."
        if not self.certified:
            return f"{lm} Nothing could be certified at alpha {self.alpha:g}: {self._missing()}."
        share = round(100 * self.accepted / max(1, self.prompts))
        return (
            f"{lm} Of 100 answers to such prompts about {share} will be verified, and with probability {1 - self.rule.delta:g} at "
            f"least {percent(self.alpha)} of those are right. This holds for {covered} to prompts of the same kind, not for text by "
            "others or other kinds of prompts."
        )

    def _missing(self) -> str:
        if self.alpha >= 1:
            return "no number of prompts can show that nothing is ever wrong; choose an alpha below 1"
        if self.right == 0:
            return "none of the language model's answers is right, so its SDM layer has nothing to accept; train the model longer or better"
        lower = "a lower alpha" if self.reachable is None else f"alpha {self.reachable:g}, which these may suffice for"
        least = points_for_certificate(self.alpha, self.rule.delta, self.rule.epsilon)
        if self.prompts < least:
            more = ", and more if some are wrong" if self.right < self.prompts else ""
            return (
                f"about {least} held-out prompts are needed even if all answers are right{more}; give more rows (up to half of "
                f"the calibration rows are held out; of the rows of sdmlm certify, four in five) or choose {lower}"
            )
        if self.rule.needed > self.prompts:
            return f"about {self.rule.needed} held-out prompts would be needed; give more rows or choose {lower}"
        if self.right == self.prompts:
            return "no answer was wrong, but too few answers are usual and judged right; give more rows"
        return (
            f"the answers are too often wrong, however sure the SDM layer is; choose {lower} or train the model longer"
        )

    def figures(self) -> dict[str, Any]:
        """The figures for training.json and the commands' JSON."""
        rule = {name: getattr(self.rule, name) for name in ("alpha", "delta", "epsilon", "needed", "certified")}
        rule |= {"least_certainty": self.least_certainty, "least_usual": self.rule.least_distance}
        names = ("prompts", "right", "accepted", "accepted_right", "source")
        return {**rule, **{name: getattr(self, name) for name in names}, "says": self.sentence()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**dataclasses.asdict(self), "rule": self.rule.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AnswerCertificate:
        """What `to_dict` gave, now or in format 1."""
        values = dict(values)
        if values["usual"] is not None:
            values["usual"] = UsualLikelihood.from_dict(values["usual"])
        if "rule" not in values:
            return cls._from_format_1(values)
        return cls(**{**values, "rule": CertifiedRule.from_dict(values["rule"])})

    @classmethod
    def _from_format_1(cls, values: dict[str, Any]) -> AnswerCertificate:
        """A certificate of format 1: its threshold is on the SDM output, and its values are all at the top level."""
        alpha, delta, epsilon, threshold, needed, estimator = (
            values.pop(name) for name in ("alpha", "delta", "epsilon", "threshold", "needed", "estimator")
        )
        thresholds = math.inf, none_as_infinity(threshold)
        rule = CertifiedRule(
            alpha, delta, "overall", epsilon, thresholds, epsilon, (YES,), values["prompts"], needed, (), estimator
        )
        return cls(rule, **values, threshold_on="output")


def evidence_of(
    scores: Scores, h: NDArray[Any], usual: UsualLikelihood | None, right: ArrayLike | None = None
) -> Evidence:
    """The input of a rule for answers with these scores and summaries; `right`: whether each is right, if known."""
    distance = scores.d if usual is None else usual.d(h)
    labels = None if right is None else np.asarray(right).astype(np.int64)
    return Evidence(scores.confidence, distance, scores.prediction, labels)


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-np.clip(values, -700, 700))))


def certify_answers(
    known: Evidence,
    held_out: Evidence,
    *,
    alpha: float,
    estimator: str,
    delta: float = DELTA,
    epsilon: float = EPSILON,
    usual: UsualLikelihood | None = None,
    source: str = AnswerCertificate.source,
) -> AnswerCertificate:
    """The certified rule for the verdict Yes; its promise holds with probability at least 1 - delta.

    `known`: out-of-sample evidence of the fitted answers, from which candidates and Distance bound are chosen. `held_out`:
    answers to prompts that were not used for fitting. Label 1: the answer is right.
    """
    rule = certify_rule(known, held_out, 2, alpha=alpha, delta=delta, epsilon=epsilon, classes=[YES])
    rule = dataclasses.replace(rule, estimator=estimator)
    right, accepted = held_out.labels == YES, rule.accepts(held_out)
    counts = int(np.sum(right)), int(accepted.sum()), int((accepted & right).sum())
    reachable = None if rule.certified else _reachable(known, rule)
    return AnswerCertificate(rule, len(held_out), *counts, usual, source, reachable=reachable)


def _reachable(known: Evidence, rule: CertifiedRule) -> float | None:
    """The highest alpha of a grid for which the held-out points may suffice. The held-out answers themselves play no part in it."""
    for alpha in (a for a in _LOWER if a < rule.alpha):
        if 0 < needed_points(known, dataclasses.replace(rule, alpha=alpha)) <= rule.held_out:
            return alpha
    return None


# On disk


def save_certificate(sdm: Path, certificate: AnswerCertificate | None) -> None:
    """Write `sdm/certificate.json`, or remove it if there is no certificate any more."""
    path = sdm / FILE
    if certificate is None:
        path.unlink(missing_ok=True)
        return
    values = {"kind": KIND, "format_version": FORMAT_VERSION, **certificate.to_dict()}
    write_text_atomically(path, json.dumps(values, indent=1, allow_nan=False) + "\n")


def load_certificate(sdm: Path) -> AnswerCertificate | None:
    """What `save_certificate` wrote; None if there is no file."""
    path = sdm / FILE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("kind") != KIND:
            raise KeyError("kind")
        version = int(values.pop("format_version"))
        if version <= FORMAT_VERSION:
            return AnswerCertificate.from_dict(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, then run sdmlm certify.") from error
    raise ValueError(f"{path} was written by a newer sdmlm (format {version}): upgrade sdmlm.")
