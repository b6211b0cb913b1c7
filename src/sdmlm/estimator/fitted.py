"""The part of a fitted estimator that holds its layers: their properties, the device, and the support."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sdmlm.estimator import persistence
from sdmlm.estimator.acceptance import CertifiedRule, Evidence
from sdmlm.estimator.adaptor import MakeSupport
from sdmlm.estimator.average import AveragedLayers
from sdmlm.estimator.explain import Exemplar, exemplars_of
from sdmlm.estimator.layer import Points, SDMLayer
from sdmlm.estimator.region import HighReliabilityRegion
from sdmlm.estimator.support import SupportSet
from sdmlm.estimator.validation import float_matrix

DocumentId = int | str


class FittedLayers:
    """The fitted layers of an estimator, the model that decides, and their public properties."""

    rule: str
    combine: str
    distance: str
    device: str | torch.device | None
    max_q: int | None
    index: str
    alpha_: float
    n_features_in_: int
    documents_: dict[DocumentId, str]

    def set_layers(self, layers: list[SDMLayer], held_out: tuple[Tensor, Tensor] | None = None) -> None:
        """Set the fitted layers, and the held-out points for the certificate."""
        self.layers_ = layers
        self._model = AveragedLayers(layers) if self.combine == "average" else layers[0]
        self.held_out_ = held_out
        self._forget_rules()

    def _forget_rules(self) -> None:
        """Drop cached certified rules and held-out scores; they are no longer valid after a change of the support."""
        self._rules: dict[float, CertifiedRule] = {}
        self._held_out_evidence: Evidence | None = None

    def _extend(self, x: Tensor, labels: Tensor, ids: list[Any]) -> None:
        """Add points to the support of every layer that takes part in decisions."""
        labels = labels.to(x.device)
        if self.combine == "all":
            for layer in self.layers_:
                layer.add(x, labels, ids)
        else:
            self._model.add(x, labels, ids)
        self._forget_rules()

    def _check_fitted(self) -> None:
        if not hasattr(self, "layers_"):
            raise ValueError("This SDMEstimator is not fitted yet: call fit, or load one with from_pretrained.")

    def _check_single(self, method: str) -> None:
        self._check_fitted()
        if len(self.layers_) > 1:
            raise ValueError(f"{method} works on a single model: fit with combine='best'.")

    def torch_device(self) -> torch.device:
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return torch.device("cpu") if device.type == "mps" else device  # mps has no double precision

    def make_support(self) -> MakeSupport:
        if self.index == "faiss":
            from sdmlm.estimator.support_faiss import FaissSupportSet  # an optional dependency

            return partial(FaissSupportSet, max_q=self.max_q)
        return partial(SupportSet, max_q=self.max_q)

    def matrix(self, values: Any, name: str, width: int | None = None, allow_empty: bool = False) -> Tensor:
        """A finite float32 matrix on the device."""
        return float_matrix(values, name, self.torch_device(), width, allow_empty)

    def settings(self) -> dict[str, Any]:
        """The settings that the fit used, given or chosen automatically."""
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

    def digest(self) -> str:
        """A hash of everything that decisions depend on, except alpha: weights, support, calibration points."""
        self._check_fitted()
        return persistence.digest(self)
