"""One fitted SDM layer: adaptor, support set, eCDFs, and the calibration points that its region follows from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdmlm.estimator.activation import rescaled_similarity, sdm
from sdmlm.estimator.adaptor import ExemplarAdaptor, MakeSupport
from sdmlm.estimator.region import (
    DistanceCDF,
    HighReliabilityRegion,
    dkw_epsilon,
    find_region,
    membership,
    sample_sizes,
)
from sdmlm.estimator.scores import Scores
from sdmlm.estimator.support import SupportMatch, SupportSet
from sdmlm.estimator.whitening import Whitening, relative_distance

# The values of alpha that `highest_alpha` tries: every hundredth, and finer towards 1.
ALPHA_GRID: tuple[float, ...] = (*(round(0.51 + 0.01 * i, 2) for i in range(49)), 0.995, 0.999, 1.0)

# How much a distance may differ with the batch that h' was computed in, as a share of |h'|: some units of float32.
_FLOAT_NOISE = 2e-6
_MOST_REGIONS = 256  # cache size: clients of a server may ask for any alpha


@dataclass(frozen=True)
class Points:
    """Outputs of the method for N points, as Algorithm 1 and the report use them. Tensors on the CPU."""

    labels: Tensor  # (N,)
    z: Tensor  # (N, C) float64
    q: Tensor  # (N,)
    d_nearest: Tensor  # (N,)
    d: Tensor  # (N,)
    p: Tensor  # (N, C)
    q_prime: Tensor  # (N,)

    @property
    def predictions(self) -> Tensor:
        return self.z.argmax(dim=1)

    @cached_property
    def sorted_q_prime(self) -> list[NDArray[np.float64]]:
        """q' of the points of each class, ascending. Sorted once, because every score needs it."""
        return [np.sort(self.q_prime[self.labels == c].double().numpy()) for c in range(self.z.shape[1])]


def points_of(labels: Tensor, z: Tensor, q: Tensor, d_nearest: Tensor, d: Tensor) -> Points:
    """The outputs that follow from labels and the three signals."""
    return Points(labels, z, q, d_nearest, d, *activate(z, q, d))


