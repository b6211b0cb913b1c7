"""Measures of an estimator over its own calibration points, in total and by class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sdmlm.estimator.activation import sdm_losses
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.layer import ALPHA_GRID
from sdmlm.estimator.region import HighReliabilityRegion


@dataclass(frozen=True)
class ClassSummary:
    """The calibration points of one class. `psi` is the class's threshold, infinite if there is no region."""

    points: int
    loss: float
    accuracy: float
    mean_q: float
    psi: float
    accepted: int
    accuracy_accepted: float | None  # None where nothing is accepted


@dataclass(frozen=True)
class CalibrationSummary:
    """The calibration points of the best round, at the estimator's alpha."""

    region: HighReliabilityRegion
    loss: float  # balanced over the classes
    classes: tuple[ClassSummary, ...]
    points: int
    accepted: int
    out_of_distribution: int  # q = 0
    accuracy: float
    accuracy_accepted: float | None

    def metrics(self) -> dict[str, float]:
        """A flat dictionary for training logs: the columns of the paper's last table, classes by number."""
        flat = {"sdm_loss": self.loss, "q_min": self.region.q_min}
        for number, one in enumerate(self.classes):
            flat[f"psi_{number}"] = one.psi
            flat[f"mean_q_{number}"] = one.mean_q
            flat[f"sdm_loss_{number}"] = one.loss
            flat[f"sdm_accuracy_{number}"] = one.accuracy
        flat["admitted"] = self.accepted / self.points
        return flat

    def to_dict(self, class_names: Sequence[str]) -> dict[str, Any]:
        """A nested dictionary for the JSON of commands, with the classes by name."""
        by_name = dict(zip(class_names, self.classes, strict=True))
        return {
            **self.region.to_dict(class_names),
            "loss": self.loss,
            "calibration": {
                "points": self.points,
                "accepted": self.accepted,
                "out_of_distribution": self.out_of_distribution,
                "accuracy": self.accuracy,
                "accuracy_accepted": self.accuracy_accepted,
                "classes": {name: vars(one) for name, one in by_name.items()},
            },
        }


def summarize_calibration(estimator: SDMEstimator) -> CalibrationSummary:
    """The summary of a fitted estimator."""
    points, region = estimator.calibration_, estimator.region_
    losses = sdm_losses(points.z, points.q, points.d, points.labels)
    right = (points.predictions == points.labels).double()
    inside = region.contains(points.q_prime, points.p, points.predictions)
    classes = []
    for number, psi in enumerate(region.psi):
        own = points.labels == number
        classes.append(
            ClassSummary(
                points=int(own.sum()),
                loss=float(losses[own].mean()),
                accuracy=float(right[own].mean()),
                mean_q=float(points.q[own].double().mean()),
                psi=psi,
                accepted=int((own & inside).sum()),
                accuracy_accepted=float(right[own & inside].mean()) if (own & inside).any() else None,
            )
        )
    return CalibrationSummary(
        region=region,
        loss=estimator.loss_,
        classes=tuple(classes),
        points=len(points.labels),
        accepted=int(inside.sum()),
        out_of_distribution=int((points.q == 0).sum()),
        accuracy=float(right.mean()),
        accuracy_accepted=float(right[inside].mean()) if inside.any() else None,
    )


def highest_alpha_with_region(estimator: SDMEstimator) -> float | None:
    """The largest alpha of the usual grid at which anything can be accepted, None if there is none."""
    descending = reversed(ALPHA_GRID)  # each region takes a run of Algorithm 1: stop at the first
    return next((alpha for alpha in descending if math.isfinite(estimator.region(alpha).q_min)), None)
