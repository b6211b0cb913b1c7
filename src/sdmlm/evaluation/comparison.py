"""All estimators on the same points: the tables that show what the high-reliability region is worth.

One SDMEstimator is fitted. The cross-entropy adaptor and the logistic regression are trained on its training half, and
every baseline is calibrated on its calibration half. The test sets are only used to fill the tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from sdmlm.estimator.acceptance import least_points
from sdmlm.estimator.embedding_files import Embeddings
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.region import check_alpha
from sdmlm.estimator.splits import held_out_split
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
from sdmlm.evaluation.certified import rival_methods, sdm_method
from sdmlm.evaluation.embedding_baselines import EmbeddingBaseline, LogisticRegressionScore, embedding_baselines
from sdmlm.evaluation.metrics import selective_metrics
from sdmlm.evaluation.score_table import ScoredPoints, ScoreTable
from sdmlm.evaluation.selective_table import SelectiveRow, SelectiveTable
from sdmlm.storage.artifacts import write_text_atomically

DELTA = 0.05  # of the certificates
Named = Mapping[str, LogitBaseline | SDMBaseline | EmbeddingBaseline]  # by the name in the table


@dataclass(frozen=True)
class EstimatorComparison:
    """What `compare` gives.

    Attributes
    ----------
    table : accuracy and share of the accepted by class, for SDM and the baselines over logits.
    scores : one line per estimator, the rivals over embeddings included: accuracy, coverage, AUROC, AURC.
    estimator : the fitted SDM estimator.
    decisions : (predictions, accepted) by (dataset, model, estimator) as in `table`.
    """

    table: SelectiveTable
    scores: ScoreTable
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
) -> EstimatorComparison:
    """Fit on `fit_data`, and let every estimator judge each of `tests` (name -> embeddings) at alpha.

    Four models predict: the LM by its own logits (only where all files have them), the cross-entropy adaptor, the SDM
    layer, and a logistic regression over the embeddings. `estimator_parameters` are those of SDMEstimator as published; the
    adaptor is trained with the same. The lines "certified" of the scores are SDM with its automatic settings and the rivals
    under one promise (`sdmlm.evaluation.certified`).
    """
    check_alpha(alpha)
    y = fit_data.labels("The data to fit on")
    n_classes = int(y.max(initial=0)) + 1
    with_lm = all(data.logits is not None for data in (fit_data, *tests.values()))
    _check_tests(fit_data, tests, n_classes, with_lm)  # before the fit: it may take long

    # A file may name fewer classes than it holds labels for.
    names = [*fit_data.class_names[:n_classes], *map(str, range(len(fit_data.class_names), n_classes))]
    estimator = SDMEstimator.published(alpha=alpha, seed=seed, progress=progress, **estimator_parameters)
    estimator.fit(fit_data.X, y, ids=fit_data.ids, documents=fit_data.documents(), class_names=names)
    where = {name: i for i, name in enumerate(fit_data.ids)}
    train, held = ([where[name] for name in ids] for ids in (estimator.support_ids_, estimator.calibration_ids_))
    X_ca, y_ca = fit_data.X[held], y[held]
    adaptor = cross_entropy_logits(estimator, (fit_data.X[train], y[train]), (X_ca, y_ca), seed, progress)

    over_lm = _over_logits(np.asarray(fit_data.logits)[held], y_ca, alpha, seed) if with_lm else {}
    over_adaptor = _over_logits(adaptor(X_ca), y_ca, alpha, seed)
    over_z = {"no-reject": NoReject(alpha).fit(estimator.calibration_.z, y_ca)}
    over_sdm = {
        "softmax(d z')": DistanceSoftmax(estimator),
        "SDM": SDMThreshold(estimator),
        "SDM HR": SDMRegion(estimator),
        "SDM HR lower": SDMRegion(estimator, lower=True),
    }
    rivals = {
        name: rival.fit(X_ca, y_ca) for name, rival in embedding_baselines((fit_data.X[train], y[train]), alpha).items()
    }
    lm, prefix = model_name or "LM", f"{model_name}+" if model_name else ""
    decisions: dict[tuple[str, str, str], Decisions] = {}
    rows: list[SelectiveRow] = []
    scored: list[ScoredPoints] = []
    for dataset, data in tests.items():
        scores, labels = estimator.score(data.X), data.labels(dataset)
        judged: list[tuple[str, Named, Any]] = [
            (lm, over_lm, data.logits),
            (f"{prefix}adaptor", over_adaptor, adaptor(data.X)),
            (f"{prefix}SDM", over_z, scores.z),
            (f"{prefix}SDM", over_sdm, scores),
            (f"{prefix}logistic regression", rivals, data.X),
        ]
        for model, named, points in judged:
            for name, baseline in named.items():
                decided = baseline.accept(points)
                correct = decided[0] == labels
                p = _probabilities(baseline, points)
                measured = None if p is None else (p, labels)
                scored.append(ScoredPoints(dataset, model, name, baseline.score(points), decided[1], correct, measured))
                if named is rivals:
                    continue  # the papers' table has only the SDM layer and the baselines over logits
                decisions[dataset, model, name] = decided
                metrics = selective_metrics(labels, *decided, n_classes, bootstrap, seed)
                rows.append(SelectiveRow(dataset, model, name, metrics))
    scored += _certified(fit_data, y, tests, alpha, seed, n_classes, estimator.device)
    scored.sort(key=lambda points: list(tests).index(points.dataset))
    return EstimatorComparison(SelectiveTable(rows, alpha, names), ScoreTable(scored, alpha), estimator, decisions)


def _certified(
    fit_data: Embeddings,
    y: NDArray[np.int64],
    tests: Mapping[str, Embeddings],
    alpha: float,
    seed: int,
    n_classes: int,
    device: Any,
) -> list[ScoredPoints]:
    """SDM with its defaults and the rivals, each with a certified threshold, on the same held-out points."""
    kept, held = held_out_split(y, least_points(alpha, DELTA), np.random.default_rng([seed, 2**20]))
    X, labels, X_held, y_held = fit_data.X[kept], y[kept], fit_data.X[held], y[held]
    estimator = SDMEstimator(alpha=alpha, delta=DELTA, seed=seed, device=device, progress=False)
    estimator.fit(X, labels, held_out=(X_held, y_held) if len(held) else None)
    lines = []
    for name, method in {"SDM": sdm_method(estimator), **rival_methods(X, labels, seed)}.items():
        rule = method.rule(X_held, y_held, n_classes, alpha, DELTA)
        for dataset, data in tests.items():
            evidence = method.score(data.X)
            finite = np.where(np.isfinite(evidence.confidence), evidence.confidence, -1e9)
            right = evidence.predictions == data.labels(dataset)
            p = (estimator.score(data.X).p, data.labels(dataset)) if name == "SDM" else None
            lines.append(ScoredPoints(dataset, "certified", name, finite, rule.accepts(evidence), right, p))
    return lines


def _probabilities(baseline: Any, points: Any) -> NDArray[np.float64] | None:
    """The probabilities of the classes that a baseline gives for what it judges (logits, embeddings or Scores), if any."""
    if isinstance(baseline, SoftmaxThreshold):
        return np.asarray(softmax(points, axis=1))
    if isinstance(baseline, TemperatureScaling):
        return np.asarray(softmax(np.asarray(points) / baseline.temperature_, axis=1))
    if isinstance(baseline, SDMThreshold):
        return np.asarray(points.p)
    return np.asarray(baseline.model.predict_proba(points)) if isinstance(baseline, LogisticRegressionScore) else None


def write_comparison(folder: str | Path, comparison: EstimatorComparison) -> list[Path]:
    """Write both tables as tables.json, tables.tex and tables.md, and all numbers of the table by class as tables.csv."""
    content = {**comparison.table.json(), "scores": comparison.scores.json()}
    texts = {
        "csv": comparison.table.csv(),
        "json": json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "tex": comparison.table.latex() + "\n" + comparison.scores.latex(),
        "md": comparison.table.markdown() + "\n" + comparison.scores.markdown(),
    }
    paths = [Path(folder) / f"tables.{kind}" for kind in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        write_text_atomically(path, text)
    return paths


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
