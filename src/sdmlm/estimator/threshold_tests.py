"""Which thresholds of a score pass the test "at least alpha of what it accepts is right", and in which order they are tested.

Candidates and their order are chosen from calibration points alone, so they do not depend on the held-out points.

`fixed_sequence` tests one list of candidates, each at level delta, until one fails. Proof that it is wrong with probability
at most delta: a threshold whose accuracy is too low is only certified if the first such threshold of the list passes, and an
exact test passes such a threshold with probability at most delta.

`by_class` certifies a threshold for each class. Each class that is likely enough to pass gets a list of candidates, and is done
when all candidates of its list have passed. The lists are tested in turn, each candidate at level delta / (number of classes that
are not done). So the level rises for the others when a class is done (Holm's procedure, for lists). When all are done, lower
thresholds, and those of the classes without a list, follow as one fixed sequence at level delta.

Proof: call a threshold bad if its accuracy is too low, and let T be the set of classes whose list has a bad one. If T is empty, only
the fixed sequence at the end can go wrong, with probability at most delta. Otherwise: until a bad threshold passes, no class of T is
done, so all levels are at most delta / |T|. The bad threshold that passes first is the first bad one of its list, because a list is
tested in order. So the probability that any bad threshold passes is at most |T| * delta / |T| = delta.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln
from scipy.stats import binom

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Passes = Callable[[int, float, float], bool]  # (class, threshold, level) -> whether the test passes

_FAIR = 0.5  # a class gets a list if one of its candidates passes with at least this probability
_MIDDLES = (-1.2816, -0.5244, 0.0, 0.5244, 1.2816)  # of five equally likely parts of a normal distribution
_PART = 0.5  # a list ends before the first candidate whose probability to pass is below this share of the best one


@dataclass(frozen=True)
class Candidates:
    """Thresholds from strict to loose, with what to expect of their tests.

    `seen` and `errors`: calibration points that each accepts, and the wrong ones among them. `expected`: how many held-out
    points it will accept, and `spread` the standard deviation of that number.
    """

    thresholds: Floats
    seen: Floats
    errors: Floats
    expected: Floats
    spread: Floats

    def chances(self, alpha: float, level: float) -> Floats:
        """The probability that each passes at this level, estimated from its errors on calibration points.

        It is averaged over how many held-out points are accepted. Otherwise, where few points are needed, the strictest
        candidate that is expected to accept just enough would come first, and in half of all cases it accepts too few.
        """
        counts = [np.maximum(np.round(self.expected + z * self.spread), 0) for z in _MIDDLES]
        return np.asarray(np.mean([self._chances_among(n, alpha, level) for n in counts], axis=0))

    def _chances_among(self, n: Floats, alpha: float, level: float) -> Floats:
        """The probability that each passes if it accepts n held-out points.

        With Jeffreys' prior for the error rate, the number of errors among n held-out points is beta-binomial.
        """
        allowed = binom.ppf(level, n, 1.0 - alpha)  # the most errors with which the test passes, or one more
        allowed = np.where(binom.cdf(allowed, n, 1.0 - alpha) <= level, allowed, allowed - 1)
        chance = beta_binomial_cdf(np.maximum(allowed, 0), n, self.errors + 0.5, self.seen - self.errors + 0.5)
        return np.where((n > 0) & (allowed >= 0), chance, 0.0)


def beta_binomial_cdf(k: Floats, n: Floats, a: Floats, b: Floats) -> Floats:
    """P(at most k of n), as scipy.stats.betabinom.cdf, which needs a hundred times as long for arrays."""
    if not len(k):
        return np.empty(0)
    j = np.arange(int(k.max()) + 1)
    n_, a_, b_ = n[:, None], a[:, None], b[:, None]
    left = np.maximum(n_ - j, 0)
    log_p = betaln(j + a_, left + b_) - betaln(a_, b_) - betaln(left + 1, j + 1) - np.log(n_ + 1)
    return np.asarray(np.where(j <= np.minimum(k[:, None], n_), np.exp(log_p), 0.0).sum(axis=1).clip(max=1.0))


def thresholds_of(confidence: Floats, most: int) -> Floats:
    """Quantiles of the confidence of calibration points, `most` of them or fewer, from strict to loose."""
    finite = confidence[np.isfinite(confidence)]  # minus infinity marks q = 0, which is never accepted
    if not len(finite):
        return finite
    return np.unique(np.quantile(finite, np.arange(most) / most, method="lower"))[::-1]


def candidates_at(thresholds: Floats, confidence: Floats, right: Mask, share: float, total: int) -> Candidates:
    """The thresholds with the counts of these calibration points.

    `share`: number of held-out points per calibration point; `total`: how many calibration points there are in all.
    """
    order = np.argsort(-confidence, kind="stable")
    errors = np.concatenate([[0], np.cumsum(~right[order])])
    seen = np.searchsorted(-confidence[order], -thresholds, side="right")
    expected = seen.astype(float) * share
    # Of the share of points that is accepted, both the estimate and the draw of held-out points vary.
    spread: Floats = np.sqrt(expected * (1 - seen / max(1, total)) * (1 + share))
    return Candidates(thresholds, seen.astype(float), errors[seen].astype(float), expected, spread)


def candidate_order(candidates: Sequence[Candidates], alpha: float, level: float) -> Floats:
    """The thresholds in the order in which they are tested: first the one most likely to pass, then lower and lower ones.

    `candidates`: the same thresholds for each group of points whose test must pass; the group least likely to pass counts.
    """
    thresholds = candidates[0].thresholds
    if not len(thresholds):
        return thresholds
    chances = np.min([one.chances(alpha, level) for one in candidates], axis=0)
    return thresholds[int(np.argmax(chances)) :]


def fixed_sequence(order: Floats, passes: Callable[[float], bool]) -> float:
    """The last threshold before the first that fails; infinite if the very first fails."""
    certified = np.inf
    for threshold in order.tolist():
        if not passes(threshold):
            break
        certified = threshold
    return float(certified)


def by_class(candidates: Mapping[int, Candidates], alpha: float, delta: float, passes: Passes) -> dict[int, float]:
    """The certified threshold of each class, infinite for none. The module docstring has the procedure and its proof."""
    candidates = {c: one for c, one in candidates.items() if len(one.thresholds)}
    best = {c: float(one.chances(alpha, delta).max()) for c, one in candidates.items()}
    fair = [c for c in candidates if best[c] >= _FAIR] or sorted(candidates, key=lambda c: -best[c])[:1]
    lists = {c: _first_list(candidates[c], alpha, delta / len(fair)) for c in fair}
    at, tried = dict.fromkeys(fair, 0), dict.fromkeys(fair, 0.0)
    certified = dict.fromkeys(candidates, np.inf)
    waiting = list(fair)
    while waiting:
        level = delta / len(waiting)
        stuck = [c for c in waiting if tried[c] >= level]  # failed at this level, so can only pass at a higher one
        if len(stuck) == len(waiting):
            return certified
        for c in (c for c in waiting if c not in stuck):
            while at[c] < len(lists[c]) and passes(c, lists[c][at[c]], level):
                certified[c] = lists[c][at[c]]
                at[c] += 1
            tried[c] = level
        waiting = [c for c in waiting if at[c] < len(lists[c])]
    for _, c, threshold in sorted(_looser(candidates, lists, alpha, delta)):
        if not passes(c, threshold, delta):
            break
        certified[c] = threshold
    return certified


def _first_list(candidates: Candidates, alpha: float, level: float) -> list[float]:
    """The candidate most likely to pass, then lower ones as long as they are not much less likely to pass."""
    chances = candidates.chances(alpha, level)
    start = int(np.argmax(chances))
    worse = np.flatnonzero(chances[start:] < _PART * chances[start])
    end = start + int(worse[0]) if len(worse) else len(chances)
    return [float(t) for t in candidates.thresholds[start : max(end, start + 1)]]


def _looser(
    candidates: Mapping[int, Candidates], lists: Mapping[int, list[float]], alpha: float, delta: float
) -> list[tuple[float, int, float]]:
    """(minus the probability to pass, class, threshold) of all other candidates; those of a class from strict to loose."""
    rest = []
    for c, one in candidates.items():
        chances = one.chances(alpha, delta)
        first = int(np.argmax(chances))
        if c in lists:
            first = int(np.searchsorted(-one.thresholds, -lists[c][-1], side="right"))
        falling = np.minimum.accumulate(chances[first:]) - 1e-12 * np.arange(len(chances) - first)
        rest += [(-float(p), c, float(t)) for p, t in zip(falling, one.thresholds[first:], strict=True)]
    return rest
