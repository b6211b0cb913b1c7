"""Verification: an answer with everything that the SDM layer says about it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from sdmlm.estimator.explain import Exemplar


@dataclass(frozen=True)
class Verification:
    """An answer with everything that the SDM layer says about it.

    `SDMLanguageModel.generate` and `SDMLanguageModel.verify` return these. An answer is *verified* when it is judged
    right ("Yes") under the model's rule of acceptance (its certificate, or else the high-reliability region): it may be used
    without a person looking. Any other answer should be looked at, which does not mean that it is wrong.

    Attributes
    ----------
    text : str
        The answer, without any verification suffix.
    accepted : bool
        Whether the answer lies in the high-reliability region at `alpha`, whatever the verdict.
    verdict : str
        "Yes" or "No", as the tags spell it: the prediction of the SDM layer, not the LM's next token.
    probability, probability_lower, probability_upper : float
        SDM(z') of the predicted class, with its bounds.
    q : int
        How many of the nearest support documents in a row have the same verdict and were predicted correctly.
    d : float
        Distance quantile in [0, 1]; 1 is the nearest to the support.
    d_nearest : float
        Euclidean distance to the nearest support document.
    q_prime : float
        The rescaled similarity q', which the region bounds from below.
    accepted_lower : bool
        Whether the lower estimate lies in the region too.
    out_of_distribution : bool
        q = 0: the nearest support document does not agree.
    highest_alpha : float or None
        The highest alpha of the grid at which the answer is accepted.
    exemplars : tuple of Exemplar
        The nearest support documents.
    reason : str
        The decision in one plain sentence.
    alpha : float
        The accuracy that the accepted answers are to have.
    completion : str
        `text` followed by the verification suffix with the verdict of the SDM layer.
    generated : str or None
        The exact text that the LM generated, up to its end of turn; None for an answer that was given to `verify`.
    lm_verdict : bool or None
        The LM's own verdict after its right-most tag, if there is one.
    finish_reason : str
        "stop" or "length"; "given" for an answer that was given to `verify`.
    prompt_tokens, completion_tokens : int
        Tokens of the prompt, and generated tokens (of a search: in all its tries). For an answer that was given to
        `verify`: the tokens after the prompt that the SDM layer read.
    tries : int
        How many answers a search generated.
    calibrated : bool
        False for the answer of a search that was neither certified nor calibrated as a whole.
    yes : str
        How the tags spell a positive verdict.
    certified : bool or None
        Whether the certificate over own answers accepts the answer; None without one. Where it promises nothing (a higher
        alpha than its own, or after feedback): False if it rejects the answer, otherwise None.
    usual : float or None
        The share of the LM's known answers that are more unusual; None where there is no certificate.
    certainty : float or None
        What the certificate bounds from below: how sure the SDM layer is of Yes, whatever the Distance; None without one.

    Examples
    --------
    >>> from sdmlm import Verification
    >>> v = Verification(
    ...     text="4", accepted=True, verdict="Yes", probability=0.99, probability_lower=0.98, probability_upper=0.99,
    ...     q=40, d=0.9, d_nearest=0.1, q_prime=39.6, accepted_lower=True, out_of_distribution=False, highest_alpha=0.95,
    ...     exemplars=(), reason="...", alpha=0.9, completion="4 <verified>Yes</verified>", generated=None,
    ...     lm_verdict=None, finish_reason="given", prompt_tokens=5, completion_tokens=4,
    ... )
    >>> v.verified
    True
    >>> import dataclasses
    >>> dataclasses.replace(v, verdict="No").verified  # accepted, with the verdict that it is wrong
    False
    >>> dataclasses.replace(v, verdict="No").outcome
    'judged wrong'
    >>> v.to_dict()["q"]
    40
    """

    text: str
    accepted: bool
    verdict: str
    probability: float
    probability_lower: float
    probability_upper: float
    q: int
    d: float
    d_nearest: float
    q_prime: float
    accepted_lower: bool
    out_of_distribution: bool
    highest_alpha: float | None
    exemplars: tuple[Exemplar, ...]
    reason: str
    alpha: float
    completion: str
    generated: str | None
    lm_verdict: bool | None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tries: int = 1
    calibrated: bool = True
    yes: str = "Yes"
    certified: bool | None = None
    usual: float | None = None
    certainty: float | None = None

    @property
    def verified(self) -> bool:
        """Judged right under the model's rule of acceptance: may be used without a person looking.

        The rule is the certificate where the model has one that applies, otherwise the high-reliability region, where an answer
        that the certificate rejects stays rejected.
        """
        return (self.accepted if self.certified is None else self.certified) and self.verdict == self.yes

    @property
    def outcome(self) -> str:
        """The decision in a word or three: verified, judged wrong, not verified, or out of distribution.

        Judged wrong: the verdict is "No" in the high-reliability region. The last two say only that a person should look.
        """
        if self.verified:
            return "verified"
        if self.out_of_distribution:
            return "out of distribution"
        return "judged wrong" if self.accepted and self.verdict != self.yes else "not verified"

    @property
    def probability_of_yes(self) -> float:
        """SDM(z') of the class Yes."""
        return self.probability if self.verdict == self.yes else 1 - self.probability

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON (an infinite number becomes None)."""
        plain = {**dataclasses.asdict(self), "verified": self.verified, "outcome": self.outcome}
        del plain["yes"]
        plain["exemplars"] = list(plain["exemplars"])
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in plain.items()}
