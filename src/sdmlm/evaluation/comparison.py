"""All estimators on the same points: the table that shows what the high-reliability region is worth.

One SDMEstimator is fitted. The cross-entropy adaptor is trained on the training half of its best round, and every
baseline is calibrated on the calibration half of that round. The test sets are only looked at to fill the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdmlm.estimator.embedding_files import Embeddings
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.region import check_alpha
from sdmlm.evaluation.baselines import (
    APS,
    RAPS,
    Decisions,
    DistanceSoftmax,
    LogitBaseline,
    NoReject,
    SDMBaseline,
    SDMRegion,
    SDMThreshold,
    SoftmaxThreshold,
    TemperatureScaling,
    checked_logits,
    cross_entropy_logits,
)
from sdmlm.evaluation.metrics import selective_metrics
from sdmlm.evaluation.selective_table import SelectiveRow, SelectiveTable

Named = Mapping[str, LogitBaseline | SDMBaseline]  # by the name in the table


@dataclass(frozen=True)
class Comparison:
    """The table, the fitted estimator, and (predictions, accepted) by (dataset, model, estimator) as in the table."""

    table: SelectiveTable
    estimator: SDMEstimator
    decisions: dict[tuple[str, str, str], Decisions]


def compare(
    fit_data: Embeddings,
    tests: Mapping[str, Embeddings],
    alpha: float = 0.95,
    model_name: str = "",
    bootstrap: int = 1000,
    seed: int = 0,
    progress: bool = True,
    **estimator_parameters: Any,
) -> Comparison:
    """Fit on `fit_data`, and let every estimator judge each of `tests` (name -> embeddings) at alpha.

    Three models predict: the LM by its own logits (only where all files have them), the cross-entropy adaptor, and the
    SDM layer. `estimator_parameters` are those of SDMEstimator; the adaptor is trained with the same.
    """
    check_alpha(alpha)
    y = fit_data.labels("The data to fit on")
    n_classes = int(y.max(initial=0)) + 1
    with_lm = all(data.logits is not None for data in (fit_data, *tests.values()))
    _check_tests(fit_data, tests, n_classes, with_lm)  # before the fit: it may take long

    # A file may name fewer classes than it holds labels for.
    names = [*fit_data.class_names[:n_classes], *map(str, range(len(fit_data.class_names), n_classes))]
    estimator = SDMEstimator(alpha=alpha, seed=seed, progress=progress, **estimator_parameters)
    estimator.fit(fit_data.X, y, ids=fit_data.ids, documents=fit_data.documents(), class_names=names)
    layer = estimator.layers_[0]
    where = {name: i for i, name in enumerate(fit_data.ids)}
    train, held = ([where[name] for name in ids] for ids in (layer.support_ids, layer.calibration_ids))
    X_ca, y_ca = fit_data.X[held], y[held]
    adaptor = cross_entropy_logits(estimator, (fit_data.X[train], y[train]), (X_ca, y_ca), seed, progress)

    over_lm = _over_logits(np.asarray(fit_data.logits)[held], y_ca, alpha, seed) if with_lm else {}
    over_adaptor = _over_logits(adaptor(X_ca), y_ca, alpha, seed)
    over_z = {"no-reject": NoReject(alpha).fit(layer.calibration.z, y_ca)}
    over_sdm = {
        "softmax(d z')": DistanceSoftmax(estimator),
        "SDM": SDMThreshold(estimator),
        "SDM HR": SDMRegion(estimator),
        "SDM HR lower": SDMRegion(estimator, lower=True),
    }
    lm, prefix = model_name or "LM", f"{model_name}+" if model_name else ""
    decisions: dict[tuple[str, str, str], Decisions] = {}
    rows: list[SelectiveRow] = []
    for dataset, data in tests.items():
        scores = estimator.score(data.X)
        judged: list[tuple[str, Named, Any]] = [
            (lm, over_lm, data.logits),
            (f"{prefix}adaptor", over_adaptor, adaptor(data.X)),
            (f"{prefix}SDM", over_z, scores.z),
            (f"{prefix}SDM", over_sdm, scores),
        ]
        for model, named, points in judged:
            for name, baseline in named.items():
                decided = decisions[dataset, model, name] = baseline.accept(points)
                metrics = selective_metrics(data.labels(dataset), *decided, n_classes, bootstrap, seed)
                rows.append(SelectiveRow(dataset, model, name, metrics))
    return Comparison(SelectiveTable(rows, alpha, names), estimator, decisions)


def _over_logits(logits: ArrayLike, y: NDArray[np.int64], alpha: float, seed: int) -> dict[str, LogitBaseline]:
    """The baselines over logits, calibrated."""
    return {
        "no-reject": NoReject(alpha).fit(logits, y),
        "softmax": SoftmaxThreshold(alpha).fit(logits, y),
        "temperature": TemperatureScaling(alpha).fit(logits, y),
        "APS": APS(alpha, seed=seed).fit(logits, y),
        "RAPS": RAPS(alpha, seed=seed).fit(logits, y),
    }


def _check_tests(fit_data: Embeddings, tests: Mapping[str, Embeddings], n_classes: int, with_lm: bool) -> None:
    if not tests:
        raise ValueError("There is no test set: give at least one, by name.")
    width = fit_data.X.shape[1]
    for name, data in tests.items():
        labels = data.labels(name)
        outside = labels[(labels < 0) | (labels >= n_classes)]
        if len(outside):
            raise ValueError(
                f"The test set {name} has {len(outside)} labels outside the classes 0..{n_classes - 1} of the data to fit "
                f"on (the first is {outside[0]}): leave those points out."
            )
        if data.X.shape[1] != width:
            raise ValueError(f"The test set {name} is {data.X.shape[1]} wide but the data to fit on is {width} wide.")
        if not np.isfinite(data.X).all():
            raise ValueError(f"The test set {name} has NaN or infinite values: remove or repair those points.")
    if with_lm:
        for name, data in {"the data to fit on": fit_data, **tests}.items():
            checked_logits(data.logits, f"The LM logits matrix of {name}", n_classes)
