"""Does one loss accept more answers than another? Paired by seed, with an interval and a sentence that states it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdmlm.experiments.runs import Run, dataset_order

FEW = 5  # with fewer seeds than this, a statement says that they are few


@dataclass(frozen=True)
class LossComparison:
    """Two settings on one test set, paired by seed: does the first accept more than the second?"""

    family: str
    dataset: str
    first: str
    second: str
    alpha: float
    seeds: tuple[int, ...]
    shares: tuple[tuple[float, float], ...]  # accepted by the first and by the second, for each seed
    accuracies: tuple[tuple[float | None, float | None], ...]  # among the accepted
    pooled: tuple[float | None, float | None]  # among the accepted of all seeds together
    interval: tuple[float, float]  # 95%: over resampled prompts (bootstrap), and over the seeds (Student's t) if wider

    @property
    def differences(self) -> list[float]:
        return [first - second for first, second in self.shares]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def sd(self) -> float | None:
        return statistics.stdev(self.differences) if len(self.seeds) > 1 else None

    def below(self, which: int) -> int:
        """In how many seeds the accuracy among the accepted is below alpha."""
        return sum((a := pair[which]) is not None and a < self.alpha for pair in self.accuracies)

    def admitting(self, which: int) -> int:
        """In how many seeds anything is accepted."""
        return sum(pair[which] is not None for pair in self.accuracies)

    @property
    def verdict(self) -> str:
        """ "more", "less" or "open": what follows from the interval of the difference."""
        return "more" if self.interval[0] > 0 else "less" if self.interval[1] < 0 else "open"

    def statement(self) -> str:
        """The result in plain sentences, with its uncertainty."""
        n, (low, high) = len(self.seeds), (f"{100 * bound:+.1f}" for bound in self.interval)
        where = f"{self.dataset} ({self.family}, {'one run' if n == 1 else f'{n} seeds'} each)"
        if not any(share for pair in self.shares for share in pair):
            return f"On {where} both {self.first} and {self.second} reject every answer."
        shares = [f"{statistics.fmean(pair[i] for pair in self.shares):.1%}" for i in (0, 1)]
        says = f"On {where} {self.first} accepts {shares[0]} of the generations and {self.second} {shares[1]}: "
        says += f"{100 * self.mean:+.1f} points"
        if n == 1:
            says += f" (95% interval over resampled prompts {low} to {high}). "
        else:
            above = sum(difference > 0 for difference in self.differences)
            says += f" on average, paired by seed, over the same rows (sd {100 * (self.sd or 0):.1f}, more in {above} of {n}, "
            says += f"95% interval {low} to {high}). "
        below = [f"in {self.below(i)} of {self.admitting(i)}" if self.admitting(i) else "nowhere" for i in (0, 1)]
        says += f"Of the runs that accept any, accuracy among the accepted falls below alpha = {self.alpha:g} {below[0]} with "
        says += f"{self.first} and {below[1]} with {self.second}. "
        if self.verdict == "open":
            says += "This shows no difference either way."
        else:
            says += f"Here {self.first} accepts {self.verdict}"
            more = 0 if self.verdict == "more" else 1
            accuracy = self.pooled[more]
            if accuracy is not None and accuracy < self.alpha:
                says += f", but what {(self.first, self.second)[more]} accepts is not as accurate as asked for ({accuracy:.1%})"
            says += "."
        if n == 1:
            says += " One run says nothing about the spread between runs."
        elif n < FEW:
            says += f" {n} seeds are few: the interval is a rough one."
        return says

    def json(self) -> dict[str, Any]:
        """Plain values, with the statement."""
        more = {"differences": self.differences, "mean": self.mean, "sd": self.sd, "verdict": self.verdict}
        return {**asdict(self), **more, "statement": self.statement()}


def compare_losses(
    runs: Sequence[Run],
    alpha: float | None = None,
    first: str = "sdm_hn",
    second: str = "ce_hn",
    bootstrap: int = 1000,
    seed: int = 0,
) -> list[LossComparison]:
    """Two settings (by the names of their recipes) on every test set that both have, over the seeds that both have.

    `alpha` selects the region of the same SDM layers at that alpha; the default is the alpha of the runs.
    """
    by = {(run.family, run.setting, run.seed): run for run in runs}
    out = []
    for family in sorted({run.family for run in runs}):
        both = [
            (by[family, first, s], by[family, second, s])
            for s in sorted({run.seed for run in runs})
            if (family, first, s) in by and (family, second, s) in by
        ]
        for dataset in sorted(
            {name for a, b in both for name in a.evaluations.keys() & b.evaluations}, key=dataset_order
        ):
            pairs = [(a, b) for a, b in both if dataset in a.evaluations and dataset in b.evaluations]
            out.append(_comparison(family, dataset, pairs, alpha, bootstrap, seed))
    return out


def _comparison(
    family: str, dataset: str, pairs: list[tuple[Run, Run]], alpha: float | None, bootstrap: int, seed: int
) -> LossComparison:
    evaluations = [(a.evaluations[dataset], b.evaluations[dataset]) for a, b in pairs]
    if len({len(e) for pair in evaluations for e in pair}) > 1:
        raise ValueError(
            f"The runs of {family} were evaluated on different rows of {dataset}: they cannot be compared."
        )
    admitted = [[e.accepted if alpha is None else e.accepted_at(alpha) for e in pair] for pair in evaluations]
    shares = tuple((float(a.mean()), float(b.mean())) for a, b in admitted)
    differences = [a - b for a, b in shares]
    # Average over the seeds for each prompt, so that all seeds of a prompt are resampled together
    low, high = _bootstrap(np.mean([a.astype(float) - b for a, b in admitted], axis=0), bootstrap, seed)
    if len(pairs) > 1:
        from scipy.stats import t

        # Student's interval alone has zero width if the difference is the same for all seeds
        half = float(t.ppf(0.975, len(pairs) - 1)) * statistics.stdev(differences) / math.sqrt(len(pairs))
        low, high = min(low, statistics.fmean(differences) - half), max(high, statistics.fmean(differences) + half)
    right = [
        [(e.y == e.prediction)[mask] for e, mask in zip(*pair, strict=True)]
        for pair in zip(evaluations, admitted, strict=True)
    ]
    return LossComparison(
        family,
        dataset,
        pairs[0][0].label,
        pairs[0][1].label,
        pairs[0][0].alpha if alpha is None else alpha,
        tuple(a.seed for a, _ in pairs),
        shares,
        tuple((_mean(a), _mean(b)) for a, b in right),
        (_mean(np.concatenate([a for a, _ in right])), _mean(np.concatenate([b for _, b in right]))),
        (low, high),
    )


def _mean(right: NDArray[np.bool_]) -> float | None:
    return float(right.mean()) if len(right) else None


def _bootstrap(values: NDArray[np.float64], bootstrap: int, seed: int) -> tuple[float, float]:
    """Percentile interval of the mean over resampled prompts; values repeat, so the counts of distinct values are drawn."""
    kinds, counts = np.unique(values, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(values), counts / len(values), size=bootstrap)
    low, high = np.percentile(drawn @ kinds / len(values), (2.5, 97.5))
    return float(low), float(high)
