"""A number of an experiment for each seed, with its interval over prompts and its spread over seeds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdmlm.evaluation.metrics import exact_bounds
from sdmlm.evaluation.tables import rounded


@dataclass(frozen=True)
class Quantity:
    """A number for each seed, None where it does not exist: accuracy if all was rejected, q'_min if it is infinite.

    `intervals` holds one (low, high) for each, or nothing for numbers that do not come from prompts. `weights` is, for an
    accuracy, the number of points it is over.
    """

    values: tuple[float | None, ...]
    intervals: tuple[tuple[float, float] | None, ...] = ()
    weights: tuple[int, ...] = ()

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float | None:
        """The mean over the seeds that have this number."""
        return statistics.fmean(self.known) if self.known else None

    @property
    def sd(self) -> float | None:
        """The standard deviation between seeds (n - 1)."""
        return statistics.stdev(self.known) if len(self.known) > 1 else None

    @property
    def pooled(self) -> float | None:
        """An accuracy over the points of all seeds together: each point counts the same, not each seed."""
        right = sum(value * n for value, n in zip(self.values, self.weights, strict=False) if value is not None)
        return right / sum(self.weights) if sum(self.weights) else None

    def json(self) -> dict[str, Any]:
        """Plain values."""
        bounds = [None if i is None else list(i) for i in self.intervals]
        out: dict[str, Any] = {"values": list(self.values), "intervals": bounds}
        if len(self.values) > 1:
            least, most = (min(self.known), max(self.known)) if self.known else (None, None)
            out |= {"mean": self.mean, "sd": self.sd, "min": least, "max": most}
            out |= {"pooled": self.pooled} if self.weights else {}
        return out

    def text(self, digits: int, none: str, brief: bool = False) -> str:
        """One seed: value [low, high]. Several: mean ± sd (min to max), pooled. Brief: value or mean alone."""
        if self.mean is None:
            return none

        def number(value: float) -> str:
            return rounded(value) if digits == 2 else f"{value:.{digits}f}"

        shown = number(self.mean)
        missing = len(self.values) - len(self.known)
        if brief:
            return f"{shown}, {none} in {missing}" if missing and none != "-" else shown
        if len(self.values) == 1:
            interval = self.intervals[0] if self.intervals else None
            return shown if interval is None else f"{shown} [{number(interval[0])}, {number(interval[1])}]"
        if self.sd is not None:
            shown += f" ± {self.sd:.{digits}f} ({number(min(self.known))} to {number(max(self.known))})"
            shown += "" if self.pooled is None else f", {number(self.pooled)} pooled"
        return f"{shown}, {none} in {missing} of {len(self.values)}" if missing else shown


def proportion(hits: NDArray[np.bool_], bootstrap: int, seed: int) -> tuple[float, tuple[float, float]]:
    """The share of hits and its percentile interval: resampling n points draws a binomial number of hits."""
    n, share = len(hits), float(hits.mean())
    if share in (0.0, 1.0):
        return share, exact_bounds(int(hits.sum()), n)
    low, high = np.percentile(np.random.default_rng(seed).binomial(n, share, size=bootstrap) / n, (2.5, 97.5))
    return share, (float(low), float(high))
