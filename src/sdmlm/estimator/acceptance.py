"""Acceptance with a promise: which predictions to accept, and what is certified about them (docs/estimator.md).

A rule accepts a point when two things hold. Its *confidence* (Similarity and Magnitude: the log-odds of the SDM output at d =
1) is at least a threshold t, and its *Distance* d is at least a bound below which only a share epsilon of the known points lies.
The certificate is about the confidence threshold. The Distance bound is there to reject points of another kind, about which no
certificate can say anything; its cost is that it also rejects the share epsilon of known points.

The threshold is found on points that were not used for fitting. Candidate thresholds come from the calibration points and are
tested in a fixed order until one fails: first the one most likely to pass by those points, then lower and lower ones. Each is
tested by the exact binomial test; the null hypothesis is that the accuracy among the accepted points is below alpha
(`threshold_tests` has the procedures and their proofs). So with probability at least 1 - delta the accuracy among the accepted
points is at least alpha, for new points drawn like the held-out ones.

promise="overall"    over all accepted points
promise="predicted"  for each predicted class, with a threshold for each
promise="class"      for each predicted and each true class, as the papers ask: one threshold, all tests must pass
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from sdmlm.errors import BadSetting
from sdmlm.estimator.region import check_alpha
from sdmlm.estimator.threshold_tests import (
    Candidates,
    by_class,
    candidate_order,
    candidates_at,
    fixed_sequence,
    thresholds_of,
)
from sdmlm.storage.artifacts import finite_or_none, none_as_infinity, write_text_atomically

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Promise = Literal["overall", "predicted", "class"]

KIND = "sdmlm certified rule"
_CANDIDATES = 100
_MARGIN = 1.2  # more points than the least, since by chance fewer than expected may be accepted


@dataclass(frozen=True)
class Evidence:
    """The input of a rule for N points: confidence, Distance and prediction; `labels` if they are known."""

    confidence: Floats
    d: Floats
    predictions: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.confidence)

    @property
    def right(self) -> Mask:
        """Whether each prediction is the true class."""
        if self.labels is None:
            raise ValueError("These points have no labels: a certificate needs labelled points.")
        return np.asarray(self.predictions == self.labels)


@dataclass(frozen=True)
class RuleTest:
    """One exact binomial test: of a threshold, for the points of one group ("all", "predicted 1", "true 0", ...)."""

    threshold: float
    group: str
    accepted: int
    errors: int
    p_value: float
    passed: bool


@dataclass(frozen=True)
class CertifiedRule:
    """A rule of acceptance with what is certified about it.

    Attributes
    ----------
    thresholds : tuple of float
        The least confidence by predicted class; infinite where nothing is accepted.
    least_distance : float
        The least Distance d. A point with d = 0 is never accepted while epsilon is above 0.
    held_out : int
        How many held-out points the certificate was made from.
    needed : int
        A rough number of held-out points with which a certificate could be expected; 0 where there is one.
    tests : tuple of RuleTest
        Every test that was made, in order.
    """

    alpha: float
    delta: float
    promise: Promise
    epsilon: float
    thresholds: tuple[float, ...]
    least_distance: float
    classes: tuple[int, ...]
    held_out: int
    needed: int
    tests: tuple[RuleTest, ...]
    estimator: str | None = None  # digest of the estimator it was made for

    @property
    def certified(self) -> bool:
        """Whether anything can be accepted under the promise."""
        return any(math.isfinite(t) for t in self.thresholds)

    def accepts(self, evidence: Any) -> Mask:
        """Which points are accepted, (N,). `evidence` is an `Evidence` or the `Scores` of the estimator."""
        predictions = evidence.predictions if isinstance(evidence, Evidence) else evidence.prediction
        bound = np.asarray(self.thresholds)[predictions]
        return np.asarray((evidence.confidence >= bound) & self.near_enough(evidence.d))

    def near_enough(self, d: Floats) -> Mask:
        """Which points meet the Distance part of the rule."""
        return np.asarray((d >= self.least_distance) & ((d > 0) | (self.epsilon == 0)))

    def sentence(self, class_names: Sequence[str] | None = None) -> str:
        """What is promised, or what is missing, in words."""
        if not self.certified:
            return (
                f"Nothing could be certified at alpha {self.alpha:g} and delta {self.delta:g} with {self.held_out} held-out "
                f"points: {_missing(self)}."
            )
        covered = {
            "overall": "of all accepted predictions",
            "predicted": "of the accepted predictions of each class",
            "class": "of the accepted predictions of each class, and of the accepted points of each true class",
        }[self.promise]
        names = [str(c) for c in range(len(self.thresholds))] if class_names is None else list(class_names)
        left = [names[c] for c, t in enumerate(self.thresholds) if not math.isfinite(t)]
        rest = f" Predictions of {', '.join(left)} are never accepted." if left else ""
        return (
            f"Certified: with probability at least {1 - self.delta:g}, at least {percent(self.alpha)} {covered} are right, for new "
            f"points like the {self.held_out} held-out ones.{rest} It says nothing about other kinds of points; "
            f"the Distance bound is there to reject those, and also rejects {percent(self.epsilon)} of known points."
        )

    def __str__(self) -> str:
        return self.sentence()

    def save(self, path: str | Path) -> None:
        """Write as JSON; a threshold of null accepts nothing of its class."""
        write_text_atomically(path, json.dumps({"kind": KIND, **self.to_dict()}, indent=1, allow_nan=False) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = dataclasses.asdict(self)
        values["thresholds"] = [finite_or_none(t) for t in self.thresholds]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CertifiedRule:
        """What `to_dict` gave."""
        values = {name: value for name, value in values.items() if name != "kind"}
        values["thresholds"] = tuple(none_as_infinity(t) for t in values["thresholds"])
        values["tests"] = tuple(RuleTest(**test) for test in values["tests"])
        values["classes"] = tuple(values["classes"])
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> CertifiedRule:
        """Read what `save` wrote."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if values["kind"] != KIND:
                raise KeyError("kind")
            return cls.from_dict(values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a readable certificate: make it with `sdmlm certify --output`.") from error


def certify_rule(
    calibration: Evidence,
    held_out: Evidence,
    n_classes: int,
    *,
    alpha: float,
    delta: float = 0.05,
    promise: Promise = "overall",
    epsilon: float = 0.05,
    classes: Sequence[int] | None = None,
    candidates: int = _CANDIDATES,
) -> CertifiedRule:
    """The rule that accepts the most among those tested and passed; its promise holds with probability at least 1 - delta.

    `calibration`: out-of-sample evidence of the fitted points, from which candidates and Distance bound are chosen.
    `held_out`: labelled points that were not used for fitting. `classes`: the predicted classes to accept (default: all).
    """
    check_promise(alpha, delta, promise, epsilon)
    covered = sorted(range(n_classes) if classes is None else {int(c) for c in classes})
    if not covered or not set(covered) <= set(range(n_classes)):
        raise BadSetting("classes", f"is {classes!r} but must name some of the classes 0..{n_classes - 1}.")
    least = distance_bound(calibration.d, epsilon)
    rule = CertifiedRule(
        alpha, delta, promise, epsilon, (math.inf,) * n_classes, least, tuple(covered), len(held_out), 0, ()
    )
    tests: list[RuleTest] = []

    def passes(group: Sequence[int], threshold: float, level: float) -> bool:
        made = _tests(held_out, rule, group, threshold, level)
        tests.extend(made)
        return all(test.passed for test in made)

    def candidates_of(group: Sequence[int], promised: Promise) -> list[Candidates]:
        known = rule.near_enough(calibration.d) & np.isin(calibration.predictions, group)
        thresholds = thresholds_of(calibration.confidence[known], candidates)
        share = len(held_out) / max(1, len(calibration))
        members = [mask for _, mask in _test_groups(promised, group, calibration, known)]
        total = len(calibration)
        return [
            candidates_at(thresholds, calibration.confidence[m], calibration.right[m], share, total) for m in members
        ]

    if promise == "predicted":
        by_predicted = {c: candidates_of([c], "overall")[0] for c in covered}
        by_c = by_class(by_predicted, alpha, delta, lambda c, threshold, level: passes([c], threshold, level))
    else:
        order = candidate_order(candidates_of(covered, promise), alpha, delta)
        threshold = fixed_sequence(order, lambda threshold: passes(covered, threshold, delta))
        by_c = dict.fromkeys(covered, threshold)
    thresholds = [by_c.get(c, math.inf) for c in range(n_classes)]
    rule = dataclasses.replace(rule, thresholds=tuple(thresholds), tests=tuple(tests))
    return rule if rule.certified else dataclasses.replace(rule, needed=needed_points(calibration, rule))


def percent(share: float) -> str:
    """A share that was asked for, with all its digits: 97.5% must not be promised as 98%.

    >>> percent(0.975), percent(0.29)
    ('97.5%', '29%')
    """
    return f"{100 * share:g}%"


def check_promise(alpha: float, delta: float, promise: str, epsilon: float) -> None:
    """Refuse settings that no rule can promise."""
    check_alpha(alpha)
    if not 0.0 < delta < 1.0:
        raise BadSetting("delta", f"is {delta!r} but must be between 0 and 1: 0.05 is usual.")
    if promise not in get_args(Promise):
        raise BadSetting("promise", f'is {promise!r} but must be "overall", "predicted" or "class".')
    if not 0.0 <= epsilon < 1.0:
        raise BadSetting("epsilon", f"is {epsilon!r} but must be at least 0 and below 1: 0.05 is usual.")


def distance_bound(d: Floats, epsilon: float) -> float:
    """The Distance below which a share epsilon of these known points lies."""
    return float(np.quantile(d, epsilon, method="lower")) if len(d) and epsilon > 0 else 0.0


def points_for_certificate(alpha: float, delta: float, epsilon: float) -> int:
    """How many held-out points can certify something if all are right, when a share epsilon of them may be rejected as unlike."""
    return math.ceil(_MARGIN * least_points(alpha, delta) / (1 - epsilon))


def _tests(
    held_out: Evidence, rule: CertifiedRule, group: Sequence[int], threshold: float, level: float
) -> list[RuleTest]:
    """The tests of one threshold for predictions of these classes."""
    inside = rule.near_enough(held_out.d) & np.isin(held_out.predictions, group) & (held_out.confidence >= threshold)
    made = []
    for name, members in _test_groups(rule.promise, group, held_out, inside):
        n, errors = int(members.sum()), int((members & ~held_out.right).sum())
        p_value = float(binom.cdf(errors, n, 1.0 - rule.alpha))  # 1 if nothing is accepted
        made.append(RuleTest(float(threshold), name, n, errors, p_value, p_value <= level))
    return made


def _test_groups(promise: Promise, group: Sequence[int], held_out: Evidence, inside: Mask) -> list[tuple[str, Mask]]:
    """The sets of accepted points whose accuracy is tested."""
    if promise == "overall":
        return [("all", inside)]
    tested = [(f"predicted {c}", inside & (held_out.predictions == c)) for c in group]
    if promise == "class" and held_out.labels is not None:
        tested += [(f"true {c}", inside & (held_out.labels == c)) for c in group]
    return tested


def least_points(alpha: float, delta: float) -> int:
    """The least number of held-out points with which a test can pass: enough if no prediction is wrong."""
    return 0 if alpha == 1.0 else math.ceil(math.log(delta) / math.log(alpha))


def needed_points(calibration: Evidence, rule: CertifiedRule) -> int:
    """A rough number of held-out points with which something could be certified, from the calibration points; 0 for none.

    Of `rule` only the settings count, not the thresholds.
    """
    inside = rule.near_enough(calibration.d) & np.isin(calibration.predictions, rule.classes)
    if rule.alpha == 1.0 or not inside.any():
        return 0
    order = np.flatnonzero(inside)[np.argsort(-calibration.confidence[inside], kind="stable")]
    accepted = np.arange(1, len(order) + 1)
    accuracy = 1 - (np.cumsum(~calibration.right[order]) + 0.5) / accepted
    best = 0
    for k in np.unique(np.linspace(1, len(order), 50).astype(int)):
        a = accuracy[k - 1]
        if a <= rule.alpha:
            continue
        # The normal approximation of the test, and at least as many as are needed without an error.
        z = -2.0
        n = max(_MARGIN * least_points(rule.alpha, rule.delta), (z / (a - rule.alpha)) ** 2 * a * (1 - a))
        total = math.ceil(n * len(calibration) / k)
        best = total if best == 0 else min(best, total)
    return best


def _missing(rule: CertifiedRule) -> str:
    if rule.alpha == 1.0:
        return "no number of points can show that nothing is ever wrong; choose an alpha below 1"
    least = least_points(rule.alpha, rule.delta)
    if rule.held_out < least:
        return (
            f"even without an error {least} are needed, so fit on at least {2 * least} points (up to half are held out)"
        )
    if rule.needed > rule.held_out:
        return f"about {rule.needed} would be needed, or a lower alpha"
    return "the predictions are too often wrong, however confident; choose a lower alpha or better embeddings"
