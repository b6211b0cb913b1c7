"""SDMClassifier: the SDM estimator as a scikit-learn classifier."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.scores import Scores


class SDMClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A scikit-learn classifier that also says which of its predictions can be accepted.

    `predict` gives a label for every point. `predict_selective` also says which of them are accepted: with probability 1 -
    delta, at least alpha of the accepted ones are right.

    Parameters
    ----------
    alpha, promise, delta, epsilon, rule, combine, distance, rounds, learning_rate, epochs, exemplar_dim, batch_size, center,
    seed, device, max_q, index, progress
        As for `SDMEstimator`.

    Attributes
    ----------
    classes_ : ndarray
        The labels, sorted; they may be of any kind.
    estimator_ : SDMEstimator
        The fitted estimator.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = SDMClassifier(alpha=0.9).fit(X, y)
    >>> labels, accepted = classifier.predict_selective(X[:3])
    >>> labels
    array([0, 0, 0])
    """

    def __init__(
        self,
        alpha: float = 0.95,
        promise: str = "overall",
        delta: float = 0.05,
        epsilon: float = 0.05,
        rule: str = "certified",
        combine: str = "average",
        distance: str = "whitened",
        rounds: int | None = None,
        learning_rate: float | None = None,
        epochs: int | None = None,
        exemplar_dim: int | None = None,
        batch_size: int = 50,
        center: str = "feature",
        seed: int = 0,
        device: Any = None,
        max_q: int | None = None,
        index: str = "exact",
        progress: bool = True,
    ) -> None:
        self.alpha = alpha
        self.promise = promise
        self.delta = delta
        self.epsilon = epsilon
        self.rule = rule
        self.combine = combine
        self.distance = distance
        self.rounds = rounds
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.exemplar_dim = exemplar_dim
        self.batch_size = batch_size
        self.center = center
        self.seed = seed
        self.device = device
        self.max_q = max_q
        self.index = index
        self.progress = progress

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> SDMClassifier:
        """Fit on vectors X (N, D) and labels y (N,) of any kind; each class needs at least two points.

        `groups` (N,): points of one group always stay on the same side of a split (`SDMEstimator.fit`).
        """
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, encoded = np.unique(y, return_inverse=True)
        names = inspect.signature(SDMEstimator.__init__).parameters
        self.estimator_ = SDMEstimator(**{name: getattr(self, name) for name in names if name != "self"})
        self.estimator_.fit(X, encoded, groups=groups)
        return self

    def scores(self, X: ArrayLike) -> Scores:
        """The scores of the estimator for X; their predictions are indices into `classes_`."""
        check_is_fitted(self)
        return self.estimator_.score(validate_data(self, X, dtype=np.float32, reset=False))

    def predict(self, X: ArrayLike, return_accepted: bool = False) -> Any:
        """The class with the largest z', for every point, accepted or not.

        With `return_accepted` the pair (labels, accepted) of `predict_selective`. A pipeline passes this on to its last
        step: `labels, accepted = pipeline.predict(X, return_accepted=True)`.
        """
        return self.predict_selective(X) if return_accepted else self._labels(self.scores(X))

    def predict_selective(self, X: ArrayLike) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """(labels, accepted): the predictions, and which of them can be accepted without a person looking."""
        scores = self.scores(X)
        return self._labels(scores), scores.accepted

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The SDM output, (N, C).

        Far from the support it is uniform. The predicted class is then larger by a rounding error, so that the largest entry
        is always the prediction, as with every scikit-learn classifier.
        """
        scores = self.scores(X)
        return _led_by(scores.p.copy(), scores.prediction, least=0.0)

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """The logits of the SDM output, d ln(2+q) z', (N, C); for two classes their difference (N,).

        They order points as `predict_proba` does, and if d = 0, the predicted class is larger by a rounding error here too.
        """
        scores = self.scores(X)
        logits = scores.z * (scores.d * np.log(2.0 + scores.q))[:, None]
        logits = _led_by(logits, scores.prediction, least=-np.inf)
        decision: NDArray[np.float64] = logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits
        return decision

    def _labels(self, scores: Scores) -> NDArray[Any]:
        labels: NDArray[Any] = self.classes_[scores.prediction]
        return labels


def _led_by(values: NDArray[np.float64], prediction: NDArray[np.int64], least: float) -> NDArray[np.float64]:
    """Where other classes have the same largest value as the prediction, lower theirs by one rounding error."""
    rows = np.arange(len(values))
    top = values[rows, prediction]
    tied = values >= top[:, None]
    tied[rows, prediction] = False
    return np.where(tied, np.nextafter(np.broadcast_to(top[:, None], values.shape), least), values)
