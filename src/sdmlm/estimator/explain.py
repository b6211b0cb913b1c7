"""Why a point was accepted or not: a sentence, the nearest support documents, and calibration peers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdmlm.estimator.acceptance import CertifiedRule, Evidence
from sdmlm.estimator.average import AveragedLayers
from sdmlm.estimator.layer import Points, SDMLayer, confidence_of
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
    """The calibration points with the same prediction and the same decision."""

    count: int
    accuracy: float  # NaN where there are none
    nearest: tuple[Exemplar, ...]


@dataclass(frozen=True)
class Explanation:
    """The decision about one point, with the reason, the signals and similar points."""

    decision: str  # "accepted", "rejected" or "out of distribution"
    reason: str
    prediction: int
    probability: float
    q: float
    d: float
    q_prime: float
    exemplars: tuple[Exemplar, ...]
    peers: Peers


def decisions(q: Any, accepted: Any) -> Any:
    """ "accepted", "rejected" or "out of distribution" (q = 0) for each point."""
    return np.where(np.asarray(q) == 0, "out of distribution", np.where(np.asarray(accepted), "accepted", "rejected"))


def certified_reason(scores: Scores, i: int, rule: CertifiedRule, class_names: Sequence[Any] | None = None) -> str:
    """One plain sentence on the decision about point i under a certified rule."""
    c, q, confidence = int(scores.prediction[i]), float(scores.q[i]), float(scores.confidence[i])
    name = f"class {c}" if class_names is None else f'"{class_names[c]}"'
    known = (
        f"about {q:.0f} of the most similar known examples were" if q >= 1.5 else "hardly any similar known example was"
    )
    seen = f"{known} predicted {name}, and rightly so"
    if scores.accepted[i]:
        return (
            f"Accepted as {name}: {seen} (confidence {confidence:.2f}, at least {rule.thresholds[c]:.2f}), and it is not far "
            f"from them (d {scores.d[i]:.2f}, at least {rule.least_distance:.2f})."
        )
    if q == 0:
        return f"Not accepted: the most similar known example is not {name}, or was not predicted {name} (q = 0)."
    if not rule.certified:
        return f"Not accepted: {rule.sentence()}"
    if not rule.near_enough(scores.d[i : i + 1])[0]:
        return (
            f"Not accepted: it is unlike the known examples (d {scores.d[i]:.2f}, at least {rule.least_distance:.2f} is asked "
            f"for; {rule.epsilon:.0%} of the known points are as far away)."
        )
    if math.isinf(rule.thresholds[c]):
        return f"Not accepted: no prediction of {name} is accepted under this promise."
    return (
        f"Not accepted: {seen}, which gives a confidence of {confidence:.2f}, below the {rule.thresholds[c]:.2f} that alpha "
        f"{rule.alpha:g} asks for."
    )


def reason(scores: Scores, i: int, region: HighReliabilityRegion, class_names: Sequence[Any] | None = None) -> str:
    """One plain sentence on the decision about point i by the high-reliability region."""
    c, q, q_prime, p = int(scores.prediction[i]), int(scores.q[i]), scores.q_prime[i], scores.probability[i]
    name = f"class {c}" if class_names is None else f'"{class_names[c]}"'
    agree = f"the {q} most similar known examples were all" if q > 1 else "only the most similar known example was"
    agree += f" predicted {name}, and rightly so"
    if scores.accepted[i]:
        return (
            f"Accepted as {name} at alpha {region.alpha:g}: {agree} (q' {q_prime:.4g}, at least {region.q_min:.4g}), at distance "
            f"quantile d {scores.d[i]:.2f}, with SDM output {p:.4f} (at least {region.psi[c]:.4f})."
        )
    if q == 0:
        return (
            f"Rejected as out of distribution: the most similar known example is not {name}, or was not predicted {name} "
            "(q = 0)."
        )
    if math.isinf(region.q_min):
        return f"Rejected: at alpha {region.alpha:g} there is no high-reliability region, so nothing is accepted."
    if q_prime < region.q_min:
        return f"Rejected: {agree}, which gives q' {q_prime:.4g}, below the {region.q_min:.4g} that alpha {region.alpha:g} asks for."
    if math.isinf(region.psi[c]):  # of a calibrated search, or a certificate over some classes
        return f"Rejected: no verdict {name} is accepted here, whatever its output."
    if p < region.psi[c]:
        return f"Rejected: the SDM output {p:.4f} for {name} is below its threshold psi {region.psi[c]:.4f}."
    return f"Rejected: another class also reaches its threshold, or another model of the ensemble disagrees on {name}."


def explain_points(
    layer: SDMLayer,
    model: SDMLayer | AveragedLayers,
    x: Tensor,
    scores: Scores,
    alpha: float,
    documents: Mapping[Any, str],
    k: int,
    class_names: Sequence[Any] | None = None,
    rule: CertifiedRule | None = None,
) -> list[Explanation]:
    """Explanations of raw vectors x (N, D) with their scores; k exemplars and k peers each.

    Neighbours are those of `layer`; decisions are those of `model`, which is that layer or an average over several. `rule`: the
    certified rule, if decisions follow one.
    """
    region, ca = model.region(alpha), _calibration_of(layer, model)
    vectors, _ = layer.adaptor(x)
    exemplars = exemplars_of(layer.support, vectors, layer.support_ids, documents, k)
    decided = decisions(scores.q, scores.accepted)
    if rule is None:
        inside = region.contains(ca.q_prime, ca.p, ca.predictions)
    else:
        confidence = confidence_of(ca.z, ca.q).numpy()
        inside = rule.accepts(Evidence(confidence, ca.d.numpy(), ca.predictions.numpy()))
    decided_ca = decisions(ca.q, inside)
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
        peers.update(
            {int(i): Peers(len(theirs), accuracy, neighbors) for i, neighbors in zip(mine, nearest, strict=True)}
        )
    return [
        Explanation(
            str(decided[i]),
            reason(scores, i, region, class_names) if rule is None else certified_reason(scores, i, rule, class_names),
            int(scores.prediction[i]),
            float(scores.probability[i]),
            scores.q[i].item(),
            float(scores.d[i]),
            float(scores.q_prime[i]),
            exemplars[i],
            peers[i],
        )
        for i in range(len(scores))
    ]


def _calibration_of(layer: SDMLayer, model: SDMLayer | AveragedLayers) -> Points:
    """The calibration points of the layer, with the signals by which the model decides."""
    if isinstance(model, SDMLayer):
        return layer.calibration
    where = {name: i for i, name in enumerate(model.calibration_ids)}
    at = torch.tensor([where[name] for name in layer.calibration_ids])
    return Points(**{f.name: getattr(model.calibration, f.name)[at] for f in fields(Points)})


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
