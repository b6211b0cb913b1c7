"""SDMEstimator: embeddings and labels in, calibrated accept/reject decisions with evidence out (docs/method.md)."""

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
from sdmlm.estimator.adaptor import MakeSupport, train_adaptor
from sdmlm.estimator.certify import Certificate, certify_region, threshold_grid
from sdmlm.estimator.explain import Exemplar, Explanation, exemplars_of, explain_points
from sdmlm.estimator.layer import ALPHA_GRID, Points, SDMLayer, highest_alpha
from sdmlm.estimator.region import HighReliabilityRegion, check_alpha
from sdmlm.estimator.scores import Scores
from sdmlm.estimator.support import SupportSet
from sdmlm.estimator.validation import (
    check_classes,
    check_lengths,
    check_parameters,
    checked_ids,
    count_classes,
    float_matrix,
    label_tensor,
    plain_id,
    random_halves,
)
from sdmlm.storage.progress import progress_bar

DocumentId = int | str
Calibration = tuple[ArrayLike, ArrayLike] | tuple[ArrayLike, ArrayLike, Sequence[DocumentId]]


class SDMEstimator:
    """Similarity-Distance-Magnitude estimator over any embeddings, for any number of classes.

    Parameters
    ----------
    alpha: the accuracy that the accepted are to have, per class and per prediction; in (0.5, 1].
    exemplar_dim: M, the width of the exemplar vectors h'.
    epochs, batch_size, learning_rate: of the Adam training of each round.
    rounds: J, rounds of fresh random halves and fresh initial weights; the one with the lowest loss wins.
    center: "global" (one mean and standard deviation over all entries, as published) or "feature" (per column).
    seed: the same seed gives the same result.
    device: a torch device; by default a CUDA GPU where there is one (on Apple's GPUs the CPU does the work).
    ensemble: keep the models of all rounds, and accept only what all of them accept as the same class.
    max_q: cap on q; None for none (the published code capped it at 2048).
    index: "exact", or "faiss" for an approximate index over supports beyond a million vectors (extra `faiss`).
    progress: show a progress bar while fitting, where there is a terminal.

    Learned: `classes_`, `class_names_`, `n_features_in_`, `alpha_`, `region_`, `loss_`, `history_`, `layers_` (the best round first).

    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(0, 2, 400)
    >>> X = rng.normal(size=(400, 16)) + 2.0 * y[:, None]
    >>> estimator = SDMEstimator(alpha=0.9, exemplar_dim=32, epochs=20, learning_rate=1e-3, rounds=1).fit(X, y)
    >>> scores = estimator.score(X[:5])
    >>> scores.accepted.shape
    (5,)
    """

    def __init__(
        self,
        alpha: float = 0.95,
        exemplar_dim: int = 1000,
        epochs: int = 200,
        batch_size: int = 50,
        learning_rate: float = 1e-5,
        rounds: int = 10,
        center: str = "global",
        seed: int = 0,
        device: str | torch.device | None = None,
        ensemble: bool = False,
        max_q: int | None = None,
        index: str = "exact",
        progress: bool = True,
    ) -> None:
        self.alpha = alpha
        self.exemplar_dim = exemplar_dim
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.rounds = rounds
        self.center = center
        self.seed = seed
        self.device = device
        self.ensemble = ensemble
        self.max_q = max_q
        self.index = index
        self.progress = progress

    # Fitting

    def fit(
        self,
        X: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        ids: Sequence[DocumentId] | None = None,
        calibration: Calibration | None = None,
        documents: Mapping[DocumentId, str] | None = None,
        class_names: Sequence[str] | None = None,
        on_epoch: Callable[[dict[str, float]], None] | None = None,
    ) -> SDMEstimator:
        """Fit on embeddings X (N, D) and labels y (N,) in 0..C-1.

        Each round halves the points at random, class by class, into a training and a calibration split; `calibration`,
        (Xc, yc) or (Xc, yc, idsc), fixes that split instead. `ids` name the points (default: 0..N-1, calibration points
        counted on); `documents` maps ids to texts and `class_names` names the classes, both for `explain`. `on_epoch`
        hears of every epoch.
        """
        check_parameters(self)
        x, labels = self.matrix(X, "X"), label_tensor(y, "y")
        check_lengths("X", len(x), "y", len(labels))
        n_classes = count_classes(labels)
        names = checked_ids(ids, len(x), "ids")
        given = None if calibration is None else self._given_calibration(calibration, x, names, n_classes)
        check_classes(labels, n_classes, "y", least=1 if given else 2)
        if documents is not None and not isinstance(documents, Mapping):
            raise ValueError("documents must map ids to texts, such as dict(zip(ids, texts)).")
        if class_names is not None and len(class_names) != n_classes:
            raise ValueError(f"class_names has {len(class_names)} names but there are {n_classes} classes.")

        layers: list[SDMLayer] = []
        with progress_bar(self.progress) as bar:
            task = bar.add_task("Fitting the SDM layer", total=self.rounds * self.epochs)
            for j in range(self.rounds):
                rng = np.random.default_rng([self.seed, j])

                def tell(row: dict[str, float], j: int = j) -> None:
                    bar.advance(task)
                    if on_epoch is not None:
                        on_epoch({"round": j + 1, **row})

                if given:
                    train, held = (x, labels.to(x.device), names), given
                else:
                    first, second = (torch.from_numpy(i) for i in random_halves(labels.numpy(), rng))
                    train, held = (
                        (x[i], labels[i].to(x.device), [names[k] for k in i.tolist()]) for i in (first, second)
                    )
                layer = self._fit_round(train, held, n_classes, rng, tell)
                if self.ensemble:
                    layers.append(layer)
                elif not layers or layer.loss < layers[0].loss:
                    layers = [layer]  # one at a time: ten layers of a large model would not fit
        layers.sort(key=lambda layer: layer.loss)

        self.layers_ = layers
        self.classes_ = np.arange(n_classes)
        self.n_features_in_ = int(x.shape[1])
        self.alpha_ = float(self.alpha)
        self.class_names_ = None if class_names is None else [str(name) for name in class_names]
        self.documents_ = {} if documents is None else {plain_id(key): str(text) for key, text in documents.items()}
        return self

    def _given_calibration(
        self, calibration: Calibration, x: Tensor, names: list[Any], n_classes: int
    ) -> tuple[Tensor, Tensor, list[Any]]:
        """The calibration split that the caller gives, checked against the training split: (x, labels, ids)."""
        if len(calibration) not in (2, 3):
            raise ValueError("calibration must be (Xc, yc) or (Xc, yc, idsc).")
        x_ca, y_ca = self.matrix(calibration[0], "calibration X"), label_tensor(calibration[1], "calibration y")
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
        check_classes(y_ca, n_classes, "calibration y", least=1)
        return x_ca, y_ca.to(x.device), names_ca

    def _fit_round(
        self,
        train: tuple[Tensor, Tensor, list[Any]],
        held: tuple[Tensor, Tensor, list[Any]],
        n_classes: int,
        rng: np.random.Generator,
        on_epoch: Callable[[dict[str, float]], None],
    ) -> SDMLayer:
        trained = train_adaptor(
            train[:2],
            held[:2],
            n_classes,
            exemplar_dim=self.exemplar_dim,
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            center=self.center,
            generator=torch.Generator().manual_seed(int(rng.integers(2**62))),
            make_support=self.make_support(),
            on_epoch=on_epoch,
        )
        return SDMLayer.build(
            trained.adaptor, train, held, n_classes, self.make_support(), trained.loss, trained.history
        )

    def recalibrate(self, alpha: float) -> SDMEstimator:
        """Answer for another alpha from now on: Algorithm 1 is run again, nothing is re-trained."""
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
        x, labels = self.matrix(X, "X", self.n_features_in_), label_tensor(y, "y")
        check_lengths("X", len(x), "y", len(labels))
        if ids is None:
            known = len(self.layers_[0].support_ids)
            ids = [f"added:{known + i}" for i in range(len(x))]
        names = checked_ids(ids, len(x), "ids")
        taken = set(names).intersection(*[{*layer.support_ids, *layer.calibration_ids} for layer in self.layers_])
        if taken:
            raise ValueError(f"The id {next(iter(taken))!r} is already in use: give new points ids of their own.")
        for layer in self.layers_:
            layer.add(x, labels.to(x.device), names)
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
        new.layers_ = [copy.copy(layer) for layer in self.layers_]
        for layer in new.layers_:
            layer.support = copy.copy(layer.support)  # adding replaces its tensors, it does not write into them
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
        if regions is not None:
            self._check_single("score with regions")
        first, *others = self.layers_
        scores = first.score(x, alpha, own, regions)
        if not others:
            return scores
        accepted, accepted_lower = scores.accepted, scores.accepted_lower
        at = first.accepted_at(scores.q_prime, scores.p, scores.prediction, ALPHA_GRID)
        for layer in others:
            other = layer.score(x, alpha)
            agree = other.prediction == scores.prediction
            accepted = accepted & other.accepted & agree
            accepted_lower = accepted_lower & other.accepted_lower & agree
            at &= layer.accepted_at(other.q_prime, other.p, other.prediction, ALPHA_GRID) & agree[:, None]
        highest = highest_alpha(at)
        return replace(scores, accepted=accepted, accepted_lower=accepted_lower, highest_alpha=highest)

    def output(self, X: Tensor, exclude: Tensor | None = None) -> Tensor:
        """SDM(z') of each row, (N, C) on the CPU: what a training step needs, without the rest of `score`.

        X is a float32 tensor and is not checked, for this runs at every step of fine-tuning. `exclude` as in `score`.
        """
        self._check_single("output")
        return self.layers_[0].output(X.to(self.layers_[0].adaptor.weight.device), exclude)

    def support_index(self, ids: Sequence[DocumentId]) -> NDArray[np.int64]:
        """The support index of each document id, -1 where it is not in the support: what `exclude` takes."""
        self._check_fitted()
        return _positions([plain_id(i) for i in ids], self.layers_[0])

    def accepted_at(self, scores: Scores, alphas: Iterable[float]) -> NDArray[np.bool_]:
        """Which points are accepted at each of several alphas, (N, number of alphas)."""
        self._check_single("accepted_at")
        wanted = [check_alpha(a) for a in alphas]
        return self.layers_[0].accepted_at(scores.q_prime, scores.p, scores.prediction, wanted)

    def explain(self, X: ArrayLike | Tensor, k: int = 5) -> list[Explanation]:
        """For each row: the decision in a sentence, the k nearest support documents, and calibration peers."""
        self._check_fitted()
        if k < 1:
            raise ValueError(f"k is {k} but must be at least 1.")
        x = self.matrix(X, "X", self.n_features_in_)
        return explain_points(self.layers_[0], x, self.score(X), self.alpha_, self.documents_, k, self.class_names_)

    def certify(
        self, X: ArrayLike | Tensor, y: ArrayLike | Tensor, delta: float = 0.05, classes: Sequence[int] | None = None
    ) -> Certificate:
        """The loosest region whose accuracy among the accepted is at least alpha for each predicted class, with
        probability at least 1 - delta; X and y must have played no part in fitting. See `sdmlm.estimator.certify`.

        `classes`: the predicted classes that the certificate covers (default: all); others are then always rejected.
        """
        self._check_single("certify")
        x, labels = self.matrix(X, "X", self.n_features_in_), label_tensor(y, "y")
        check_lengths("X", len(x), "y", len(labels))
        layer, scores = self.layers_[0], self.score(X)
        if (known := self.share_fitted(X)) > 0.25:
            raise ValueError(
                f"{known:.0%} of these points were fitted over (in the support or the calibration half): a certificate needs "
                "points that played no part in fitting."
            )
        grid = threshold_grid(self.region_, layer.calibration.q_prime.numpy())
        certificate = certify_region(
            self.region_, grid, scores.q_prime, scores.p, scores.prediction, labels.numpy(), delta, classes
        )
        return replace(certificate, estimator=self.digest())

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
        """The high-reliability region at `alpha_` (of the best round)."""
        self._check_fitted()
        return self.layers_[0].region(self.alpha_)

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
        """The calibration points of the best round: labels, z', q, d, SDM output and q'."""
        self._check_fitted()
        return self.layers_[0].calibration

    @property
    def support_ids_(self) -> list[DocumentId]:
        """The ids of the support documents of the best round, in the order of the support."""
        self._check_fitted()
        return self.layers_[0].support_ids

    @property
    def calibration_ids_(self) -> list[DocumentId]:
        """The ids of the calibration points of the best round."""
        self._check_fitted()
        return self.layers_[0].calibration_ids

    def region(self, alpha: float) -> HighReliabilityRegion:
        """The high-reliability region at any alpha (of the best round)."""
        self._check_fitted()
        return self.layers_[0].region(alpha)

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
            raise ValueError(f"{method} works on a single model: fit with ensemble=False.")

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


def _positions(ids: Sequence[Any], layer: SDMLayer) -> NDArray[np.int64]:
    where = {name: i for i, name in enumerate(layer.support_ids)}
    return np.array([where.get(name, -1) for name in ids], dtype=np.int64)
