"""A certificate for the high-reliability region, by tests on points that were not used to find it.

For each threshold t of a grid that is fixed beforehand, the region with q'_min = t is tested for each predicted class. The null
hypothesis is that the accuracy is below alpha. Given how many points the region accepts, the number of errors among them is
binomial, so the test is exact. A region passes if every class does (an intersection-union test, which needs no correction over classes), at the level
delta / (size of the grid) (Bonferroni over thresholds). So with probability at least 1 - delta, no region that passes has an
accuracy below alpha, and the one that accepts the most may be chosen.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from sdmlm.estimator.region import HighReliabilityRegion
from sdmlm.estimator.scores import Scores
from sdmlm.storage.artifacts import finite_or_none, none_as_infinity, write_text_atomically

_KIND = "sdmlm certificate"


@dataclass(frozen=True)
class ThresholdTest:
    """The test of one threshold for one predicted class."""

    q_min: float
    predicted_class: int
    accepted: int
    errors: int
    p_value: float
    passed: bool


@dataclass(frozen=True)
class Certificate:
    """A certified region with its tests.

    Attributes
    ----------
    alpha, delta : float
        The accuracy, and the probability with which the certificate may be wrong.
    classes : tuple of int
        The predicted classes that are covered; the region rejects all others.
    region : HighReliabilityRegion or None
        The certified region; None if no threshold passed.
    tests : tuple of ThresholdTest
        Every test that was made.
    estimator : str or None
        The digest of the estimator that it was made for.
    """

    alpha: float
    delta: float
    classes: tuple[int, ...]
    region: HighReliabilityRegion | None
    tests: tuple[ThresholdTest, ...]
    estimator: str | None = None  # digest of the estimator it was made for

    def accepts(self, scores: Scores) -> NDArray[np.bool_]:
        """Which points the certified region accepts; none if there is no certificate."""
        if self.region is None:
            return np.zeros(len(scores), dtype=bool)
        if len(self.region.psi) != scores.p.shape[1]:
            raise ValueError(
                f"The certificate is for {len(self.region.psi)} classes, the scores are of {scores.p.shape[1]}."
            )
        inside: NDArray[np.bool_] = self.region.contains(scores.q_prime, scores.p, scores.prediction)
        return inside

    def __str__(self) -> str:
        return self.sentence()

    def sentence(self, class_names: Sequence[str] | None = None) -> str:
        """The certificate in words."""
        if self.region is None:
            fix = "no number of points can show that nothing is ever wrong" if self.alpha == 1 else "give more points"
            some = ", or only some of the classes" if len(self.classes) > 1 else ""
            says = f"No threshold could be certified at alpha {self.alpha} with delta {self.delta}: {fix}, or a lower alpha"
            return f"{says}{some} (decide before you look at these points again)."
        covered = "each predicted class"
        if len(self.classes) < len(self.region.psi):
            names = ", ".join(f"class {c}" if class_names is None else f'"{class_names[c]}"' for c in self.classes)
            covered = f"each prediction of {names} (all others are rejected)"
        return (
            f"Certified: with probability at least {1 - self.delta:g}, the accuracy among the accepted is at least "
            f"{self.alpha} for {covered}, from q' {self.region.q_min:g} on."
        )

    def save(self, path: str | Path) -> None:
        """Write as JSON; a psi of null rejects its class."""
        fields = dataclasses.asdict(self)
        if self.region is not None:
            fields["region"]["psi"] = [finite_or_none(v) for v in self.region.psi]
        write_text_atomically(path, json.dumps({"kind": _KIND, **fields}, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Certificate:
        """Read what `save` wrote."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            if fields.pop("kind") != _KIND:
                raise KeyError("kind")
            region = fields["region"]
            if region is not None:
                psi = tuple(none_as_infinity(v) for v in region["psi"])
                region = HighReliabilityRegion(float(region["alpha"]), float(region["q_min"]), psi)
            tests = tuple(ThresholdTest(**test) for test in fields["tests"])
            return cls(fields["alpha"], fields["delta"], tuple(fields["classes"]), region, tests, fields["estimator"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a readable certificate: make it with `sdmlm certify --output`.") from error


def threshold_grid(
    region: HighReliabilityRegion, calibration_q_prime: NDArray[np.float64], size: int = 10
) -> list[float]:
    """At most `size` thresholds from q'_min on, at even quantiles of the calibration q' (never of the points of the test)."""
    values = calibration_q_prime[calibration_q_prime >= region.q_min]
    if math.isinf(region.q_min) or len(values) == 0:
        return []
    return [float(v) for v in np.unique(np.quantile(values, np.arange(size) / size, method="lower"))]


def certify_region(
    region: HighReliabilityRegion,
    grid: Sequence[float],
    q_prime: NDArray[np.float64],
    p: NDArray[np.float64],
    predictions: NDArray[np.int64],
    labels: NDArray[np.int64],
    delta: float = 0.05,
    classes: Sequence[int] | None = None,
) -> Certificate:
    """Test `region` at every threshold of `grid` on points with true `labels`; see the module docstring.

    Only predictions in `classes` (default: all) are covered; the certified region rejects all others.
    """
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta is {delta!r} but must be between 0 and 1: 0.05 is usual.")
    n_classes = p.shape[1]
    covered = sorted(range(n_classes) if classes is None else {int(c) for c in classes})
    if not covered or not set(covered) <= set(range(n_classes)):
        raise ValueError(f"classes is {classes!r} but must name some of the classes 0..{n_classes - 1}.")
    psi = tuple(region.psi[c] if c in covered else math.inf for c in range(n_classes))
    wrong = predictions != labels
    tests: list[ThresholdTest] = []
    certified = None
    for q_min in sorted(grid):
        candidate = dataclasses.replace(region, q_min=q_min, psi=psi)
        inside = candidate.contains(q_prime, p, predictions)
        passed = True
        for c in covered:
            own = inside & (predictions == c)
            n, errors = int(own.sum()), int((own & wrong).sum())
            # Probability of at most this many errors if the accuracy were exactly alpha; 1 if nothing is accepted.
            p_value = float(binom.cdf(errors, n, 1.0 - region.alpha))
            tests.append(ThresholdTest(q_min, c, n, errors, p_value, p_value <= delta / len(grid)))
            passed &= tests[-1].passed
        if passed and certified is None:
            certified = candidate
    return Certificate(region.alpha, delta, tuple(covered), certified, tuple(tests))


def certificate_rows(certificate: Certificate) -> list[dict[str, Any]]:
    """The tests as plain dictionaries, for tables and JSON."""
    return [dataclasses.asdict(test) for test in certificate.tests]
