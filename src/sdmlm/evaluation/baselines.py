"""Alternatives to the high-reliability region, behind one interface.

Each class has `fit(points, y)` on labelled CALIBRATION points, `accept(points)` -> (predictions, accepted), and
`score(points)`: one number per point, higher means more trustworthy. For the first five a point is a row of logits (an
LM's own, or those of `cross_entropy_logits`); for the SDM ones it is an embedding, and the estimator they are given was
calibrated when it was fitted. Predictions are always the argmax of the logits; the classes differ only in which predictions
they accept. `embedding_baselines` has the classifiers and detectors that start from embeddings.

APS and RAPS are implemented here because MAPIE (1.6) refuses them for two classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import softmax

from sdmlm.estimator.adaptor import train_adaptor
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.region import check_alpha
from sdmlm.estimator.scores import Scores
from sdmlm.storage.progress import progress_bar

Floats = NDArray[np.float64]
Labelled = tuple[ArrayLike, ArrayLike]  # (X, y)
Decisions = tuple[NDArray[np.int64], NDArray[np.bool_]]  # (predictions, accepted), each (N,)

# T = 1e4 to 1e-4, as ln(1/T). Separable calibration points would send T to 0, useless logits to infinity.
_LOG_BETAS = (-math.log(1e4), math.log(1e4))


def checked_logits(values: Any, name: str = "logits", width: int | None = None) -> Floats:
    """Logits as a finite (N, C) matrix, or ValueError."""
    z = np.asarray(values, dtype=np.float64)
    if z.ndim != 2 or z.shape[1] < 2:
        raise ValueError(f"{name} has shape {z.shape} but must have one row per point and one column per class.")
    if width is not None and z.shape[1] != width:
        raise ValueError(f"{name} has {z.shape[1]} columns but there are {width} classes: give one logit per class.")
    if not np.isfinite(z).all():
        raise ValueError(f"{name} has NaN or infinite values: remove or repair those rows.")
    return z


class LogitBaseline:
    """Base class of the baselines over logits: checks, and predictions by argmax."""

    def __init__(self, alpha: float = 0.95) -> None:
        self.alpha = alpha

    def fit(self, logits: ArrayLike, y: ArrayLike) -> Self:
        """Calibrate on logits (N, C) and labels (N,) that the model behind the logits was not trained on."""
        check_alpha(self.alpha)
        z, labels = checked_logits(logits), np.asarray(y)
        if labels.shape != (len(z),) or len(z) == 0:
            raise ValueError(f"y has shape {labels.shape} but logits has {len(z)} rows: give one label for each row.")
        if labels.dtype.kind not in "iub" or labels.min() < 0 or labels.max() >= z.shape[1]:
            raise ValueError(f"y must hold whole numbers in 0..{z.shape[1] - 1}, one class per column of the logits.")
        self.n_classes_ = int(z.shape[1])
        self._calibrate(z, labels.astype(np.int64))
        return self

    def accept(self, logits: ArrayLike) -> Decisions:
        """(predictions, accepted) of each row."""
        z = self._checked(logits)
        return z.argmax(axis=1), self._accepted(z)

    def score(self, logits: ArrayLike) -> Floats:
        """One score per row, higher means more trustworthy; by default max softmax(z)."""
        return self._score(self._checked(logits))

    def _checked(self, logits: ArrayLike) -> Floats:
        if not hasattr(self, "n_classes_"):
            raise ValueError(f"This {type(self).__name__} is not fitted yet: call fit with calibration points.")
        return checked_logits(logits, width=self.n_classes_)

    def _calibrate(self, z: Floats, y: NDArray[np.int64]) -> None:
        """Learn from calibration points; the default learns nothing."""

    def _accepted(self, z: Floats) -> NDArray[np.bool_]:
        raise NotImplementedError

    def _score(self, z: Floats) -> Floats:
        return _confidence(z)


class NoReject(LogitBaseline):
    """Accept everything; alpha is not used."""

    def _accepted(self, z: Floats) -> NDArray[np.bool_]:
        return np.ones(len(z), dtype=bool)


class SoftmaxThreshold(LogitBaseline):
    """Accept where max softmax(z) >= alpha."""

    def _accepted(self, z: Floats) -> NDArray[np.bool_]:
        return self._score(z) >= self.alpha


class TemperatureScaling(LogitBaseline):
    """Accept where max softmax(z / T) >= alpha; T, `temperature_`, minimises the calibration NLL (Guo et al. 2017)."""

    def _calibrate(self, z: Floats, y: NDArray[np.int64]) -> None:
        own = np.take_along_axis(z, y[:, None], axis=1)[:, 0]

        def slope(log_beta: float) -> float:
            """The derivative of the mean NLL in beta = 1/T. The NLL is convex in beta, so it changes sign once."""
            p = softmax(math.exp(log_beta) * z, axis=1)
            return float(((p * z).sum(axis=1) - own).mean())

        low, high = _LOG_BETAS
        beyond = low if slope(low) >= 0 else high if slope(high) <= 0 else None
        self.temperature_ = math.exp(-(brentq(slope, low, high, xtol=1e-12) if beyond is None else beyond))

    def _accepted(self, z: Floats) -> NDArray[np.bool_]:
        return self._score(z) >= self.alpha

    def _score(self, z: Floats) -> Floats:
        return _confidence(z / self.temperature_)


class RAPS(LogitBaseline):
    """Regularised adaptive prediction sets (Angelopoulos et al. 2021): accept where the set holds exactly one class.

    The score of class y is s(x, y, u) = rho(x, y) + u p_y + penalty (o(x, y) - k_reg)^+ with p = softmax(z), rho the
    mass of the classes ranked before y, o the rank of y (1 = most probable), and one u ~ U[0, 1) per point. The set is
    {y: s <= tau}, tau the ceil((n+1) alpha)-th smallest calibration score (infinite if there are fewer), so it holds
    the true class with probability at least alpha over exchangeable points. This is the randomised variant, in which a set
    may be empty; points with an empty set or with several classes are rejected. Scores never decrease with the rank, so
    a set of one class always holds the prediction.

    k_reg = 1: only sets of one class are of use here, and with two classes a larger value has no effect.
    penalty = 0.1: the middle of the values {0.001, 0.01, 0.1, 0.2, 0.5} that the authors search for small sets. It is fixed
    beforehand; a search would need calibration points of its own.

    `score` is the conformal score of the second most probable class: the set has one class where it exceeds tau.
    u is drawn from `seed`, in the order of the rows: the same call gives the same answer. Learned: `threshold_` (tau).
    """

    def __init__(self, alpha: float = 0.95, penalty: float = 0.1, k_reg: int = 1, seed: int = 0) -> None:
        super().__init__(alpha)
        self.penalty, self.k_reg, self.seed = penalty, k_reg, seed

    def _calibrate(self, z: Floats, y: NDArray[np.int64]) -> None:
        if not 0 <= self.penalty < math.inf:
            raise ValueError(f"penalty is {self.penalty!r} but must be zero or a positive number.")
        own = np.take_along_axis(self._scores(z, stream=0), y[:, None], axis=1)[:, 0]
        # Rounded first: 100 x 0.55 = 55.00000000000001 in floating point, which must not become 56.
        k = math.ceil(round((len(own) + 1) * self.alpha, 9))
        self.threshold_ = float(np.sort(own)[k - 1]) if k <= len(own) else math.inf

    def sets(self, logits: ArrayLike) -> NDArray[np.bool_]:
        """The prediction sets, (N, C): which classes each holds."""
        return self._scores(self._checked(logits), stream=1) <= self.threshold_

    def _accepted(self, z: Floats) -> NDArray[np.bool_]:
        return np.asarray(self.sets(z).sum(axis=1) == 1)

    def _score(self, z: Floats) -> Floats:
        return np.asarray(np.sort(self._scores(z, stream=1), axis=1)[:, 1])

    def _scores(self, z: Floats, stream: int) -> Floats:
        """s(x, y, u) of every class, (N, C). Calibration (0) and use (1) draw u independently of each other."""
        u = np.random.default_rng([self.seed, stream]).random((len(z), 1))
        order = np.argsort(-z, axis=1, kind="stable")
        p = np.take_along_axis(softmax(z, axis=1), order, axis=1)
        before = np.cumsum(p, axis=1) - p
        ranks = np.arange(1, z.shape[1] + 1)
        ranked = before + u * p + self.penalty * np.maximum(ranks - self.k_reg, 0)
        scores: Floats = np.empty_like(z)
        np.put_along_axis(scores, order, ranked, axis=1)
        return scores


class APS(RAPS):
    """Adaptive prediction sets (Romano et al. 2020), randomised: RAPS without the penalty."""

    def __init__(self, alpha: float = 0.95, seed: int = 0) -> None:
        super().__init__(alpha, penalty=0.0, seed=seed)


class SDMBaseline:
    """Base class of the baselines over a fitted SDMEstimator; alpha is that of the estimator."""

    def __init__(self, estimator: SDMEstimator) -> None:
        self.estimator = estimator

    def fit(self, X: ArrayLike | Scores | None = None, y: ArrayLike | None = None) -> Self:
        """Does nothing: the estimator was calibrated when it was fitted."""
        return self

    def accept(self, X: ArrayLike | Scores) -> Decisions:
        """(predictions, accepted) of embeddings (N, D), or of their Scores if these were already computed."""
        scores = self._scored(X)
        return scores.prediction, self._accepted(scores)

    def score(self, X: ArrayLike | Scores) -> Floats:
        """One score per point, higher means more trustworthy."""
        return self._score(self._scored(X))

    def _scored(self, X: ArrayLike | Scores) -> Scores:
        return X if isinstance(X, Scores) else self.estimator.score(X)

    def _accepted(self, scores: Scores) -> NDArray[np.bool_]:
        return self._score(scores) >= self.estimator.alpha_

    def _score(self, scores: Scores) -> Floats:
        raise NotImplementedError


class DistanceSoftmax(SDMBaseline):
    """Accept where max softmax(d z') >= alpha: Distance and Magnitude without Similarity."""

    def _score(self, scores: Scores) -> Floats:
        return _confidence(scores.d[:, None] * scores.z)


class SDMThreshold(SDMBaseline):
    """Accept where max SDM(z') >= alpha: all three signals, no region."""

    def _score(self, scores: Scores) -> Floats:
        return np.asarray(scores.p.max(axis=1))


class SDMRegion(SDMBaseline):
    """Accept what lies in the high-reliability region; with `lower`, what does by the lower estimate.

    `score` is q', the rescaled Similarity; the region has a threshold on it.
    """

    def __init__(self, estimator: SDMEstimator, lower: bool = False) -> None:
        super().__init__(estimator)
        self.lower = lower

    def _accepted(self, scores: Scores) -> NDArray[np.bool_]:
        return scores.accepted_lower if self.lower else scores.accepted

    def _score(self, scores: Scores) -> Floats:
        return scores.q_prime_lower if self.lower else scores.q_prime


def cross_entropy_logits(
    estimator: SDMEstimator, train: Labelled, calibration: Labelled, seed: int = 0, progress: bool = True
) -> Callable[[ArrayLike], Floats]:
    """Train the adaptor of an SDM layer with cross-entropy alone; returns the function from embeddings to its logits.

    `train` and `calibration` are (X, y); settings and device are those of the fitted `estimator`. As for the SDM layer, the
    epoch is chosen on the calibration points, which then also calibrate the baselines. All baselines have this advantage.
    """
    device = estimator.torch_device()
    names = ("exemplar_dim", "epochs", "batch_size", "learning_rate", "center")
    settings: dict[str, Any] = {name: getattr(estimator, name) for name in names}

    def tensor(values: ArrayLike, dtype: Any = np.float32) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=dtype)).to(device)

    with progress_bar(progress) as bar:
        task = bar.add_task("Fitting the cross-entropy adaptor", total=estimator.epochs)
        adaptor = train_adaptor(
            (tensor(train[0]), tensor(train[1], np.int64)),
            (tensor(calibration[0]), tensor(calibration[1], np.int64)),
            len(estimator.classes_),
            **settings,
            generator=torch.Generator().manual_seed(seed),
            loss="ce",
            on_epoch=lambda row: bar.advance(task),
        ).adaptor
    return lambda X: np.asarray(adaptor(tensor(X))[1].cpu())


def _confidence(z: Floats) -> Floats:
    return np.asarray(softmax(z, axis=1).max(axis=1))
