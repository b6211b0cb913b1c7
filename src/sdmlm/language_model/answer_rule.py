"""Which answers of an LM may be used without a person looking, and what is promised about them (docs/method.md, 9).

A rule has three parts. The SDM layer's verdict is Yes and its output for Yes is at least a threshold; and the likelihood of the
answer is usual: d, the share of known own answers whose figures lie farther from the middle, is at least epsilon. The threshold
carries the promise. The distance gives up about a share epsilon of usual answers and is there for inputs of another kind,
about which no certificate can say anything.

The threshold is tested on own answers to prompts that played no part in fitting. Candidates are fixed beforehand, from other
answers, and tested from strict to loose until one fails, each with the exact binomial test of "the accuracy among the accepted
is below alpha" (fixed-sequence testing). So with probability at least 1 - delta at least alpha of the accepted answers are
right, for new prompts like the held-out ones, answered in the same way.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom
from sklearn.covariance import LedoitWolf

from sdmlm.language_model.likelihood import FIGURES
from sdmlm.storage.artifacts import finite_or_none, none_as_infinity, write_text_atomically

FILE = "certificate.json"  # in sdm/
KIND, FORMAT_VERSION = "sdmlm answer certificate", 1
DELTA, EPSILON = 0.05, 0.1
_CANDIDATES = 100
_NOISE = 1e-5  # by which the output of a document may differ between two passes of the LM over it
_MOST_REFERENCE = 2000
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class UsualLikelihood:
    """How usual the likelihood figures of an answer are, among the LM's own answers (a Mahalanobis distance)."""

    mean: tuple[float, ...]
    precision: tuple[tuple[float, ...], ...]
    reference: tuple[float, ...]  # distances of known answers, ascending

    @classmethod
    def fit(cls, h: NDArray[Any]) -> UsualLikelihood:
        """From the summaries of own answers."""
        figures = _figures(h)
        scale = (
            figures.std(axis=0) + 1e-9
        )  # first to one scale: shrinkage would favour the figure with the largest numbers
        precision = LedoitWolf().fit(figures / scale).precision_ / np.outer(scale, scale)
        mean = figures.mean(axis=0)
        distances = np.sort(_distances(figures, mean, precision))
        if len(distances) > _MOST_REFERENCE:
            distances = np.quantile(distances, np.linspace(0, 1, _MOST_REFERENCE))
        return cls(tuple(mean.tolist()), tuple(map(tuple, precision.tolist())), tuple(distances.tolist()))

    def d(self, h: NDArray[Any]) -> Floats:
        """The share of known answers that are less usual, in [0, 1]; 0 is unlike all of them."""
        distances = _distances(_figures(h), np.array(self.mean), np.array(self.precision))
        return np.asarray(1 - np.searchsorted(np.array(self.reference), distances, "left") / len(self.reference))


def _figures(h: NDArray[Any]) -> Floats:
    return np.asarray(h, dtype=np.float64)[:, -len(FIGURES) :]


def _distances(figures: Floats, mean: Floats, precision: Floats) -> Floats:
    centred = figures - mean
    return np.asarray(np.sqrt(np.maximum(np.einsum("ni,ij,nj->n", centred, precision, centred), 0)))


@dataclass(frozen=True)
class JudgedAnswers:
    """Own answers with what a rule looks at; `right` is r of each."""

    yes: Mask  # the verdict is Yes
    output: Floats  # SDM(z') of Yes
    d: Floats
    right: Mask

    def __len__(self) -> int:
        return len(self.right)


@dataclass(frozen=True)
class AnswerCertificate:
    """A rule of acceptance for own answers, with its promise and the figures behind it.

    `threshold` is infinite where nothing could be certified; `needed` is then a rough number of held-out prompts with which
    something could be, 0 where more prompts would not help. `estimator` is the digest of the SDM layer it was made for.
    """

    alpha: float
    delta: float
    epsilon: float
    threshold: float
    prompts: int  # held out
    right: int  # of them, answered rightly
    accepted: int
    accepted_right: int
    needed: int
    usual: UsualLikelihood | None
    estimator: str
    source: str = "held-out calibration prompts"

    @property
    def certified(self) -> bool:
        """Whether anything can be accepted."""
        return math.isfinite(self.threshold)

    def distance(self, h: NDArray[Any], d: Floats) -> Floats:
        """The Distance that the rule looks at: of the likelihood figures, or the SDM layer's own `d` without them."""
        return d if self.usual is None else self.usual.d(h)

    def accepts(self, yes: Mask, output: Floats, distance: Floats) -> Mask:
        """Which answers are verified."""
        return np.asarray(yes & (output >= self.threshold) & (distance >= self.epsilon))

    def sentence(self) -> str:
        """What is promised, or why nothing is, in words."""
        lm = f"The language model answered {self.right} of {self.prompts} held-out prompts rightly."
        if not self.certified:
            return f"{lm} Nothing could be certified at alpha {self.alpha:g}: {self._missing()}."
        share = round(100 * self.accepted / max(1, self.prompts))
        return (
            f"{lm} Of 100 answers to such prompts about {share} will be verified, and with probability {1 - self.delta:g} at "
            f"least {self.alpha:.0%} of those are right. This holds for the model's own answers to prompts of the same kind, "
            "not for text by others or other kinds of prompts."
        )

    def _missing(self) -> str:
        if self.alpha >= 1:
            return "no number of prompts can show that nothing is ever wrong; choose an alpha below 1"
        if self.right == 0:
            return (
                "the language model itself is the problem, for none of its answers is right; train it longer or better"
            )
        least = math.ceil(math.log(self.delta) / math.log(self.alpha))
        if self.accepted == 0 and self.prompts < least:
            return f"even without an error {least} held-out prompts are needed; give more rows"
        if self.needed > self.prompts:
            return f"about {self.needed} held-out prompts would be needed; give more rows or choose a lower alpha"
        return "the answers are too often wrong, however sure the SDM layer is; choose a lower alpha or train the model longer"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**dataclasses.asdict(self), "threshold": finite_or_none(self.threshold)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AnswerCertificate:
        """What `to_dict` gave."""
        values = dict(values)
        usual = values["usual"]
        if usual is not None:
            precision = tuple(tuple(row) for row in usual["precision"])
            usual = UsualLikelihood(tuple(usual["mean"]), precision, tuple(usual["reference"]))
        values["usual"], values["threshold"] = usual, none_as_infinity(values["threshold"])
        return cls(**values)


