"""The rivals over embeddings: scores against plain formulas, thresholds against their definition."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.covariance import LedoitWolf

from sdmlm.evaluation.embedding_baselines import KNNDistance, Mahalanobis, embedding_baselines, fit_logistic


def points(n: int, seed: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    X = rng.normal(size=(n, 6)) + shift
    X[np.arange(n), y] += 2.0
    return X.astype(np.float32), y


TRAIN, CALIBRATION, TEST = points(300, 0), points(300, 1), points(400, 2)


@pytest.mark.parametrize("name", list(embedding_baselines(TRAIN, 0.9)))
def test_threshold_is_the_lowest_that_reaches_alpha_on_calibration_points(name: str) -> None:
    rival = embedding_baselines(TRAIN, 0.9)[name].fit(*CALIBRATION)
    if name in ("temperature", "Platt", "isotonic"):
        assert rival.threshold_ == 0.9
        return
    predictions, accepted = rival.accept(CALIBRATION[0])
    scores, right = rival.score(CALIBRATION[0]), predictions == CALIBRATION[1]
    assert (accepted == (scores >= rival.threshold_)).all()
    if accepted.any():
        assert right[accepted].mean() >= 0.9
    looser = [t for t in np.unique(scores) if t < rival.threshold_]
    assert all(right[scores >= t].mean() < 0.9 for t in looser)
    predictions, accepted = rival.accept(TEST[0])
    assert (predictions == fit_logistic(TRAIN).predict(TEST[0].astype(float))).all()
    assert np.isfinite(rival.score(TEST[0])).all()


def test_probabilities_rank_right_above_wrong_and_distances_see_a_shift() -> None:
    from sdmlm.evaluation.metrics import auroc, shift_auroc

    far = points(400, 3, shift=4.0)
    for name, rival in embedding_baselines(TRAIN, 0.9).items():
        rival.fit(*CALIBRATION)
        if name in ("logistic regression", "temperature", "Platt", "isotonic"):
            assert auroc(rival.score(TEST[0]), rival.accept(TEST[0])[0] == TEST[1]) > 0.7
        elif name != "relative Mahalanobis":
            assert shift_auroc(rival.score(TEST[0]), rival.score(far[0])) > (0.5 if name == "k-NN distance" else 0.95)


def test_distances_agree_with_plain_formulas() -> None:
    model = fit_logistic(TRAIN)
    X, y = TRAIN[0].astype(float), TRAIN[1]
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    query = TEST[0][:5].astype(float)
    expected = [-np.sort(np.linalg.norm(unit - q / np.linalg.norm(q), axis=1))[9] for q in query]
    assert KNNDistance(model, TRAIN).score(query) == pytest.approx(expected)
    means = [X[y == c].mean(axis=0) for c in range(3)]
    centred = np.array([x - means[c] for x, c in zip(X, y, strict=True)])
    precision = np.linalg.inv(LedoitWolf(assume_centered=True).fit(centred).covariance_)
    slow = [-min((q - m) @ precision @ (q - m) for m in means) for q in query]
    assert Mahalanobis(model, TRAIN).score(query) == pytest.approx(slow)
    whole = LedoitWolf().fit(X)
    background = [(q - X.mean(axis=0)) @ np.linalg.inv(whole.covariance_) @ (q - X.mean(axis=0)) for q in query]
    relative = embedding_baselines(TRAIN, 0.9)["relative Mahalanobis"].score(query)
    assert relative == pytest.approx(np.array(slow) + background)


def test_use_before_fit_is_named() -> None:
    with pytest.raises(ValueError, match="KNNDistance is not fitted yet"):
        embedding_baselines(TRAIN, 0.9)["k-NN distance"].accept(TEST[0])


def test_calibrated_probabilities_say_how_often_the_prediction_is_right() -> None:
    from sdmlm.evaluation.metrics import expected_calibration_error

    for name in ("temperature", "Platt", "isotonic"):
        rival = embedding_baselines(TRAIN, 0.9)[name].fit(*CALIBRATION)
        predictions, accepted = rival.accept(TEST[0])
        p = rival.score(TEST[0])
        assert expected_calibration_error(p, predictions == TEST[1]) < 0.09
        assert (accepted == (p >= 0.9)).all()


def test_calibration_without_an_error_or_with_few_classes_works() -> None:
    easy = CALIBRATION[1] != 2
    for name, rival in embedding_baselines(TRAIN, 0.9).items():
        right = fit_logistic(TRAIN).predict(CALIBRATION[0].astype(float)) == CALIBRATION[1]
        rival.fit(CALIBRATION[0][easy & right], CALIBRATION[1][easy & right])
        assert np.isfinite(rival.score(TEST[0])).all(), name
        assert rival.accept(TEST[0])[1].any()
