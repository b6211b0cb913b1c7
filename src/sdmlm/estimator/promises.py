"""The promises of an estimator: certified rules from its own held-out points, or from fresh ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sdmlm.estimator.acceptance import CertifiedRule, Evidence, Promise, certify_rule
from sdmlm.estimator.certify import Certificate, certify_region, threshold_grid
from sdmlm.estimator.fitted import FittedLayers
from sdmlm.estimator.layer import confidence_of
from sdmlm.estimator.support import SupportSet
from sdmlm.estimator.validation import check_lengths, encode_labels

_MOST_RULES = 256  # cache size: clients of a server may ask for any alpha


class Promises(FittedLayers):
    """An estimator that certifies what it accepts (`sdmlm.estimator.acceptance`)."""

    promise: Promise
    delta: float
    epsilon: float
    classes_: NDArray[Any]

    @property
    def certificate_(self) -> CertifiedRule:
        """The certified rule at `alpha_`."""
        return self.certified_rule(self.alpha_)

    def certified_rule(self, alpha: float) -> CertifiedRule:
        """The certified rule at any alpha, from the held-out points; cached until the support changes."""
        self._check_fitted()
        if self.held_out_ is None:
            raise ValueError("No points were held out for a certificate: give fresh ones to certify.")
        if alpha not in self._rules:
            if len(self._rules) >= _MOST_RULES:
                self._rules.clear()
            if self._held_out_evidence is None:
                self._held_out_evidence = self._evidence(*self.held_out_)
            fresh = self._held_out_evidence
            self._rules[alpha] = self._certified(fresh, alpha, self.delta, self.promise, self.epsilon, None)
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
        """A rule with a promise, from labelled points that were not used for fitting (`sdmlm.estimator.acceptance`).

        `classes`: the predicted classes that may be accepted, as indices (default: all). With rule "region", the region
        gets a higher q'min, so that the promise holds for each predicted class (`sdmlm.estimator.certify`).
        """
        if self.combine == "all":
            self._check_single("certify")
        self._check_fitted()
        x, labels = self.matrix(X, "X", self.n_features_in_), encode_labels(y, self.classes_)
        check_lengths("X", len(x), "y", len(labels))
        if (known := self.share_fitted(X)) > 0.25:
            raise ValueError(
                f"{known:.0%} of these points were fitted over (in the support or the calibration half): a certificate needs "
                "points that were not used for fitting."
            )
        delta = self.delta if delta is None else delta
        if self.rule == "certified":
            rest = (promise or self.promise, self.epsilon if epsilon is None else epsilon, classes)
            rule = self._certified(self._evidence(x, labels), self.alpha_, delta, *rest)
            return replace(rule, estimator=self.digest())
        scores = self._model.score(x, self.alpha_)
        grid = threshold_grid(self.region_, self.calibration_.q_prime.numpy())
        certificate = certify_region(
            self.region_, grid, scores.q_prime, scores.p, scores.prediction, labels.numpy(), delta, classes
        )
        return replace(certificate, estimator=self.digest())

    def _evidence(self, x: Tensor, labels: Tensor) -> Evidence:
        """The evidence of new labelled points."""
        scores = self._model.score(x, self.alpha_)
        return Evidence(scores.confidence, scores.d, scores.prediction, labels.cpu().numpy())

    def _certified(
        self,
        fresh: Evidence,
        alpha: float,
        delta: float,
        promise: Promise,
        epsilon: float,
        classes: Sequence[int] | None,
    ) -> CertifiedRule:
        settings: dict[str, Any] = {"alpha": alpha, "delta": delta, "promise": promise, "epsilon": epsilon}
        return certify_rule(self.calibration_evidence(), fresh, len(self.classes_), **settings, classes=classes)

    def calibration_evidence(self) -> Evidence:
        """The out-of-sample evidence of the calibration points."""
        ca = self.calibration_
        return Evidence(confidence_of(ca.z, ca.q).numpy(), ca.d.numpy(), ca.predictions.numpy(), ca.labels.numpy())

    def share_fitted(self, X: ArrayLike | Tensor) -> float:
        """The share of these points that were fitted over: they are in the support or among the calibration points."""
        self._check_fitted()
        layer, ca = self.layers_[0], self.layers_[0].calibration
        vectors, _ = layer.adaptor(self.matrix(X, "X", self.n_features_in_))
        held = SupportSet(layer.calibration_vectors, ca.labels, ca.predictions)
        nearest = torch.minimum(layer.support.neighbors(vectors, 1)[0], held.neighbors(vectors, 1)[0])
        same = 1e-5 * float(layer.support.vectors.norm(dim=1).mean())
        return float((nearest <= same).double().mean())
