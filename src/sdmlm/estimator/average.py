"""Several SDM layers that agree: their signals are averaged before Algorithm 1 (docs/method.md, 3.4).

A run of q agreeing neighbours ends at the first bad one. With a share rho of bad neighbours it is a geometric draw of mean 1 /
rho, so one layer gives a noisy estimate of local accuracy, and the region that follows from it is partly luck. So the points
are partitioned at random several times (in halves, or in five folds where they are few). For each fold a layer is fitted
on the other points. Every point is out of sample in one layer of each partition, and log(1 + q), d and z' are averaged over
those. A new point is scored by the first layer of each partition: by as many layers as a calibration point was, so that
the two are exchangeable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sdmlm.estimator.layer import Points, Regions, SDMLayer, points_of, scores_of
from sdmlm.estimator.region import HighReliabilityRegion
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
        """Average the calibration points of all layers, and forget the regions found before."""
        where: dict[Any, int] = {}
        self.folds = 0
        for layer in self.layers:  # the first partition ends where points come again
            if layer.calibration_ids[0] in where:
                break
            where.update({name: len(where) + i for i, name in enumerate(layer.calibration_ids)})
            self.folds += 1
        self.calibration_ids: list[Any] = list(where)
        n, n_classes = len(where), self.layers[0].n_classes
        logs, d, nearest = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
        z, labels = torch.zeros(n, n_classes, dtype=torch.float64), torch.zeros(n, dtype=torch.long)
        repeats = len(self.layers) // self.folds
        for layer in self.layers:
            at = torch.tensor([where[name] for name in layer.calibration_ids])
            ca = layer.calibration
            logs[at] += torch.log1p(ca.q.double()) / repeats
            d[at] += ca.d.double() / repeats
            nearest[at] += ca.d_nearest.double() / repeats
            z[at] += ca.z.double() / repeats
            labels[at] = ca.labels
        self.calibration: Points = points_of(labels, z, torch.expm1(logs), nearest, d)
        self._regions: dict[float, HighReliabilityRegion] = {}

    def score(
        self,
        x: Tensor,
        alpha: float,
        exclude: Tensor | None = None,
        regions: Callable[[float], HighReliabilityRegion] | None = None,
    ) -> Scores:
        """Scores of raw vectors (N, D) by the first layer of each partition."""
        if exclude is not None:
            raise ValueError("exclude does not go with averaged layers: every layer has a support of its own.")
        used = self.layers[:: self.folds]
        n_classes = used[0].n_classes
        logs, d, nearest = (torch.zeros(len(x), dtype=torch.float64) for _ in range(3))
        z = torch.zeros(len(x), n_classes, dtype=torch.float64)
        at = torch.full((len(x),), -1)
        for i, layer in enumerate(used):
            z_layer, match, d_layer = layer.signals(x, None)
            logs += torch.log1p(match.q.double()) / len(used)
            d += d_layer.double() / len(used)
            nearest += match.d_nearest.double() / len(used)
            z += z_layer.double() / len(used)
            at = match.nearest if i == 0 else at
        match = SupportMatch(torch.expm1(logs), nearest, at)
        return scores_of(z, match, d, self.calibration, alpha, regions or self.region)

    def add(self, x: Tensor, labels: Tensor, ids: list[Any]) -> None:
        """Labelled points join the support of every layer."""
        for layer in self.layers:
            layer.add(x, labels, ids)
        self.calibrate()
