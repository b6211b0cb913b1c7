"""Several SDM layers whose signals are averaged before Algorithm 1 (docs/method.md, 3.4).

A run of q agreeing neighbours ends at the first that does not agree. If a share rho does not agree, q is about a geometric random
number with mean 1 / rho: one layer gives a noisy estimate of local accuracy, and its region depends on chance. So the points
are partitioned at random several times (in halves, or in five folds where they are few). For each fold a layer is fitted
on the other points. Every point is out of sample in one layer of each partition, and log(1 + q), d and z' are averaged over
those. In whitened h, the eCDFs for d hold the points of all folds of a partition. A new point is scored by the first layer of each partition: by as many layers as a calibration point was, so that
the two are exchangeable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdmlm.estimator.activation import sdm
from sdmlm.estimator.layer import Points, Regions, SDMLayer, points_of, scores_of
from sdmlm.estimator.region import DistanceCDF, HighReliabilityRegion
from sdmlm.estimator.scores import Scores
from sdmlm.estimator.support import SupportMatch


class AveragedLayers(Regions):
    """Cross-fitted layers, scored as one: all folds of a partition, then those of the next.

    `calibration_ids` are all points, in a fixed order.
    """

    def __init__(self, layers: Sequence[SDMLayer]) -> None:
        self.layers = list(layers)
        self.calibrate()

    def calibrate(self) -> None:
        """Average the calibration points of all layers, and drop cached regions."""
        where: dict[Any, int] = {}
        self.folds = 0
        for layer in self.layers:  # the first partition ends where its points repeat
            if layer.calibration_ids[0] in where:
                break
            where.update({name: len(where) + i for i, name in enumerate(layer.calibration_ids)})
            self.folds += 1
        self.calibration_ids: list[Any] = list(where)
        n, n_classes = len(where), self.layers[0].n_classes
        logs, d, nearest = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
        z, labels = torch.zeros(n, n_classes, dtype=torch.float64), torch.zeros(n, dtype=torch.long)
        repeats = len(self.layers) // self.folds
        self._cdfs = [self._pooled(self.layers[i : i + self.folds]) for i in range(0, len(self.layers), self.folds)]
        self._unseen_by = torch.zeros(
            repeats, n, dtype=torch.long
        )  # by partition and point: the layer not fitted on it
        for i, layer in enumerate(self.layers):
            at = torch.tensor([where[name] for name in layer.calibration_ids])
            self._unseen_by[i // self.folds, at] = i
            ca = layer.calibration
            logs[at] += torch.log1p(ca.q.double()) / repeats
            cdf = self._cdfs[i // self.folds] or layer.cdf
            d[at] += layer.calibration_d(cdf, ca.predictions, ca.q).double() / repeats
            nearest[at] += ca.d_nearest.double() / repeats
            z[at] += ca.z.double() / repeats
            labels[at] = ca.labels
        self.calibration: Points = points_of(labels, z, torch.expm1(logs), nearest, d)
        self._regions: dict[float, HighReliabilityRegion] = {}

    @staticmethod
    def _pooled(layers: Sequence[SDMLayer]) -> DistanceCDF | None:
        """One eCDF over all folds of a partition, so over all points of a class; None where each layer has its own.

        Whitened distances are alike in all folds. Between exemplar vectors, each layer has a scale of its own.
        """
        if layers[0].whitening is None:
            return None
        return DistanceCDF([np.concatenate(values) for values in zip(*(x.cdf.values for x in layers), strict=True)])

    def score(
        self,
        x: Tensor,
        alpha: float,
        exclude: Tensor | None = None,
        regions: Callable[[float], HighReliabilityRegion] | None = None,
    ) -> Scores:
        """Scores of raw vectors (N, D) by the first layer of each partition.

        `exclude` (N,): the index in `document_ids` of a known point, -1 for others. A point that was fitted over is scored
        by the layers that were not fitted on it, as when the layers were calibrated. One that joined the supports later
        ignores its own entry.
        """
        z, match, d = self._signals(x, exclude)
        return scores_of(z, match, d, self.calibration, alpha, regions or self.region)

    def output(self, x: Tensor, exclude: Tensor | None = None) -> Tensor:
        """SDM(z') of raw vectors, (N, C)."""
        z, match, d = self._signals(x, exclude)
        return sdm(z, match.q, d)

    @property
    def _joined(self) -> int:
        """How many points joined the supports after fitting."""
        return len(self.layers[0].support_ids) + len(self.layers[0].calibration_ids) - len(self.calibration_ids)

    @property
    def document_ids(self) -> list[Any]:
        """The ids of all known points: those fitted over, then those that joined the supports later."""
        ids = self.layers[0].support_ids
        return [*self.calibration_ids, *ids[len(ids) - self._joined :]]

    def _signals(self, x: Tensor, exclude: Tensor | None) -> tuple[Tensor, SupportMatch, Tensor]:
        """z', the match with the supports and d, averaged over one layer of each partition."""
        repeats, n_fitted = len(self.layers) // self.folds, len(self.calibration_ids)
        logs, d, nearest = (torch.zeros(len(x), dtype=torch.float64) for _ in range(3))
        z = torch.zeros(len(x), self.layers[0].n_classes, dtype=torch.float64)
        at = torch.full((len(x),), -1)
        known = None if exclude is None else exclude.cpu().long()
        if (
            known is not None
            and len(known)
            and not -1 <= int(known.min()) <= int(known.max()) < n_fitted + self._joined
        ):
            raise ValueError(f"exclude holds indices outside -1..{n_fitted + self._joined - 1}: see support_index.")
        for repeat in range(repeats):
            for i, rows in self._scored_by(repeat, known):
                layer, own = self.layers[i], None
                if known is not None:
                    entry = known[rows] - n_fitted + len(layer.support_ids) - self._joined
                    own = torch.where(known[rows] >= n_fitted, entry, -1).to(x.device)
                z_layer, match, d_layer = layer.signals(x[rows], own, self._cdfs[repeat] or layer.cdf)
                logs[rows] += torch.log1p(match.q.double()) / repeats
                d[rows] += d_layer.double() / repeats
                nearest[rows] += match.d_nearest.double() / repeats
                z[rows] += z_layer.double() / repeats
                if i == 0:  # `nearest` is an index in the support of the first layer
                    at[rows] = match.nearest
        return z, SupportMatch(torch.expm1(logs), nearest, at), d

    def _scored_by(self, repeat: int, known: Tensor | None) -> Iterator[tuple[int, slice | Tensor]]:
        """The layers of a partition that score points (`exclude`, or None), each with the rows of its points."""
        first = repeat * self.folds
        if known is None:
            yield first, slice(None)
            return
        fitted = (known >= 0) & (known < len(self.calibration_ids))
        by = torch.full((len(known),), first)
        by[fitted] = self._unseen_by[repeat, known[fitted]]
        for i in by.unique().tolist():
            yield i, by == i

    def add(self, x: Tensor, labels: Tensor, ids: list[Any]) -> None:
        """Add labelled points to the support of every layer."""
        for layer in self.layers:
            layer.add(x, labels, ids)
        self.calibrate()
