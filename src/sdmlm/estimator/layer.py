"""One fitted SDM layer: adaptor, support set, eCDFs and the calibration points that decide its region."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
    effective_sample_size,
    find_region,
    membership,
)
from sdmlm.estimator.scores import Scores
from sdmlm.estimator.support import SupportMatch, SupportSet

# Where `highest_alpha` looks: every hundredth, and finer towards 1.
ALPHA_GRID: tuple[float, ...] = (*(round(0.51 + 0.01 * i, 2) for i in range(49)), 0.995, 0.999, 1.0)

# How much a distance may differ with the batch that h' was computed in, as a share of |h'|: some units of float32.
_FLOAT_NOISE = 2e-6
_MOST_REGIONS = 256  # remembered: a server is asked for any alpha


@dataclass(frozen=True)
class Points:
    """Outputs of the method for N points: everything Algorithm 1 and the report look at. Tensors on the CPU."""

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


def activate(z: Tensor, q: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """(SDM(z'), q') of points with these z', q and d."""
    p = sdm(z, q, d)
    return p, rescaled_similarity(q, p.gather(1, z.argmax(dim=1, keepdim=True)).squeeze(1))


def highest_alpha(accepted_at: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The highest alpha of ALPHA_GRID at which each point is accepted, NaN for none; from a column for each alpha."""
    highest = np.where(accepted_at, np.asarray(ALPHA_GRID), 0.0).max(axis=1)
    return np.where(accepted_at.any(axis=1), highest, np.nan)


class SDMLayer:
    """Scores points with a trained adaptor. `support_ids` and `calibration_ids` name the documents of the two splits."""

    def __init__(
        self,
        adaptor: ExemplarAdaptor,
        support: SupportSet,
        train_cdf: DistanceCDF,
        calibration_vectors: Tensor,
        calibration_z: Tensor,
        calibration_labels: Tensor,
        support_ids: list[Any],
        calibration_ids: list[Any],
        loss: float,
        history: list[dict[str, float]],
    ) -> None:
        self.adaptor, self.support, self.train_cdf = adaptor, support, train_cdf
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
    ) -> SDMLayer:
        """Embed both splits, each given as (x, labels, ids), with a trained adaptor."""
        (x, y, ids), (x_ca, y_ca, ids_ca) = train, calibration
        vectors, z = adaptor(x)
        predictions = z.argmax(dim=1)
        support = make_support(vectors, y, predictions)
        # Points of the training split ignore their own entry, and have an eCDF of their own (docs/method.md, 3.2).
        train_cdf = _train_cdf(support, n_classes)
        vectors_ca, z_ca = adaptor(x_ca)
        return cls(adaptor, support, train_cdf, vectors_ca, z_ca, y_ca, ids, ids_ca, loss, history)

    @property
    def n_classes(self) -> int:
        return int(self._z_ca.shape[1])

    def calibrate(self) -> None:
        """q, d, SDM output and q' of the calibration points against the support as it is now."""
        found = _on_cpu(self.support.query(self.calibration_vectors, self._z_ca.argmax(dim=1)))
        self.cdf = DistanceCDF.fit(found.d_nearest, self._y_ca, found.q, self.n_classes)
        d = self.cdf.quantile(found.d_nearest)
        p, q_prime = activate(self._z_ca, found.q, d)
        self.calibration = Points(self._y_ca, self._z_ca, found.q, found.d_nearest, d, p, q_prime)
        self._regions: dict[float, HighReliabilityRegion] = {}

    def region(self, alpha: float) -> HighReliabilityRegion:
        """Algorithm 1 at alpha, remembered until the support changes."""
        if alpha not in self._regions:
            if len(self._regions) >= _MOST_REGIONS:
                self._regions.clear()
            ca = self.calibration
            self._regions[alpha] = find_region(ca.q_prime, ca.p, ca.labels, alpha)
        return self._regions[alpha]

    def _signals(self, x: Tensor, exclude: Tensor | None) -> tuple[Tensor, SupportMatch, Tensor]:
        """z', what the support says, and d, on the CPU."""
        vectors, z = self.adaptor(x)
        z = z.cpu()
        found = _on_cpu(self.support.query(vectors, z.argmax(dim=1), exclude))
        noise = _FLOAT_NOISE * vectors.norm(dim=1).double().cpu()

        def quantile(cdf: DistanceCDF) -> Tensor:
            d: Tensor = cdf.quantile(cdf.snapped(found.d_nearest, noise))
            return d

        d = quantile(self.cdf)
        if exclude is not None:
            d = torch.where(exclude.cpu() >= 0, quantile(self.train_cdf), d)
        return z, found, d

    def output(self, x: Tensor, exclude: Tensor | None = None) -> Tensor:
        """SDM(z') of raw vectors, (N, C) on the CPU: what a training step needs, without the rest of `score`."""
        z, found, d = self._signals(x, exclude)
        return sdm(z, found.q, d)

    def score(
        self,
        x: Tensor,
        alpha: float,
        exclude: Tensor | None = None,
        regions: Callable[[float], HighReliabilityRegion] | None = None,
    ) -> Scores:
        """Scores of raw vectors (N, D). A point with exclude >= 0 is one of the training split: its d is by that eCDF.

        `regions` gives the region at an alpha, where it is not to be the layer's own.
        """
        regions = regions or self.region
        z, found, d = self._signals(x, exclude)
        predictions = z.argmax(dim=1)
        p, q_prime = activate(z, found.q, d)
        ca = self.calibration
        eps = dkw_epsilon(effective_sample_size(q_prime, ca.q_prime, ca.labels, self.n_classes), alpha)
        d_lower, d_upper = (d - eps).clamp(min=0.0), (d + eps).clamp(max=1.0)
        p_lower, q_prime_lower = activate(z, found.q, d_lower)
        p_upper, q_prime_upper = activate(z, found.q, d_upper)
        region = regions(alpha)
        fields = {
            "prediction": predictions,
            "p": p,
            "q": found.q,
            "d": d,
            "d_nearest": found.d_nearest,
            "nearest": found.nearest,
            "z": z,
            "q_prime": q_prime,
            "accepted": region.contains(q_prime, p, predictions),
            "out_of_distribution": found.q == 0,
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

    def accepted_at(self, q_prime: Any, p: Any, predictions: Any, alphas: Iterable[float]) -> NDArray[np.bool_]:
        """Membership at each of several alphas, (N, number of alphas)."""
        return membership([self.region(alpha) for alpha in alphas], q_prime, p, predictions)

    def add(self, x: Tensor, labels: Tensor, ids: list[Any]) -> None:
        """Labelled points join the support; weights and predictions stay, q and d change, so the region is found anew."""
        vectors, z = self.adaptor(x)
        self.support.add(vectors, labels, z.argmax(dim=1))
        self.train_cdf = _train_cdf(self.support, self.n_classes)
        self.support_ids = [*self.support_ids, *ids]
        self.calibrate()


def _train_cdf(support: SupportSet, n_classes: int) -> DistanceCDF:
    """The eCDF of the support's own points, each ignoring its entry."""
    own = torch.arange(len(support), device=support.labels.device)
    found = support.query(support.vectors, support.predictions, exclude=own)
    return DistanceCDF.fit(found.d_nearest, support.labels, found.q, n_classes)


def _on_cpu(found: SupportMatch) -> SupportMatch:
    return SupportMatch(found.q.cpu(), found.d_nearest.cpu(), found.nearest.cpu())
