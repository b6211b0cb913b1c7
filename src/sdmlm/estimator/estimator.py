"""SDMEstimator: embeddings and labels in, accept or not with evidence out (docs/estimator.md, docs/method.md)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sdmlm.estimator import persistence
from sdmlm.estimator.acceptance import CertifiedRule, Evidence, Promise, certify_rule, least_points
from sdmlm.estimator.adaptor import MakeSupport
from sdmlm.estimator.average import AveragedLayers
from sdmlm.estimator.certify import Certificate, certify_region, threshold_grid
from sdmlm.estimator.explain import Exemplar, Explanation, exemplars_of, explain_points
from sdmlm.estimator.fitting import Part, fit_layers, split_points
from sdmlm.estimator.label_errors import LabelError, suspected_label_errors
from sdmlm.estimator.layer import ALPHA_GRID, Points, SDMLayer, confidence_of, highest_alpha
from sdmlm.estimator.region import HighReliabilityRegion, check_alpha
from sdmlm.estimator.scores import Scores
from sdmlm.estimator.support import SupportSet
from sdmlm.estimator.validation import (
    check_classes,
    check_lengths,
    check_parameters,
    checked_ids,
    encode_labels,
    find_classes,
    float_matrix,
    held_out_split,
    label_tensor,
    plain_id,
)

DocumentId = int | str
Labelled = tuple[ArrayLike, ArrayLike] | tuple[ArrayLike, ArrayLike, Sequence[DocumentId]]


class SDMEstimator:
    """Says of each prediction whether it can be accepted without a person looking, and why.

    Over any embeddings, for any number of classes. The defaults need no setting: columns are standardised, the penalty of
    the classifier is chosen on the data, eight cross-fitted SDM layers are averaged, and part of the points is held out to
    certify the rule by which predictions are accepted. `SDMEstimator.published()` has the settings of the papers.

    Parameters
    ----------
    alpha : float, default=0.95
        The accuracy that the accepted predictions are to have; in (0.5, 1].
    promise : {"overall", "predicted", "class"}, default="overall"
        What alpha holds for: all accepted predictions, each predicted class, or each predicted and each true class.
    delta : float, default=0.05
        The chance that the promise does not hold.
    epsilon : float, default=0.05
        The share of known points that the Distance bound gives up, so that points unlike them are rejected.
    rule : {"certified", "region", "region lower"}, default="certified"
        What decides `accepted`: the certified rule, the high-reliability (HR) region of the papers, or HR lower.
    combine : {"average", "best", "all"}, default="average"
        Average pairs of cross-fitted layers; or keep the best of `rounds` layers, as published; or keep all and accept what
        all of them accept as the same class (an ensemble).
    distance : {"whitened", "exemplar"}, default="whitened"
        Where Distance is measured: in whitened h, or between exemplar vectors h', as published.
    rounds : int, optional
        Pairs of layers to average (default 4), or rounds to choose from (default 1).
    learning_rate, epochs, exemplar_dim : optional
        With a learning rate, layers are trained by Adam with the SDM loss, as published, for so many epochs and with
        exemplar vectors so wide (default 200 and 1000). Without, they are the minimum of a convex loss.
    batch_size : int, default=50
        Points per Adam step.
    center : {"feature", "global"}, default="feature"
        For Adam: standardise by column, or by one mean and standard deviation over all entries, as published.
    seed : int, default=0
        The same seed gives the same result.
    device : str or torch.device, optional
        By default a CUDA GPU where there is one.
    max_q : int, optional
        A cap on q; the published code had 2048.
    index : {"exact", "faiss"}, default="exact"
        "faiss" is an approximate index for supports beyond a million vectors (extra `faiss`).
    progress : bool, default=True
        Show a progress bar while fitting, where there is a terminal.

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
        The fitted layers; the best first where they are not averaged.

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
        """An estimator with the settings of the papers, but for `changes`: the best of ten trained layers, and its HR region."""
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
    ) -> SDMEstimator:
        """Fit on embeddings X (N, D) and labels y (N,) of any kind.

        ids: names of the points (default: 0..N-1). documents: texts by id, and class_names: names of the classes, both for
        `explain`. held_out: labelled points (X, y) for the certificate, which play no other part; by default some of X are
        set aside. ood: known out-of-distribution points, near which nothing is accepted. calibration: (X, y) or (X, y,
        ids), the fixed calibration split of a single layer (combine "best" or "all"). on_epoch is called with the figures of
        every epoch or layer.
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
        points: Part = (x, labels, names)
        aside: tuple[Tensor, Tensor] | None = None
        if self.rule == "certified":
            if held_out is not None:
                aside = self.matrix(held_out[0], "held_out X", int(x.shape[1])), encode_labels(held_out[1], classes)
                check_lengths("held_out X", len(aside[0]), "held_out y", len(aside[1]))
            else:
                kept, rest = held_out_split(
                    labels.numpy(), least_points(self.alpha, self.delta), np.random.default_rng([self.seed, 2**20])
                )
                aside = x[torch.from_numpy(rest)], labels[torch.from_numpy(rest)]
                points = split_points((x, labels, names), kept)
                points = points[0], points[1].cpu(), points[2]
        known_ood = None if ood is None else self.matrix(ood, "ood", int(x.shape[1]))

        self.classes_ = classes
        self.n_features_in_ = int(x.shape[1])
        self.alpha_ = float(self.alpha)
        if class_names is not None:
            self.class_names_: list[str] | None = [str(name) for name in class_names]
        else:
            plain = np.array_equal(classes, np.arange(n_classes))
            self.class_names_ = None if plain else [str(label) for label in classes]
        self.documents_ = {} if documents is None else {plain_id(key): str(text) for key, text in documents.items()}
        self.set_layers(fit_layers(self, points, given, n_classes, on_epoch), aside)
        if known_ood is not None:
            outside = torch.full((len(known_ood),), -1, device=known_ood.device)
            self._model.add(known_ood, outside, [f"ood:{i}" for i in range(len(known_ood))])
        return self

    def set_layers(self, layers: list[SDMLayer], held_out: tuple[Tensor, Tensor] | None = None) -> None:
        """Take fitted layers, and the held-out points of the certificate, as this estimator's own."""
        self.layers_ = layers
        self._model = AveragedLayers(layers) if self.combine == "average" else layers[0]
        self.held_out_ = held_out
        self._rules: dict[float, CertifiedRule] = {}

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

    def settings(self) -> dict[str, Any]:
        """The settings that were chosen automatically or given, as they were used."""
        self._check_fitted()
        last = self.layers_[0].history[-1] if self.layers_[0].history else {}
        chosen = {name: last[name] for name in ("inverse_penalty",) if name in last}
        width = len(self.layers_[0].adaptor.bias)
        held_out = 0 if self.held_out_ is None else len(self.held_out_[0])
        names = ("rule", "combine", "distance")
        return {
            **{name: getattr(self, name) for name in names},
            "layers": len(self.layers_),
            "exemplar_dim": width,
            **chosen,
            "held_out": held_out,
        }

    def recalibrate(self, alpha: float) -> SDMEstimator:
        """Answer for another alpha from now on: region and certificate are found anew, nothing is re-trained."""
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
        """Let labelled points join the support: q, d and the region change, weights and predictions do not.

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
        if self.combine == "all":
            for layer in self.layers_:
                layer.add(x, labels.to(x.device), names)
        else:
            self._model.add(x, labels.to(x.device), names)
        self._rules = {}
        self.documents_.update({plain_id(key): str(text) for key, text in (documents or {}).items()})
        return self

    def with_support(
        self,
        X: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        ids: Sequence[DocumentId] | None = None,
        documents: Mapping[DocumentId, str] | None = None,
    ) -> SDMEstimator:
        """A copy to which `add_to_support` was applied; this estimator stays as it is."""
        self._check_fitted()
        new = copy.copy(self)
        new.documents_ = dict(self.documents_)
        layers = [copy.copy(layer) for layer in self.layers_]
        for layer in layers:  # adding replaces the tensors of a support, it does not write into them
            layer.support = copy.copy(layer.support)
            layer.whitened = copy.copy(layer.whitened)
        new.set_layers(layers, self.held_out_)
        return new.add_to_support(X, y, ids, documents)

    # Scoring

    def score(
        self,
        X: ArrayLike | Tensor,
        exclude: ArrayLike | Tensor | None = None,
        *,
        alpha: float | None = None,
        regions: Callable[[float], HighReliabilityRegion] | None = None,
    ) -> Scores:
        """Prediction, the three signals, their bounds and the decision for each row of X.

        `exclude` (N,) is the support index that a point ignores, -1 for none: for points that are in the support
        themselves (see `support_index`). Those are judged by the eCDF of the training split, all others by that of
        the calibration split.

        `alpha`: another one than the estimator's, for this call. `regions` gives the region that decides at an alpha,
        where it is not to be the estimator's own (`region`).
        """
        self._check_fitted()
        alpha = self.alpha_ if alpha is None else check_alpha(alpha)
        x = self.matrix(X, "X", self.n_features_in_, allow_empty=True)
        own = None if exclude is None else label_tensor(exclude, "exclude")
        if own is not None:
            self._check_single("score with exclude")  # every round has a support of its own
            check_lengths("X", len(x), "exclude", len(own))
        if regions is not None and self.combine == "all":
            self._check_single("score with regions")
        scores = self._model.score(x, alpha, own, regions)
        if self.combine == "all":
            scores = self._agreed(scores, x, alpha)
        if self.rule == "certified":
            return replace(scores, accepted=self.certified_rule(alpha).accepts(scores))
        return replace(scores, accepted=scores.accepted_lower) if self.rule == "region lower" else scores

    def _agreed(self, scores: Scores, x: Tensor, alpha: float) -> Scores:
        """Of an ensemble: accepted is what all layers accept as the same class."""
        accepted, accepted_lower = scores.accepted, scores.accepted_lower
        at = self.layers_[0].accepted_at(scores.q_prime, scores.p, scores.prediction, ALPHA_GRID)
        for layer in self.layers_[1:]:
            other = layer.score(x, alpha)
            agree = other.prediction == scores.prediction
            accepted = accepted & other.accepted & agree
            accepted_lower = accepted_lower & other.accepted_lower & agree
            at &= layer.accepted_at(other.q_prime, other.p, other.prediction, ALPHA_GRID) & agree[:, None]
        highest = highest_alpha(at)
        return replace(
            scores, accepted=accepted, in_region=accepted, accepted_lower=accepted_lower, highest_alpha=highest
        )

    def predict(self, X: ArrayLike | Tensor) -> NDArray[Any]:
        """The predicted label of each row, accepted or not."""
        labels: NDArray[Any] = self.classes_[self.score(X).prediction]
        return labels

    def output(self, X: Tensor, exclude: Tensor | None = None) -> Tensor:
        """SDM(z') of each row, (N, C) on the CPU: what a training step needs, without the rest of `score`.

        X is a float32 tensor and is not checked, for this runs at every step of fine-tuning. `exclude` as in `score`.
        """
        self._check_single("output")
        return self.layers_[0].output(X.to(self.layers_[0].adaptor.weight.device), exclude)

    def support_index(self, ids: Sequence[DocumentId]) -> NDArray[np.int64]:
        """The support index of each document id, -1 where it is not in the support: what `exclude` takes."""
        self._check_fitted()
        where = {name: i for i, name in enumerate(self.layers_[0].support_ids)}
        return np.array([where.get(plain_id(name), -1) for name in ids], dtype=np.int64)

    def accepted_at(self, scores: Scores, alphas: Iterable[float]) -> NDArray[np.bool_]:
        """Which points are accepted at each of several alphas, (N, number of alphas)."""
        if self.combine == "all":
            self._check_single("accepted_at")
        self._check_fitted()
        wanted = [check_alpha(a) for a in alphas]
        if self.rule == "certified":
            return np.stack([self.certified_rule(a).accepts(scores) for a in wanted], axis=1)
        return self._model.accepted_at(scores.q_prime, scores.p, scores.prediction, wanted)

    def explain(self, X: ArrayLike | Tensor, k: int = 5) -> list[Explanation]:
        """For each row: the decision in a sentence, the k nearest support documents, and calibration peers."""
        self._check_fitted()
        if k < 1:
            raise ValueError(f"k is {k} but must be at least 1.")
        x = self.matrix(X, "X", self.n_features_in_)
        rule = self.certificate_ if self.rule == "certified" else None
        return explain_points(
            self.layers_[0], self._model, x, self.score(X), self.alpha_, self.documents_, k, self.class_names_, rule
        )

    def label_errors(self, most: int = 20) -> list[LabelError]:
        """Known points whose label contradicts a dense neighbourhood that agrees otherwise, the most suspicious first."""
        self._check_fitted()
        return suspected_label_errors(self.calibration_, self.calibration_ids_, self.documents_, most)

    # Promises

    @property
    def certificate_(self) -> CertifiedRule:
        """The certified rule at `alpha_`."""
        return self.certified_rule(self.alpha_)

    def certified_rule(self, alpha: float) -> CertifiedRule:
        """The certified rule at any alpha, from the held-out points; remembered until the support changes."""
        self._check_fitted()
        if self.held_out_ is None:
            raise ValueError("No points were held out for a certificate: give fresh ones to certify.")
        if alpha not in self._rules:
            x, labels = self.held_out_
            rule = self._certified(x, labels, alpha, self.delta, self.promise, self.epsilon, None)
            self._rules[alpha] = rule
        return self._rules[alpha]

    def certify(
        self,
        X: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        delta: float | None = None,
        classes: Sequence[int] | None = None,
        promise: Promise | None = None,
        epsilon: float | None = None,
    ) -> CertifiedRule | Certificate:
        """A rule with a promise, from labelled points that played no part in fitting (`sdmlm.estimator.acceptance`).

        `classes`: the predicted classes that may be accepted, as indices (default: all). With rule "region", it is the
        region that is tightened until the promise holds for each predicted class (`sdmlm.estimator.certify`).
        """
        if self.combine == "all":
            self._check_single("certify")
        self._check_fitted()
        x, labels = self.matrix(X, "X", self.n_features_in_), encode_labels(y, self.classes_)
        check_lengths("X", len(x), "y", len(labels))
        if (known := self.share_fitted(X)) > 0.25:
            raise ValueError(
                f"{known:.0%} of these points were fitted over (in the support or the calibration half): a certificate needs "
                "points that played no part in fitting."
            )
        delta = self.delta if delta is None else delta
        if self.rule == "certified":
            rest = (promise or self.promise, self.epsilon if epsilon is None else epsilon, classes)
            return replace(self._certified(x, labels, self.alpha_, delta, *rest), estimator=self.digest())
        scores = self.score(X)
        grid = threshold_grid(self.region_, self.calibration_.q_prime.numpy())
        certificate = certify_region(
            self.region_, grid, scores.q_prime, scores.p, scores.prediction, labels.numpy(), delta, classes
        )
        return replace(certificate, estimator=self.digest())

    def _certified(
        self,
        x: Tensor,
        labels: Tensor,
        alpha: float,
        delta: float,
        promise: Promise,
        epsilon: float,
        classes: Sequence[int] | None,
    ) -> CertifiedRule:
        scores = self._model.score(x, alpha)
        fresh = Evidence(scores.confidence, scores.d, scores.prediction, labels.cpu().numpy())
        settings: dict[str, Any] = {"alpha": alpha, "delta": delta, "promise": promise, "epsilon": epsilon}
        return certify_rule(self.calibration_evidence(), fresh, len(self.classes_), **settings, classes=classes)

    def calibration_evidence(self) -> Evidence:
        """What a rule looks at, for the calibration points, out of sample."""
        ca = self.calibration_
        return Evidence(confidence_of(ca.z, ca.q).numpy(), ca.d.numpy(), ca.predictions.numpy(), ca.labels.numpy())

    def share_fitted(self, X: ArrayLike | Tensor) -> float:
        """How many of these points were fitted over: they are in the support or among the calibration points."""
        self._check_fitted()
        layer, ca = self.layers_[0], self.layers_[0].calibration
        vectors, _ = layer.adaptor(self.matrix(X, "X", self.n_features_in_))
        held = SupportSet(layer.calibration_vectors, ca.labels, ca.predictions)
        nearest = torch.minimum(layer.support.neighbors(vectors, 1)[0], held.neighbors(vectors, 1)[0])
        same = 1e-5 * float(layer.support.vectors.norm(dim=1).mean())
        return float((nearest <= same).double().mean())

    @property
    def region_(self) -> HighReliabilityRegion:
        """The high-reliability region at `alpha_`."""
        return self.region(self.alpha_)

    def region(self, alpha: float) -> HighReliabilityRegion:
        """The high-reliability region at any alpha (of an ensemble: of the best round)."""
        self._check_fitted()
        return self._model.region(alpha)

    @property
    def loss_(self) -> float:
        """The balanced calibration loss of the best round."""
        self._check_fitted()
        return self.layers_[0].loss

    @property
    def history_(self) -> list[dict[str, float]]:
        """Losses and calibration accuracy by epoch, of the best round."""
        self._check_fitted()
        return self.layers_[0].history

    # On disk

    def save_pretrained(self, folder: str | Path) -> None:
        """Save as safetensors and JSON; an interrupted save leaves the old artifact as it was."""
        self._check_fitted()
        persistence.save(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str | torch.device | None = None) -> SDMEstimator:
        """Load what `save_pretrained` wrote, after checking version, checksums and shapes."""
        return persistence.load(cls, folder, device)

    def digest(self) -> str:
        """A hash of everything that decisions depend on, except alpha: weights, support, calibration points."""
        self._check_fitted()
        return persistence.digest(self)

    # What other packages need to know about the fitted layer

    @property
    def calibration_(self) -> Points:
        """Out-of-sample labels, z', q, d, SDM output and q' of the calibration points."""
        self._check_fitted()
        return self._model.calibration

    @property
    def support_ids_(self) -> list[DocumentId]:
        """The ids of the support documents of the best round, in the order of the support."""
        self._check_fitted()
        return self.layers_[0].support_ids

    @property
    def calibration_ids_(self) -> list[DocumentId]:
        """The ids of the calibration points."""
        self._check_fitted()
        return self._model.calibration_ids

    def exemplars(self, X: ArrayLike | Tensor, k: int) -> list[tuple[Exemplar, ...]]:
        """The k nearest support documents of each row, nearest first."""
        self._check_fitted()
        layer = self.layers_[0]
        vectors, _ = layer.adaptor(self.matrix(X, "X", self.n_features_in_))
        return exemplars_of(layer.support, vectors, layer.support_ids, self.documents_, k)

    # Checks

    def _check_fitted(self) -> None:
        if not hasattr(self, "layers_"):
            raise ValueError("This SDMEstimator is not fitted yet: call fit, or load one with from_pretrained.")

    def _check_single(self, method: str) -> None:
        self._check_fitted()
        if len(self.layers_) > 1:
            raise ValueError(f"{method} works on a single model: fit with combine='best'.")

    def torch_device(self) -> torch.device:
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return torch.device("cpu") if device.type == "mps" else device  # which has no double precision

    def make_support(self) -> MakeSupport:
        if self.index == "faiss":
            from sdmlm.estimator.support_faiss import FaissSupportSet  # an optional dependency

            return partial(FaissSupportSet, max_q=self.max_q)
        return partial(SupportSet, max_q=self.max_q)

    def matrix(self, values: Any, name: str, width: int | None = None, allow_empty: bool = False) -> Tensor:
        """A finite float32 matrix on the device."""
        return float_matrix(values, name, self.torch_device(), width, allow_empty)


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
