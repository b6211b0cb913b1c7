"""The part of an estimator that scores points: scores, decisions, explanations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sdmlm.estimator.explain import Explanation, explain_points
from sdmlm.estimator.fitted import DocumentId
from sdmlm.estimator.label_errors import LabelError, suspected_label_errors
from sdmlm.estimator.layer import ALPHA_GRID, highest_alpha
from sdmlm.estimator.promises import Promises
from sdmlm.estimator.region import HighReliabilityRegion, check_alpha
from sdmlm.estimator.scores import Scores
from sdmlm.estimator.validation import check_lengths, label_tensor, plain_id


class Scoring(Promises):
    """An estimator that scores points and explains its decisions."""

    class_names_: list[str] | None

    def score(
        self,
        X: ArrayLike | Tensor,
        exclude: ArrayLike | Tensor | None = None,
        *,
        alpha: float | None = None,
        regions: Callable[[float], HighReliabilityRegion] | None = None,
    ) -> Scores:
        """Prediction, the three signals, their bounds and the decision for each row of X.

        `exclude` (N,): for points that are known themselves, their index by `support_index`; -1 for others. A single layer
        ignores that entry of its support, and takes d from the eCDF of the training split. With averaged layers, a point is
        scored by the layers that were not fitted on it.

        `alpha`: another alpha than the estimator's, for this call. `regions` gives the region that decides at an alpha, if
        that is not the estimator's own (`region`).
        """
        self._check_fitted()
        alpha = self.alpha_ if alpha is None else check_alpha(alpha)
        x = self.matrix(X, "X", self.n_features_in_, allow_empty=True)
        own = None if exclude is None else label_tensor(exclude, "exclude")
        if own is not None:
            if self.combine == "all":
                self._check_single("score with exclude")  # every round has a support of its own
            check_lengths("X", len(x), "exclude", len(own))
        if regions is not None and self.combine == "all":
            self._check_single("score with regions")
        scores = self._model.score(x, alpha, own, regions)
        if self.combine == "all":
            scores = self._agreed(scores, x, alpha)
        if self.rule == "certified":
            return replace(scores, accepted=self.certified_rule(alpha).accepts(scores))
        return replace(scores, accepted=scores.accepted_lower) if self.rule == "region lower" else scores

    def _agreed(self, scores: Scores, x: Tensor, alpha: float) -> Scores:
        """Scores of an ensemble, which accepts what all layers accept as the same class."""
        accepted, accepted_lower = scores.accepted, scores.accepted_lower
        at = self.layers_[0].accepted_at(scores.q_prime, scores.p, scores.prediction, ALPHA_GRID)
        for layer in self.layers_[1:]:
            other = layer.score(x, alpha)
            agree = other.prediction == scores.prediction
            accepted = accepted & other.accepted & agree
            accepted_lower = accepted_lower & other.accepted_lower & agree
            at &= layer.accepted_at(other.q_prime, other.p, other.prediction, ALPHA_GRID) & agree[:, None]
        highest = highest_alpha(at)
        return replace(
            scores, accepted=accepted, in_region=accepted, accepted_lower=accepted_lower, highest_alpha=highest
        )

    def predict(self, X: ArrayLike | Tensor) -> NDArray[Any]:
        """The predicted label of each row, accepted or not."""
        labels: NDArray[Any] = self.classes_[self.score(X).prediction]
        return labels

    def output(self, X: Tensor, exclude: Tensor | None = None) -> Tensor:
        """SDM(z') of each row, (N, C) on the CPU: for training steps, which do not need the rest of `score`.

        X is a float32 tensor and is not checked, because this runs in every step of fine-tuning. `exclude` as in `score`.
        """
        if self.combine == "all":
            self._check_single("output")
        self._check_fitted()
        return self._model.output(X.to(self.layers_[0].adaptor.weight.device), exclude)

    def support_index(self, ids: Sequence[DocumentId]) -> NDArray[np.int64]:
        """The index of each document id for `exclude`, -1 if it is not known."""
        self._check_fitted()
        where = {name: i for i, name in enumerate(self._model.document_ids)}
        return np.array([where.get(plain_id(name), -1) for name in ids], dtype=np.int64)

    def accepted_at(self, scores: Scores, alphas: Iterable[float]) -> NDArray[np.bool_]:
        """Which points are accepted at each of several alphas, (N, number of alphas)."""
        if self.combine == "all":
            self._check_single("accepted_at")
        self._check_fitted()
        wanted = [check_alpha(a) for a in alphas]
        if self.rule == "certified":
            return np.stack([self.certified_rule(a).accepts(scores) for a in wanted], axis=1)
        return self._model.accepted_at(scores.q_prime, scores.p, scores.prediction, wanted)

    def explain(self, X: ArrayLike | Tensor, k: int = 5) -> list[Explanation]:
        """For each row: the decision in a sentence, the k nearest support documents, and calibration peers."""
        self._check_fitted()
        if k < 1:
            raise ValueError(f"k is {k} but must be at least 1.")
        x = self.matrix(X, "X", self.n_features_in_)
        rule = self.certificate_ if self.rule == "certified" else None
        return explain_points(
            self.layers_[0], self._model, x, self.score(X), self.alpha_, self.documents_, k, self.class_names_, rule
        )

    def label_errors(self, most: int = 20) -> list[LabelError]:
        """Known points that are confidently predicted as another class than their label, the most suspicious first."""
        self._check_fitted()
        return suspected_label_errors(self.calibration_, self.calibration_ids_, self.documents_, most)
