"""How usual the likelihood of an answer is among a language model's own answers (docs/method.md, 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.covariance import LedoitWolf

from sdmlm.language_model.likelihood import FIGURES
from sdmlm.language_model.reduction import LOGARITHMS

_MOST_REFERENCE = 2000
_NOISE = 1e-3  # relative; two passes of the LM over a known answer differ by less, so both get the same rank
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class UsualLikelihood:
    """How usual the likelihood figures of an answer are, among the LM's own answers (a Mahalanobis distance)."""

    mean: tuple[float, ...]
    precision: tuple[tuple[float, ...], ...]
    reference: tuple[float, ...]  # distances of known answers, ascending
    reduced: bool = False  # whether it is given reduced summaries, in which log-probabilities are logarithms

    @classmethod
    def fit(cls, h: NDArray[Any], reduced: bool = False) -> UsualLikelihood:
        """Fit on the summaries of own answers, whole or `reduced`."""
        figures = _figures(h, reduced)
        scale = (
            figures.std(axis=0) + 1e-9
        )  # one scale first, or shrinkage would favour the figure with the largest numbers
        precision = LedoitWolf().fit(figures / scale).precision_ / np.outer(scale, scale)
        mean = figures.mean(axis=0)
        distances = np.sort(_distances(figures, mean, precision))
        if len(distances) > _MOST_REFERENCE:
            distances = np.quantile(distances, np.linspace(0, 1, _MOST_REFERENCE))
        return cls(tuple(mean.tolist()), tuple(map(tuple, precision.tolist())), tuple(distances.tolist()), reduced)

    def d(self, h: NDArray[Any]) -> Floats:
        """The share of known answers that are less usual, in [0, 1]; 0 is unlike all of them."""
        distances = _distances(_figures(h, self.reduced), np.array(self.mean), np.array(self.precision))
        rank = np.searchsorted(np.array(self.reference), distances * (1 - _NOISE), "left")
        return np.asarray(1 - rank / len(self.reference))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> UsualLikelihood:
        """What `dataclasses.asdict` gave, also after JSON."""
        precision = tuple(tuple(row) for row in values["precision"])
        return cls(tuple(values["mean"]), precision, tuple(values["reference"]), bool(values.get("reduced", False)))


def _figures(h: NDArray[Any], reduced: bool) -> Floats:
    figures = np.array(h, dtype=np.float64)[:, -len(FIGURES) :]
    if reduced:  # distances of plain log-probabilities reject more answers of another kind (docs/method.md, 9)
        figures[:, LOGARITHMS] = -np.exp(-figures[:, LOGARITHMS])
    return figures


def _distances(figures: Floats, mean: Floats, precision: Floats) -> Floats:
    centred = figures - mean
    return np.asarray(np.sqrt(np.maximum(np.einsum("ni,ij,nj->n", centred, precision, centred), 0)))