def certify_answers(
    known: JudgedAnswers,
    held_out: JudgedAnswers,
    *,
    alpha: float,
    estimator: str,
    delta: float = DELTA,
    epsilon: float = EPSILON,
    usual: UsualLikelihood | None = None,
    source: str = AnswerCertificate.source,
) -> AnswerCertificate:
    """The loosest rule whose promise holds with probability 1 - delta.

    `known`: answers to prompts that were fitted over; they fix the candidates. `held_out`: answers to fresh prompts.
    """
    for name, value in (("delta", delta), ("alpha", alpha)):
        if not 0 < value <= 1 or (name == "delta" and value == 1):
            raise ValueError(f"{name} is {value!r} but must be between 0 and 1.")
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon is {epsilon!r} but must be at least 0 and below 1.")
    usable = known.yes & (known.d >= epsilon)
    threshold = math.inf
    for candidate in _candidates(known.output[usable], known.right[usable], len(held_out) / max(1, len(known)), alpha):
        accepted = held_out.yes & (held_out.output >= candidate) & (held_out.d >= epsilon)
        errors = int((accepted & ~held_out.right).sum())
        if binom.cdf(errors, int(accepted.sum()), 1 - alpha) > delta:  # nothing accepted proves nothing (1)
            break
        threshold = float(candidate)
    accepted = held_out.yes & (held_out.output >= threshold) & (held_out.d >= epsilon)
    return AnswerCertificate(
        alpha=alpha,
        delta=delta,
        epsilon=epsilon,
        threshold=threshold,
        prompts=len(held_out),
        right=int(held_out.right.sum()),
        accepted=int(accepted.sum()),
        accepted_right=int((accepted & held_out.right).sum()),
        needed=0 if math.isfinite(threshold) else _needed(known, alpha, delta, epsilon),
        usual=usual,
        estimator=estimator,
        source=source,
    )


def _candidates(output: Floats, right: Mask, share: float, alpha: float) -> Floats:
    """Thresholds in the order of testing: first the one that these answers call likeliest to pass, then looser ones.

    `share`: how many held-out answers there are for each of these.
    """
    if not len(output):
        return np.empty(0)
    values = np.unique(np.quantile(output, np.arange(_CANDIDATES) / _CANDIDATES, method="lower"))[::-1]
    accepted = (output[None, :] >= values[:, None]).sum(axis=1)
    errors = ((output[None, :] >= values[:, None]) & ~right[None, :]).sum(axis=1)
    n = np.round(accepted * share)
    # Half an error more than seen: a short stretch without errors is no proof of perfection.
    expected = np.ceil((errors + 0.5) / np.maximum(accepted, 1) * n)
    first = int(np.argmin(binom.cdf(expected, n, 1 - alpha)))
    return np.asarray(values[first:] - np.minimum(_NOISE, 0.01 * (1 - values[first:])))


def _needed(known: JudgedAnswers, alpha: float, delta: float, epsilon: float) -> int:
    """A rough number of held-out prompts with which something could be certified; 0 where more would not help."""
    usable = known.yes & (known.d >= epsilon)
    if alpha >= 1 or not usable.any():
        return 0
    right = known.right[usable][np.argsort(-known.output[usable], kind="stable")]
    best = 0
    for k in np.unique(np.linspace(1, len(right), 50).astype(int)):
        accuracy = 1 - ((~right[:k]).sum() + 0.5) / k
        if accuracy <= alpha:
            continue
        spread = (2 / (accuracy - alpha)) ** 2 * accuracy * (1 - accuracy)  # the normal approximation of the test
        n = math.ceil(max(math.log(delta) / math.log(alpha), spread) * len(known) / k)
        best = n if best == 0 else min(best, n)
    return best


# On disk


def save_certificate(sdm: Path, certificate: AnswerCertificate | None) -> None:
    """Write `sdm/certificate.json`, or remove it where there is no certificate any more."""
    path = sdm / FILE
    if certificate is None:
        path.unlink(missing_ok=True)
        return
    values = {"kind": KIND, "format_version": FORMAT_VERSION, **certificate.to_dict()}
    write_text_atomically(path, json.dumps(values, indent=1, allow_nan=False) + "\n")


def load_certificate(sdm: Path) -> AnswerCertificate | None:
    """What `save_certificate` wrote; None where there is none."""
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
        raise ValueError(f"{path} is damaged ({error}): run sdmlm certify, or delete it.") from error
    raise ValueError(f"{path} was written by a newer sdmlm (format {version}): upgrade sdmlm.")


def right_of(labels: Sequence[int]) -> Mask:
    """Rewards as a mask."""
    return np.asarray(np.asarray(labels) == 1)
