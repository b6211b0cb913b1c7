"""Suspected label errors: known points that are confidently predicted as another class than their label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdmlm.estimator.layer import Points, confidence_of


@dataclass(frozen=True)
class LabelError:
    """A known point with the label it has and the class that its neighbourhood suggests."""

    id: int | str
    label: int
    prediction: int
    confidence: float
    q: float
    d: float
    text: str | None


def suspected_label_errors(
    points: Points, ids: Sequence[Any], documents: Mapping[Any, str], most: int
) -> list[LabelError]:
    """The points that are confidently predicted as another class, out of sample, most confident first.

    Only points with at least one agreeing neighbour (q > 0) and near the support (d > 0) are listed: for others, the prediction
    says little about the label.
    """
    confidence = confidence_of(points.z, points.q).numpy()
    wrong = (points.predictions != points.labels).numpy() & np.isfinite(confidence) & (points.d.numpy() > 0)
    order = np.flatnonzero(wrong)[np.argsort(-confidence[wrong], kind="stable")][:most]
    labels, predictions = points.labels.tolist(), points.predictions.tolist()
    return [
        LabelError(
            ids[i],
            labels[i],
            predictions[i],
            float(confidence[i]),
            float(points.q[i]),
            float(points.d[i]),
            documents.get(ids[i]),
        )
        for i in order.tolist()
    ]
