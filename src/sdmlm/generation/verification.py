"""What an SDM language model hands out, and the text of an answer while and after it is written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sdmlm.estimator.explain import Exemplar
from sdmlm.estimator.layer import ALPHA_GRID, highest_alpha
from sdmlm.estimator.region import HighReliabilityRegion, membership
from sdmlm.estimator.scores import Scores
from sdmlm.language_model.encoding import Encoder, overlap

# What two passes of an LM over the same document (with a cache, in another batch) may change, in float32: of an SDM output,
# there also as a share of what is missing to 1, and of q' as a share of it.
_NOISE, _NOISE_REST, _NOISE_Q, _MOST_Q = 1e-5, 1e-2, 1e-4, 0.1


@dataclass(frozen=True)
class Verification:
    """An answer and what the SDM layer says about it."""

    text: str  # the answer, without any verification suffix
    accepted: bool  # in the high-reliability region at alpha
    verdict: str  # "Yes" or "No": the estimator's prediction, not the LM's next token
    probability: float  # SDM(z') of the predicted class
    probability_lower: float
    probability_upper: float
    q: int
    d: float
    d_nearest: float
    q_prime: float
    accepted_lower: bool  # in the region also by the lower estimate
    out_of_distribution: bool  # q = 0
    highest_alpha: float | None  # the highest alpha of the grid at which it is accepted
    exemplars: tuple[Exemplar, ...]  # the nearest support documents
    reason: str  # one plain sentence
    alpha: float
    completion: str  # text, separator, `<verified>`, forced verdict, `</verified>`
    generated: str | None  # what the LM wrote, verbatim, up to its end of turn; None for given text
    lm_verdict: bool | None  # the LM's own verdict after its right-most tag, if legible
    finish_reason: str  # "stop" or "length"; "given" for given text
    prompt_tokens: int
    completion_tokens: (
        int  # generated, by a search in all its tries; of given text: those after the prompt that the SDM layer read
    )
    tries: int = 1  # candidates that a search made
    calibrated: bool = True  # False for the answer of a search that was not calibrated as a whole
    yes: str = "Yes"  # how a positive verdict is spelled

    @property
    def verified(self) -> bool:
        """Accepted as Yes: what may be used without a person looking."""
        return self.accepted and self.verdict == self.yes

    @property
    def probability_of_yes(self) -> float:
        """SDM(z') of the class Yes."""
        return self.probability if self.verdict == self.yes else 1 - self.probability

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON (an infinite number becomes None)."""
        plain = {**dataclasses.asdict(self), "verified": self.verified}
        del plain["yes"]
        plain["exemplars"] = list(plain["exemplars"])
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in plain.items()}


@dataclass(frozen=True)
class Sampling:
    """How the LM is to write."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        if not _is_number(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature!r} but must be a number of at least 0 (0 is greedy).")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r} but must be above 0 and at most 1.")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError("stop must be a string or a list of strings, none of them empty.")


@dataclass
class Answer:
    """An answer before it is judged."""

    text: str
    ids: list[int]  # the document up to and including `<verified>`
    prompt_tokens: int
    completion_tokens: int
    generated: str | None = None
    lm_verdict: bool | None = None
    finish_reason: str = "given"
    h: Tensor | None = None  # where the states of the generation gave it


class AnswerText:
    """The text of one answer while its ids grow: where a stop string ends it, and what of it is certain already."""

    def __init__(self, encoder: Encoder, stop: Sequence[str] = ()) -> None:
        self._encoder, self._stop, self._sent = encoder, stop, 0
        self._window = max((len(s.encode()) for s in stop), default=0)  # each token spells at least one byte

    def stopped(self, ids: Sequence[int]) -> bool:
        """Whether a stop string stands at the end of the ids."""
        return bool(self._stop) and self._first_stop(self._encoder.decode(ids[-self._window :])) is not None

    def _first_stop(self, text: str) -> int | None:
        return min((at for s in self._stop if (at := text.find(s)) >= 0), default=None)

    def verbatim(self, ids: Sequence[int]) -> str:
        """What the LM wrote up to its end of turn."""
        return self._encoder.decode(self._encoder.turn(ids))

    def read(self, text: str) -> tuple[str, bool | None]:
        """(answer, the LM's own verdict) in what the LM wrote (`verbatim`), up to a stop string."""
        return self._encoder.tags.read(text[: self._first_stop(text)])

    def piece(self, ids: Sequence[int]) -> str:
        """What has become certain since the last call: no part of a tag, of a stop string, or of half a character."""
        tags, text = self._encoder.tags, self.verbatim(ids)
        text, tag, _ = text[: self._first_stop(text)].partition(tags.open)
        if tag:
            text = tags.certain(text)
        else:
            text = text.rstrip("\ufffd")
            # A stop string may end the answer where it begins, and then what a tag begins with is no part of it either.
            ends = (text, text[: len(text) - max((overlap(text, stop) for stop in self._stop), default=0)])
            text = min((tags.certain(end) for end in ends), key=len)
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece

    def last(self, text: str) -> str:
        """What the pieces so far leave out of the finished answer."""
        return text[self._sent :]


def widened(region: HighReliabilityRegion) -> HighReliabilityRegion:
    """A region whose thresholds give way to rounding.

    Its thresholds are outputs of calibration documents. When such a document is read again, its output differs in the last
    digits, and would lie on either side of itself.
    """
    psi = tuple(value - min(_NOISE, _NOISE_REST * max(0.0, 1 - value)) for value in region.psi)
    slack = min(region.q_min * _NOISE_Q, _MOST_Q)  # never a whole neighbour
    return HighReliabilityRegion(region.alpha, region.q_min - slack, psi)


def decided(scores: Scores, region: Callable[[float], HighReliabilityRegion], alpha: float) -> Scores:
    """Scores decided by these regions (one for each alpha) in place of those of the estimator."""
    own = region(alpha)
    at = membership([region(a) for a in ALPHA_GRID], scores.q_prime, scores.p, scores.prediction)
    return dataclasses.replace(
        scores,
        accepted=own.contains(scores.q_prime, scores.p, scores.prediction),
        accepted_lower=own.contains(scores.q_prime_lower, scores.p_lower, scores.prediction),
        highest_alpha=highest_alpha(at),
    )


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r} but must be a whole number of at least {least}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
