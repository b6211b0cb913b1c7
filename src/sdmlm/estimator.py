"""SDMEstimator: embeddings and labels in, calibrated accept/reject decisions with evidence out (spec sections 1 to 6)."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sdmlm import __version__
from sdmlm.adaptor import ExemplarAdaptor, MakeSupport, train_adaptor
from sdmlm.artifacts import CONFIG, SDM_FOLDER, read_artifact, write_artifact
from sdmlm.certify import Certificate, certify_region, threshold_grid
from sdmlm.explain import Explanation, explain_points
from sdmlm.layer import ALPHA_GRID, SDMLayer, highest_alpha
from sdmlm.progress import progress_bar
from sdmlm.region import DistanceCDF, HighReliabilityRegion, check_alpha
from sdmlm.scores import Scores
from sdmlm.support import SupportSet
from sdmlm.validation import (
    check_classes,
    check_lengths,
    checked_ids,
    count_classes,
    label_tensor,
    plain_id,
    random_halves,
)

KIND, VERSION = "sdmlm estimator", 1
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
        self.check_parameters()
        x, labels = self.matrix(X, "X"), label_tensor(y, "y")
        check_lengths("X", len(x), "y", len(labels))
        n_classes = count_classes(labels)
        names = checked_ids(ids, len(x), "ids")
        given = None
        if calibration is not None:
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
            given = x_ca, y_ca.to(x.device), names_ca
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
            make_support=self._make_support(),
            on_epoch=on_epoch,
        )
        return SDMLayer.build(
            trained.adaptor, train, held, n_classes, self._make_support(), trained.loss, trained.history
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

    # Scoring

    def score(self, X: ArrayLike | Tensor, exclude: ArrayLike | Tensor | None = None) -> Scores:
        """Prediction, the three signals, their bounds and the decision for each row of X.

        `exclude` (N,) is the support index that a point ignores, -1 for none: for points that are in the support
        themselves (see `support_index`). Those are judged by the eCDF of the training split, all others by that of
        the calibration split.
        """
        self._check_fitted()
        x = self.matrix(X, "X", self.n_features_in_, allow_empty=True)
        own = None if exclude is None else label_tensor(exclude, "exclude")
        if own is not None:
            self._check_single("score with exclude")  # every round has a support of its own
            check_lengths("X", len(x), "exclude", len(own))
        first, *others = self.layers_
        scores = first.score(x, self.alpha_, own)
        if not others:
            return scores
        accepted, accepted_lower = scores.accepted, scores.accepted_lower
        at = first.accepted_at(scores.q_prime, scores.p, scores.prediction, ALPHA_GRID)
        for layer in others:
            other = layer.score(x, self.alpha_)
            agree = other.prediction == scores.prediction
            accepted = accepted & other.accepted & agree
            accepted_lower = accepted_lower & other.accepted_lower & agree
            at &= layer.accepted_at(other.q_prime, other.p, other.prediction, ALPHA_GRID) & agree[:, None]
        highest = highest_alpha(at)
        return replace(scores, accepted=accepted, accepted_lower=accepted_lower, highest_alpha=highest)

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
        probability at least 1 - delta; X and y must have played no part in fitting. See `sdmlm.certify`.

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

    def digest(self) -> str:
        """A hash over everything that decisions rest on, except alpha: weights, support, calibration points."""
        self._check_fitted()
        digest = hashlib.sha256(f"max_q={self.max_q}".encode())
        for name, part in self._tensors().items():
            digest.update(f"{name}{tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

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
        rounds = [{"loss": layer.loss, "history": layer.history} for layer in self.layers_]
        ids = [{"support": layer.support_ids, "calibration": layer.calibration_ids} for layer in self.layers_]
        names = [name for name in _parameter_names() if name not in ("device", "progress")]
        parameters = {name: plain_id(getattr(self, name)) for name in names}  # NumPy's numbers as plain ones
        config = {
            "sdmlm_version": __version__,
            "parameters": parameters,
            "alpha": self.alpha_,
            "n_classes": len(self.classes_),
            "class_names": self.class_names_,
            "n_features": self.n_features_in_,
            "rounds": rounds,
        }
        documents = [[key, text] for key, text in self.documents_.items()]
        write_artifact(folder, KIND, VERSION, config, self._tensors(), {"ids": ids, "documents": documents})

    def _tensors(self) -> dict[str, Tensor]:
        """All that was fitted, by name."""
        tensors = {}
        for i, layer in enumerate(self.layers_):
            support, adaptor = layer.support, layer.adaptor
            parts = {
                "mean": adaptor.mean,
                "std": adaptor.std,
                "weight": adaptor.weight,
                "bias": adaptor.bias,
                "out_weight": adaptor.out_weight,
                "out_bias": adaptor.out_bias,
                "calibration.vectors": layer.calibration_vectors,
                "calibration.z": layer.calibration.z,
                "calibration.labels": layer.calibration.labels,
                **{f"train_cdf.{c}": torch.from_numpy(v) for c, v in enumerate(layer.train_cdf.values)},
                **{f"support.{name}": value for name, value in support.state().items()},
            }
            tensors.update({f"layer.{i}.{name}": value for name, value in parts.items()})
        return tensors

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str | torch.device | None = None) -> SDMEstimator:
        """Load what `save_pretrained` wrote, after checking version, checksums and shapes."""
        if (Path(folder) / SDM_FOLDER / CONFIG).is_file():
            raise ValueError(f"{folder} is a language model: its SDM layer is {Path(folder) / SDM_FOLDER}.")
        config, tensors, texts = read_artifact(folder, KIND, VERSION)
        try:
            self = cls(**config["parameters"], device=device)
            self.check_parameters()
            n_classes, n_features = int(config["n_classes"]), int(config["n_features"])
            self.alpha_ = check_alpha(config["alpha"])
            layers = [
                self._load_layer(f"layer.{i}.", tensors, n_classes, n_features, texts["ids"][i], facts)
                for i, facts in enumerate(config["rounds"])
            ]
            self.documents_ = dict(texts["documents"])
            self.class_names_ = config["class_names"]
            if self.class_names_ is not None and len(self.class_names_) != n_classes:
                raise KeyError("the number of class names")
        except (KeyError, TypeError, IndexError, RuntimeError, AttributeError) as error:
            raise ValueError(f"{folder} is damaged ({error}): restore it from a copy or fit again.") from error
        if not layers:
            raise ValueError(f"{folder} is damaged (it holds no layer): restore it from a copy or fit again.")
        self.layers_, self.classes_, self.n_features_in_ = layers, np.arange(n_classes), n_features
        return self

    def _load_layer(
        self, prefix: str, tensors: dict[str, Tensor], n_classes: int, n_features: int, ids: Any, facts: Any
    ) -> SDMLayer:
        device = self._device()
        own = {name.removeprefix(prefix): t.to(device) for name, t in tensors.items() if name.startswith(prefix)}
        names = ("mean", "std", "weight", "bias", "out_weight", "out_bias")
        adaptor = ExemplarAdaptor(*(own[name] for name in names))
        width = len(adaptor.bias)
        if adaptor.weight.shape != (width, n_features) or adaptor.out_weight.shape != (n_classes, width):
            raise KeyError("its weights have the wrong shape")
        parts = {name.removeprefix("support."): t for name, t in own.items() if name.startswith("support.")}
        support = self._make_support()(**parts)  # type: ignore[call-arg]
        if len(support) != len(ids["support"]) or len(own["calibration.labels"]) != len(ids["calibration"]):
            raise KeyError("ids and vectors differ in number")
        cdf = DistanceCDF([own[f"train_cdf.{c}"].cpu().numpy() for c in range(n_classes)])
        return SDMLayer(
            adaptor,
            support,
            cdf,
            own["calibration.vectors"],
            own["calibration.z"],
            own["calibration.labels"],
            ids["support"],
            ids["calibration"],
            facts["loss"],
            facts["history"],
        )

    # Checks

    def check_parameters(self) -> None:
        check_alpha(self.alpha)
        for name in ("exemplar_dim", "epochs", "batch_size", "rounds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name} is {value!r} but must be a whole number of at least 1.")
        if not isinstance(self.learning_rate, (int, float, np.number)) or not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate!r} but must be a positive number.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)) or self.seed < 0:
            raise ValueError(f"seed is {self.seed!r} but must be a whole number of at least 0.")
        if self.center not in ("global", "feature"):
            raise ValueError(f'center is {self.center!r} but must be "global" or "feature".')
        if self.index not in ("exact", "faiss"):
            raise ValueError(f'index is {self.index!r} but must be "exact" or "faiss".')
        if self.max_q is not None and (not isinstance(self.max_q, (int, np.integer)) or self.max_q < 1):
            raise ValueError(f"max_q is {self.max_q!r} but must be a whole number of at least 1, or None for no cap.")

    def _check_fitted(self) -> None:
        if not hasattr(self, "layers_"):
            raise ValueError("This SDMEstimator is not fitted yet: call fit, or load one with from_pretrained.")

    def _check_single(self, method: str) -> None:
        self._check_fitted()
        if len(self.layers_) > 1:
            raise ValueError(f"{method} works on a single model: fit with ensemble=False.")

    def _device(self) -> torch.device:
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return torch.device("cpu") if device.type == "mps" else device  # which has no double precision

    def _make_support(self) -> MakeSupport:
        if self.index == "faiss":
            from sdmlm.support_faiss import FaissSupportSet  # an optional dependency

            return partial(FaissSupportSet, max_q=self.max_q)
        return partial(SupportSet, max_q=self.max_q)

    def matrix(self, values: Any, name: str, width: int | None = None, allow_empty: bool = False) -> Tensor:
        """A finite float32 matrix on the device."""
        try:
            with np.errstate(over="ignore"):  # what overflows is named below
                x = (
                    values.detach()
                    if isinstance(values, Tensor)
                    else torch.from_numpy(np.array(values, dtype=np.float32))
                )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} is not a matrix of numbers: {error}.") from error
        if x.ndim != 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)} but must be a matrix: one row per point.")
        if width is not None and x.shape[1] != width:
            raise ValueError(f"{name} is {x.shape[1]} wide but the estimator was fitted on vectors {width} wide.")
        if x.shape[1] == 0 or (len(x) == 0 and not allow_empty):
            raise ValueError(f"{name} is empty: give at least one row and one column.")
        x = x.to(self._device(), torch.float32)
        # A row with NaN or inf has no finite sum: one pass over good data, a closer look only at the others.
        odd = (~torch.isfinite(x.sum(dim=1))).nonzero().squeeze(1)
        bad = odd[~torch.isfinite(x[odd]).all(dim=1)]
        if len(bad):
            raise ValueError(
                f"{name} has NaN or infinite values (beyond float32 counts as infinite) in {len(bad)} rows, "
                f"the first is row {int(bad[0])}: remove or repair them."
            )
        return x


def _positions(ids: Sequence[Any], layer: SDMLayer) -> NDArray[np.int64]:
    where = {name: i for i, name in enumerate(layer.support_ids)}
    return np.array([where.get(name, -1) for name in ids], dtype=np.int64)


def _parameter_names() -> list[str]:
    return [name for name in inspect.signature(SDMEstimator.__init__).parameters if name != "self"]