def activate(z: Tensor, q: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """(SDM(z'), q') of points with these z', q and d."""
    p = sdm(z, q, d)
    return p, rescaled_similarity(q, p.gather(1, z.argmax(dim=1, keepdim=True)).squeeze(1))


def confidence_of(z: Tensor, q: Tensor) -> Tensor:
    """Similarity and Magnitude in one number, (N,): the log-odds of the SDM output at the prediction, with d = 1.

    Minus infinity where q = 0: such a point is out of distribution, whatever its Magnitude.
    """
    scaled = (z - z.amax(dim=1, keepdim=True)) * torch.log(2.0 + q.double()).unsqueeze(1)
    others = scaled.scatter(1, z.argmax(dim=1, keepdim=True), -torch.inf)
    return torch.where(q > 0, -torch.logsumexp(others, dim=1), -torch.inf)


def highest_alpha(accepted_at: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The highest alpha of ALPHA_GRID at which each point is accepted, NaN for none; from a column for each alpha."""
    highest = np.where(accepted_at, np.asarray(ALPHA_GRID), 0.0).max(axis=1)
    return np.where(accepted_at.any(axis=1), highest, np.nan)


class Regions:
    """Algorithm 1 over calibration points, cached by alpha."""

    calibration: Points
    _regions: dict[float, HighReliabilityRegion]

    def region(self, alpha: float) -> HighReliabilityRegion:
        """The high-reliability region at alpha, cached until the support changes."""
        if alpha not in self._regions:
            if len(self._regions) >= _MOST_REGIONS:
                self._regions.clear()
            ca = self.calibration
            self._regions[alpha] = find_region(ca.q_prime, ca.p, ca.labels, alpha)
        return self._regions[alpha]

    def accepted_at(self, q_prime: Any, p: Any, predictions: Any, alphas: Iterable[float]) -> NDArray[np.bool_]:
        """Membership at each of several alphas, (N, number of alphas)."""
        return membership([self.region(alpha) for alpha in alphas], q_prime, p, predictions)


class SDMLayer(Regions):
    """Scores points with a trained adaptor. `support_ids` and `calibration_ids` name the documents of the two splits."""

    def __init__(
        self,
        adaptor: ExemplarAdaptor,
        support: SupportSet,
        train_cdf: DistanceCDF | None,
        calibration_vectors: Tensor,
        calibration_z: Tensor,
        calibration_labels: Tensor,
        support_ids: list[Any],
        calibration_ids: list[Any],
        loss: float,
        history: list[dict[str, float]],
        whitening: Whitening | None = None,
        whitened: SupportSet | None = None,
        calibration_whitened: Tensor | None = None,
    ) -> None:
        """The last three are for Distance in whitened h: the transform, and the whitened support and calibration points."""
        self.whitening, self.whitened, self.calibration_whitened = whitening, whitened, calibration_whitened
        self.adaptor, self.support, self._train_cdf = adaptor, support, train_cdf
        self.calibration_vectors = calibration_vectors
        self.support_ids, self.calibration_ids = support_ids, calibration_ids
        self.loss, self.history = loss, history
        self._z_ca, self._y_ca = calibration_z.cpu(), calibration_labels.cpu()
        self.calibrate()

    @classmethod
    def build(
        cls,
        adaptor: ExemplarAdaptor,
        train: tuple[Tensor, Tensor, list[Any]],
        calibration: tuple[Tensor, Tensor, list[Any]],
        n_classes: int,
        make_support: MakeSupport,
        loss: float,
        history: list[dict[str, float]],
        whiten: bool = False,
    ) -> SDMLayer:
        """Embed both splits, each given as (x, labels, ids), with a trained adaptor.

        With `whiten`, Distance is taken in whitened h instead of h'.
        """
        (x, y, ids), (x_ca, y_ca, ids_ca) = train, calibration
        vectors, z = adaptor(x)
        predictions = z.argmax(dim=1)
        support = make_support(vectors, y, predictions)
        # Points of the training split ignore their own entry, and have an eCDF of their own (docs/method.md, 3.2).
        vectors_ca, z_ca = adaptor(x_ca)
        if not whiten:
            train_cdf = _train_cdf(support, n_classes)
            return cls(adaptor, support, train_cdf, vectors_ca, z_ca, y_ca, ids, ids_ca, loss, history)
        whitening = Whitening.fit(x, y)
        whitened = make_support(whitening(x), y, y)
        rest = whitening, whitened, whitening(x_ca)
        return cls(adaptor, support, None, vectors_ca, z_ca, y_ca, ids, ids_ca, loss, history, *rest)

    @property
    def train_cdf(self) -> DistanceCDF:
        """The eCDF for points of the training split. Computed on first use: it costs as much as calibration."""
        if self._train_cdf is None:
            self._train_cdf = _train_cdf(self.support, self.n_classes, self.whitened)
        return self._train_cdf

    @property
    def n_classes(self) -> int:
        return int(self._z_ca.shape[1])

    def calibrate(self) -> None:
        """Compute q, d, SDM output and q' of the calibration points with the present support."""
        predictions = self._z_ca.argmax(dim=1)
        match = _on_cpu(self.support.query(self.calibration_vectors, predictions))
        distance = match.d_nearest
        if self.whitened is not None and self.calibration_whitened is not None:
            own, other = self.whitened.nearest_by_class(self.calibration_whitened, predictions)
            match = replace(match, d_nearest=torch.minimum(own, other).cpu())
            distance = relative_distance(own, other).cpu()
        self.calibration_distance = distance
        self.cdf = DistanceCDF.fit(distance, self._y_ca, match.q, self.n_classes)
        d = self.calibration_d(self.cdf, predictions, match.q)
        self.calibration = points_of(self._y_ca, self._z_ca, match.q, match.d_nearest, d)
        self._regions: dict[float, HighReliabilityRegion] = {}

    def calibration_d(self, cdf: DistanceCDF, predictions: Tensor, q: Tensor) -> Tensor:
        """d of the calibration points by their eCDF, in which most of them are stored themselves.

        In whitened h a stored point is left out of its own eCDF, as a new point is not in it either. So both have the same
        distribution, and a lower bound on d rejects the same share of new points as of known ones.
        """
        d = self._distance(cdf, self.calibration_distance, predictions)
        if self.whitening is None:
            return d
        sizes = torch.tensor([len(values) for values in cdf.values], dtype=torch.float64)[predictions]
        stored = (predictions == self._y_ca) & (q.cpu() > 0)
        return torch.where(stored, (d * sizes - 1.0).clamp(min=0.0) / (sizes - 1.0).clamp(min=1.0), d)

    def _distance(self, cdf: DistanceCDF, distance: Tensor, predictions: Tensor) -> Tensor:
        """d of points: the share of known points that are at least as far away.

        As published, d is the minimum over all classes. In whitened h it is that of the predicted class: with ten classes,
        the minimum is 0 for one known point in ten, because the tightest class decides (docs/log.md, 2026-11-18).
        """
        d: Tensor = cdf.quantile(distance) if self.whitening is None else cdf.quantile_of(distance, predictions)
        return d

    def _known_rows(self, exclude: Tensor | None) -> Tensor | None:
        """Support indices as indices into the whitened points, which lack the out-of-distribution ones; -1 for none."""
        if exclude is None:
            return None
        known = (self.support.labels >= 0).cpu()
        rows = torch.where(known, known.cumsum(0) - 1, -1)
        own = exclude.cpu()
        return torch.where(own >= 0, rows[own.clamp(min=0)], -1).to(exclude.device)

    @property
    def document_ids(self) -> list[Any]:
        """The ids of the points that `exclude` may name, by index."""
        return self.support_ids

    def signals(
        self, x: Tensor, exclude: Tensor | None, cdf: DistanceCDF | None = None
    ) -> tuple[Tensor, SupportMatch, Tensor]:
        """z', the match with the support (q and nearest point), and d; all on the CPU.

        A point ignores its own entry `exclude` of the support. d comes from `cdf`; by default from the layer's own, or for
        points with an entry from that of the training split.
        """
        vectors, z = self.adaptor(x)
        z = z.cpu()
        predictions = z.argmax(dim=1)
        match = _on_cpu(self.support.query(vectors, predictions, exclude))
        distance, noise = match.d_nearest, _FLOAT_NOISE * vectors.norm(dim=1).double().cpu()
        if self.whitening is not None and self.whitened is not None:
            white = self.whitening(x)
            pair = self.whitened.nearest_by_class(white, predictions, self._known_rows(exclude))
            own, other = pair[0].cpu(), pair[1].cpu()
            match = replace(match, d_nearest=torch.minimum(own, other))
            distance = relative_distance(own, other)
            least = match.d_nearest.clamp(min=torch.finfo(torch.float64).tiny)
            noise = distance * 3 * _FLOAT_NOISE * white.norm(dim=1).double().cpu() / least

        def quantile(known: DistanceCDF) -> Tensor:
            return self._distance(known, known.snapped(distance, noise), predictions)

        d = quantile(self.cdf if cdf is None else cdf)
        if exclude is not None and cdf is None:
            d = torch.where(exclude.cpu() >= 0, quantile(self.train_cdf), d)
        return z, match, d

    def output(self, x: Tensor, exclude: Tensor | None = None) -> Tensor:
        """SDM(z') of raw vectors, (N, C) on the CPU: for training steps, which do not need the rest of `score`."""
        z, match, d = self.signals(x, exclude)
        return sdm(z, match.q, d)

    def score(
        self,
        x: Tensor,
        alpha: float,
        exclude: Tensor | None = None,
        regions: Callable[[float], HighReliabilityRegion] | None = None,
    ) -> Scores:
        """Scores of raw vectors (N, D). A point with exclude >= 0 is from the training split: its d uses `train_cdf`.

        `regions` returns the region at an alpha; default: that of this layer.
        """
        z, match, d = self.signals(x, exclude)
        return scores_of(z, match, d, self.calibration, alpha, regions or self.region)

    def add(self, x: Tensor, labels: Tensor, ids: list[Any]) -> None:
        """Add labelled points to the support. Weights and predictions do not change; q, d and the region are recomputed."""
        vectors, z = self.adaptor(x)
        self.support.add(vectors, labels, z.argmax(dim=1))
        if self.whitening is not None and self.whitened is not None:
            known = labels >= 0  # a point near a known out-of-distribution point must not get a high d
            self.whitened.add(self.whitening(x)[known], labels[known], labels[known])
        self._train_cdf = None
        self.support_ids = [*self.support_ids, *ids]
        self.calibrate()


def scores_of(
    z: Tensor,
    match: SupportMatch,
    d: Tensor,
    calibration: Points,
    alpha: float,
    regions: Callable[[float], HighReliabilityRegion],
) -> Scores:
    """All scores of points from their three signals (tensors on the CPU)."""
    predictions = z.argmax(dim=1)
    p, q_prime = activate(z, match.q, d)
    counts = sample_sizes(q_prime, calibration.sorted_q_prime)
    eps = dkw_epsilon(counts, alpha)
    d_lower, d_upper = (d - eps).clamp(min=0.0), (d + eps).clamp(max=1.0)
    p_lower, q_prime_lower = activate(z, match.q, d_lower)
    p_upper, q_prime_upper = activate(z, match.q, d_upper)
    region = regions(alpha)
    inside = region.contains(q_prime, p, predictions)
    fields = {
        "prediction": predictions,
        "p": p,
        "q": match.q,
        "d": d,
        "d_nearest": match.d_nearest,
        "nearest": match.nearest,
        "z": z,
        "q_prime": q_prime,
        "confidence": confidence_of(z, match.q),
        "accepted": inside,
        "in_region": inside,
        "out_of_distribution": match.q == 0,
        "d_lower": d_lower,
        "d_upper": d_upper,
        "p_lower": p_lower,
        "p_upper": p_upper,
        "q_prime_lower": q_prime_lower,
        "q_prime_upper": q_prime_upper,
        "accepted_lower": region.contains(q_prime_lower, p_lower, predictions),
    }
    arrays = {name: value.numpy() for name, value in fields.items()}
    at = membership([regions(a) for a in ALPHA_GRID], arrays["q_prime"], arrays["p"], arrays["prediction"])
    return Scores(**arrays, highest_alpha=highest_alpha(at))


def _train_cdf(support: SupportSet, n_classes: int, whitened: SupportSet | None = None) -> DistanceCDF:
    """The eCDF of the support points, each compared with all others but not with itself."""
    own = torch.arange(len(support), device=support.labels.device)
    match = support.query(support.vectors, support.predictions, exclude=own)
    distance = match.d_nearest
    if whitened is not None:
        known, others = support.labels >= 0, torch.arange(len(whitened), device=distance.device)
        pair = whitened.nearest_by_class(whitened.vectors, support.predictions[known], exclude=others)
        distance = torch.full_like(distance, torch.inf)
        distance[known] = relative_distance(*pair)
    return DistanceCDF.fit(distance, support.labels, match.q, n_classes)


def _on_cpu(match: SupportMatch) -> SupportMatch:
    return SupportMatch(match.q.cpu(), match.d_nearest.cpu(), match.nearest.cpu())
