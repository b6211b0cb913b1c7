"""SDMEstimator: embeddings and labels in, accept or not with evidence out (docs/estimator.md, docs/method.md)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sdmlm.estimator import persistence
from sdmlm.estimator.acceptance import Promise, least_points
from sdmlm.estimator.fitted import DocumentId
from sdmlm.estimator.fitting import Part, fit_layers, split_points
from sdmlm.estimator.region import check_alpha
from sdmlm.estimator.scoring import Scoring
from sdmlm.estimator.splits import held_out_split
from sdmlm.estimator.validation import (
    check_classes,
    check_groups,
    check_lengths,
    check_parameters,
    checked_ids,
    encode_labels,
    find_classes,
    plain_id,
)

Labelled = tuple[ArrayLike, ArrayLike] | tuple[ArrayLike, ArrayLike, Sequence[DocumentId]]


class SDMEstimator(Scoring):
    """A classifier over embeddings that says for each prediction whether it can be accepted without a person looking, and why.

    It works with embeddings of any kind and any number of classes. No setting is needed: columns are standardised, the penalty
    of the classifier is chosen on the data, cross-fitted SDM layers are averaged, and part of the points is held out to
    certify the rule by which predictions are accepted. `SDMEstimator.published()` has the settings of the papers.

    Parameters
    ----------
    alpha : float, default=0.95
        The accuracy that accepted predictions are to have; in (0.5, 1].
    promise : {"overall", "predicted", "class"}, default="overall"
        What alpha holds for: all accepted predictions, each predicted class, or each predicted and each true class.
    delta : float, default=0.05
        The probability that the promise does not hold.
    epsilon : float, default=0.05
        The share of known points that the Distance bound may reject, so that points unlike them are rejected too.
    rule : {"certified", "region", "region lower"}, default="certified"
        The rule for `accepted`: the certified rule, the high-reliability (HR) region of the papers, or HR lower.
    combine : {"average", "best", "all"}, default="average"
        Average cross-fitted layers; or keep the best of `rounds` layers, as published; or keep all and accept what
        all of them accept as the same class (an ensemble).
    distance : {"whitened", "exemplar"}, default="whitened"
        The vectors in which Distance is measured: whitened h, or exemplar vectors h', as published.
    rounds : int, optional
        Random partitions whose layers are averaged (default 4), or rounds to choose from (default 1).
    learning_rate, epochs, exemplar_dim : optional
        With a learning rate, layers are trained by Adam with the SDM loss, as published, for this number of epochs and with
        exemplar vectors of this width (default 200 and 1000). Without one, they are the minimum of a convex loss.
    batch_size : int, default=50
        Points per Adam step.
    center : {"feature", "global"}, default="feature"
        For Adam: standardise by column, or by one mean and standard deviation over all entries, as published.
    seed : int, default=0
        The same seed gives the same result.
    device : str or torch.device, optional
        By default a CUDA GPU if there is one.
    max_q : int, optional
        A cap on q; the published code had 2048.
    index : {"exact", "faiss"}, default="exact"
        "faiss" is an approximate index for supports beyond a million vectors (extra `faiss`).
    progress : bool, default=True
        Show a progress bar while fitting, if there is a terminal.

    Attributes
    ----------
    classes_ : ndarray
        The labels, sorted. `Scores.prediction` holds indices into them.
    certificate_ : CertifiedRule
        The rule by which predictions are accepted, with what it promises (rule="certified").
    region_ : HighReliabilityRegion
        The region found by Algorithm 1 at `alpha_`.
    calibration_ : Points
        Signals of the calibration points, out of sample.
    layers_ : list of SDMLayer
        The fitted layers; the best first if they are not averaged.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> estimator = SDMEstimator(progress=False).fit(X[:450], y[:450])
    >>> scores = estimator.score(X[450:])
    >>> bool((scores.prediction == y[450:])[scores.accepted].mean() > 0.95)
    True
    """

    def __init__(
        self,
        alpha: float = 0.95,
        promise: Promise = "overall",
        delta: float = 0.05,
        epsilon: float = 0.05,
        rule: str = "certified",
        combine: str = "average",
        distance: str = "whitened",
        rounds: int | None = None,
        learning_rate: float | None = None,
        epochs: int | None = None,
        exemplar_dim: int | None = None,
        batch_size: int = 50,
        center: str = "feature",
        seed: int = 0,
        device: str | torch.device | None = None,
        max_q: int | None = None,
        index: str = "exact",
        progress: bool = True,
    ) -> None:
        self.alpha = alpha
        self.promise = promise
        self.delta = delta
        self.epsilon = epsilon
        self.rule = rule
        self.combine = combine
        self.distance = distance
        self.rounds = rounds
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.exemplar_dim = exemplar_dim
        self.batch_size = batch_size
        self.center = center
        self.seed = seed
        self.device = device
        self.max_q = max_q
        self.index = index
        self.progress = progress

    @classmethod
    def published(cls, **changes: Any) -> SDMEstimator:
        """An estimator with the settings of the papers and `changes` to them: the best of ten trained layers, and its region."""
        return cls(**{**PUBLISHED, **changes})

    # Fitting

    def fit(
        self,
        X: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        ids: Sequence[DocumentId] | None = None,
        calibration: Labelled | None = None,
        documents: Mapping[DocumentId, str] | None = None,
        class_names: Sequence[str] | None = None,
        on_epoch: Callable[[dict[str, float]], None] | None = None,
        held_out: Labelled | None = None,
        ood: ArrayLike | Tensor | None = None,
        groups: ArrayLike | None = None,
    ) -> SDMEstimator:
        """Fit on embeddings X (N, D) and labels y (N,) of any kind.

        ids: names of the points (default: 0..N-1). documents: texts by id, and class_names: names of the classes, both for
        `explain`. held_out: labelled points (X, y) that are used for the certificate only; by default some of X are
        held out. ood: known out-of-distribution points, near which nothing is accepted. calibration: (X, y) or (X, y,
        ids), the fixed calibration split of a single layer (combine "best" or "all"). groups (N,): points of one group, such
        as the documents of a prompt, always stay on the same side of a split. on_epoch is called with the losses of every
        epoch or layer.
        """
        check_parameters(self)
        x = self.matrix(X, "X")
        check_lengths("X", len(x), "y", len(y))  # type: ignore[arg-type]
        classes = find_classes(y)
        labels = encode_labels(y, classes, "y")
        n_classes = len(classes)
        names = checked_ids(ids, len(x), "ids")
        given = None if calibration is None else self._given_calibration(calibration, x, names, classes)
        check_classes(labels, classes, "y", least=1 if given else 2)
        if documents is not None and not isinstance(documents, Mapping):
            raise ValueError("documents must map ids to texts, such as dict(zip(ids, texts)).")
        if class_names is not None and len(class_names) != n_classes:
            raise ValueError(f"class_names has {len(class_names)} names but there are {n_classes} classes.")
        together = None if groups is None else check_groups(groups, labels, classes)
        if together is not None and given is not None:
            raise ValueError(
                "groups says how to split the points, but calibration is a split already: give one of them."
            )
        points: Part = (x, labels, names)
        aside: tuple[Tensor, Tensor] | None = None
        if self.rule == "certified":
            if held_out is not None:
                aside = self.matrix(held_out[0], "held_out X", int(x.shape[1])), encode_labels(held_out[1], classes)
                check_lengths("held_out X", len(aside[0]), "held_out y", len(aside[1]))
            else:
                kept, rest = held_out_split(
                    labels.numpy(),
                    least_points(self.alpha, self.delta),
                    np.random.default_rng([self.seed, 2**20]),
                    together,
                )
                together = None if together is None else together[kept]
                aside = x[torch.from_numpy(rest)], labels[torch.from_numpy(rest)]
                points = split_points((x, labels, names), kept)
                points = points[0], points[1].cpu(), points[2]
        known_ood = None if ood is None else self.matrix(ood, "ood", int(x.shape[1]))

        self.classes_ = classes
        self.n_features_in_ = int(x.shape[1])
        self.alpha_ = float(self.alpha)
        if class_names is not None:
            self.class_names_ = [str(name) for name in class_names]
        else:
            plain = np.array_equal(classes, np.arange(n_classes))
            self.class_names_ = None if plain else [str(label) for label in classes]
        self.documents_ = {} if documents is None else {plain_id(key): str(text) for key, text in documents.items()}
        self.set_layers(fit_layers(self, points, given, n_classes, on_epoch, together), aside)
        if known_ood is not None:
            outside = torch.full((len(known_ood),), -1)
            self._extend(known_ood, outside, [f"ood:{i}" for i in range(len(known_ood))])
        return self

    def _given_calibration(
        self, calibration: Labelled, x: Tensor, names: list[Any], classes: NDArray[Any]
    ) -> tuple[Tensor, Tensor, list[Any]]:
        """The calibration split that the caller gives, checked against the training split: (x, labels, ids)."""
        if self.combine == "average":
            raise ValueError(
                'calibration fixes the split of a single layer: use combine="best", or held_out for the certificate.'
            )
        if len(calibration) not in (2, 3):
            raise ValueError("calibration must be (Xc, yc) or (Xc, yc, idsc).")
        x_ca = self.matrix(calibration[0], "calibration X")
        y_ca = encode_labels(calibration[1], classes, "calibration y")
        check_lengths("calibration X", len(x_ca), "calibration y", len(y_ca))
        if x_ca.shape[1] != x.shape[1]:
            raise ValueError(
                f"X is {x.shape[1]} wide but the calibration X is {x_ca.shape[1]} wide: use one embedding."
            )
        if len(calibration) == 3:
            names_ca = checked_ids(calibration[2], len(x_ca), "calibration ids")
        else:
            names_ca = list(range(len(x), len(x) + len(x_ca)))
        if shared := set(names) & set(names_ca):
            raise ValueError(f"The id {next(iter(shared))!r} is used in both splits: ids must differ between them.")
        check_classes(y_ca, classes, "calibration y", least=1)
        return x_ca, y_ca.to(x.device), names_ca

    def recalibrate(self, alpha: float) -> SDMEstimator:
        """Use another alpha from now on, with its own region and certificate. Nothing is trained again."""
        self._check_fitted()
        self.alpha_ = check_alpha(alpha)
        return self

    def add_to_support(
        self,
        X: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        ids: Sequence[DocumentId] | None = None,
        documents: Mapping[DocumentId, str] | None = None,
    ) -> SDMEstimator:
        """Add labelled points to the support: q, d and the region change, weights and predictions do not.

        A label outside the classes marks a known out-of-distribution region: such a point can only end a run of q.
        """
        self._check_fitted()
        x = self.matrix(X, "X", self.n_features_in_)
        labels = encode_labels(y, self.classes_)
        check_lengths("X", len(x), "y", len(labels))
        if ids is None:
            known = len(self.layers_[0].support_ids)
            ids = [f"added:{known + i}" for i in range(len(x))]
        names = checked_ids(ids, len(x), "ids")
        taken = set(names).intersection(*[{*layer.support_ids, *layer.calibration_ids} for layer in self.layers_])
        if taken:
            raise ValueError(f"The id {next(iter(taken))!r} is already in use: give new points ids of their own.")
        self._extend(x, labels, names)
        self.documents_.update({plain_id(key): str(text) for key, text in (documents or {}).items()})
        return self

    def with_support(
        self,
        X: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        ids: Sequence[DocumentId] | None = None,
        documents: Mapping[DocumentId, str] | None = None,
    ) -> SDMEstimator:
        """A copy to which `add_to_support` was applied; this estimator does not change."""
        self._check_fitted()
        new = copy.copy(self)
        new.documents_ = dict(self.documents_)
        layers = [copy.copy(layer) for layer in self.layers_]
        for layer in layers:  # adding replaces the tensors of a support, it does not write into them
            layer.support = copy.copy(layer.support)
            layer.whitened = copy.copy(layer.whitened)
        new.set_layers(layers, self.held_out_)
        return new.add_to_support(X, y, ids, documents)

    # On disk

    def save_pretrained(self, folder: str | Path) -> None:
        """Save as safetensors and JSON; an interrupted save leaves the old artifact as it was."""
        self._check_fitted()
        persistence.save(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str | torch.device | None = None) -> SDMEstimator:
        """Load what `save_pretrained` wrote, after checking version, checksums and shapes."""
        return persistence.load(cls, folder, device)


PUBLISHED: dict[str, Any] = {
    "rule": "region",
    "combine": "best",
    "distance": "exemplar",
    "rounds": 10,
    "learning_rate": 1e-5,
    "epochs": 200,
    "exemplar_dim": 1000,
    "center": "global",
}
