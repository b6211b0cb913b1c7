"""Why a point was accepted or not: a sentence, the nearest support documents, and calibration peers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdmlm.estimator.layer import SDMLayer
from sdmlm.estimator.region import HighReliabilityRegion
from sdmlm.estimator.scores import Scores
from sdmlm.estimator.support import SupportSet


@dataclass(frozen=True)
class Exemplar:
    """A document near the point."""

    id: int | str
    label: int
    prediction: int
    distance: float
    text: str | None


@dataclass(frozen=True)
class Peers:
    """The calibration points of the same partition: the same prediction and the same decision."""

    count: int
    accuracy: float  # NaN where there are none
    nearest: tuple[Exemplar, ...]


@dataclass(frozen=True)
class Explanation:
    """Everything a person needs to trust or doubt one decision."""

    decision: str  # "accepted", "rejected" or "out of distribution"
    reason: str
    prediction: int
    probability: float
    q: int
    d: float
    q_prime: float
    exemplars: tuple[Exemplar, ...]
    peers: Peers


def decisions(q: Any, accepted: Any) -> Any:
    """ "accepted", "rejected" or "out of distribution" (q = 0) for each point."""
    return np.where(np.asarray(q) == 0, "out of distribution", np.where(np.asarray(accepted), "accepted", "rejected"))


def reason(scores: Scores, i: int, region: HighReliabilityRegion, class_names: Sequence[Any] | None = None) -> str:
    """One plain sentence on the decision about point i."""
    c, q, q_prime, p = int(scores.prediction[i]), int(scores.q[i]), scores.q_prime[i], scores.probability[i]
    name = f"class {c}" if class_names is None else f'"{class_names[c]}"'
    agree = f"the nearest {q} training documents are" if q > 1 else "only the nearest training document is"
    if scores.accepted[i]:
        return (
            f"Accepted as {name} at alpha {region.alpha:g}: {agree} rightly predicted as {name} (q' {q_prime:.4g}, at least "
            f"{region.q_min:.4g}), at distance quantile d {scores.d[i]:.2f}, with SDM output {p:.4f} (at least {region.psi[c]:.4f})."
        )
    if q == 0:
        return (
            f"Rejected as out of distribution: the nearest training document is not one that is rightly predicted as "
            f"{name} (q = 0)."
        )
    if math.isinf(region.q_min):
        return f"Rejected: at alpha {region.alpha:g} there is no high-reliability region, so nothing is accepted."
    if q_prime < region.q_min:
        return (
            f"Rejected: {agree} rightly predicted as {name}, which gives q' {q_prime:.4g}, below the {region.q_min:.4g} "
            f"that alpha {region.alpha:g} asks for."
        )
    if math.isinf(region.psi[c]):  # of a calibrated search, or a certificate over some classes
        return f"Rejected: here no verdict {name} is accepted, however sure."
    if p < region.psi[c]:
        return f"Rejected: the SDM output {p:.4f} for {name} is below its threshold psi {region.psi[c]:.4f}."
    return f"Rejected: another class also reaches its threshold, or another model of the ensemble disagrees on {name}."


def explain_points(
    layer: SDMLayer,
    x: Tensor,
    scores: Scores,
    alpha: float,
    documents: Mapping[Any, str],
    k: int,
    class_names: Sequence[Any] | None = None,
) -> list[Explanation]:
    """Explanations of raw vectors x (N, D) with their scores; k exemplars and k peers each."""
    region, ca = layer.region(alpha), layer.calibration
    vectors, _ = layer.adaptor(x)
    exemplars = exemplars_of(layer.support, vectors, layer.support_ids, documents, k)
    decided = decisions(scores.q, scores.accepted)
    decided_ca = decisions(ca.q, region.contains(ca.q_prime, ca.p, ca.predictions))
    predictions_ca, right_ca = ca.predictions.numpy(), (ca.predictions == ca.labels).numpy()
    peers: dict[int, Peers] = {}
    for decision, c in sorted({(str(a), int(b)) for a, b in zip(decided, scores.prediction, strict=True)}):
        mine = np.flatnonzero((decided == decision) & (scores.prediction == c))
        theirs = np.flatnonzero((decided_ca == decision) & (predictions_ca == c))
        accuracy = float(right_ca[theirs].mean()) if len(theirs) else math.nan
        some = torch.from_numpy(theirs)
        part = SupportSet(layer.calibration_vectors[some], ca.labels[some], ca.predictions[some])
        ids = [layer.calibration_ids[i] for i in theirs]
        nearest = exemplars_of(part, vectors[torch.from_numpy(mine)], ids, documents, k)
        peers.update({int(i): Peers(len(theirs), accuracy, found) for i, found in zip(mine, nearest, strict=True)})
    return [
        Explanation(
            str(decided[i]),
            reason(scores, i, region, class_names),
            int(scores.prediction[i]),
            float(scores.probability[i]),
            int(scores.q[i]),
            float(scores.d[i]),
            float(scores.q_prime[i]),
            exemplars[i],
            peers[i],
        )
        for i in range(len(scores))
    ]


def exemplars_of(
    support: SupportSet, vectors: Tensor, ids: Sequence[Any], documents: Mapping[Any, str], k: int
) -> list[tuple[Exemplar, ...]]:
    distances, indices = (t.cpu().tolist() for t in support.neighbors(vectors, k))
    labels, predictions = support.labels.tolist(), support.predictions.tolist()
    return [
        tuple(
            Exemplar(ids[i], labels[i], predictions[i], distance, documents.get(ids[i]))
            for distance, i in zip(row_distances, row_indices, strict=True)
            if i >= 0
        )
        for row_distances, row_indices in zip(distances, indices, strict=True)
    ]
