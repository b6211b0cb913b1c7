"""Baselines against slow versions in plain Python, and the coverage that conformal sets promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdmlm.estimator.adaptor import train_adaptor
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.evaluation.baselines import (
    APS,
    RAPS,
    DistanceSoftmax,
    LogitBaseline,
    NoReject,
    SDMRegion,
    SDMThreshold,
    SoftmaxThreshold,
    TemperatureScaling,
    cross_entropy_logits,
)

FAST = {"exemplar_dim": 16, "epochs": 40, "learning_rate": 1e-3, "rounds": 1, "progress": False}
LOGIT_BASELINES = [NoReject, SoftmaxThreshold, TemperatureScaling, APS, RAPS]


def draw(rng: np.random.Generator, n: int, n_classes: int, sharpness: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits and labels drawn from their softmax, then distorted so that the model is overconfident."""
    z = rng.normal(size=(n, n_classes)) * sharpness
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    y = (rng.random((n, 1)) > np.cumsum(p, axis=1)).sum(axis=1).clip(max=n_classes - 1)
    return 3.0 * z, y


@pytest.mark.parametrize("n_classes", [2, 5])
@pytest.mark.parametrize(("penalty", "k_reg"), [(0.0, 1), (0.1, 1), (0.3, 2)])
def test_conformal_sets_agree_with_the_definition(n_classes: int, penalty: float, k_reg: int) -> None:
    rng = np.random.default_rng(n_classes)
    for seed, (n, alpha) in enumerate([(5, 0.9), (19, 0.95), (40, 0.8), (99, 0.55), (120, 0.95), (30, 1.0)]):
        z, y = draw(rng, n, n_classes)
        z_new, _ = draw(rng, 50, n_classes)
        model = RAPS(alpha, penalty, k_reg, seed).fit(z, y)
        expected = slow.conformal_sets(z, y, z_new, alpha, penalty, k_reg, seed)
        assert [set(np.flatnonzero(row)) for row in model.sets(z_new)] == expected
        predictions, accepted = model.accept(z_new)
        assert accepted.tolist() == [len(s) == 1 for s in expected]
        assert all(expected[i] == {predictions[i]} for i in np.flatnonzero(accepted))
        if penalty == 0:
            assert (APS(alpha, seed).fit(z, y).sets(z_new) == model.sets(z_new)).all()


@pytest.mark.parametrize("make", [APS, RAPS])
@pytest.mark.parametrize("n_classes", [2, 6])
@pytest.mark.parametrize("alpha", [0.8, 0.95])
def test_marginal_coverage(make: type[RAPS], n_classes: int, alpha: float) -> None:
    """Over many draws the sets hold the truth with probability in [alpha, alpha + 1/(n+1)]: that is their promise."""
    rng = np.random.default_rng(7)
    n, repeats, points = 59, 600, 60
    covered = 0
    for seed in range(repeats):
        z, y = draw(rng, n + points, n_classes)
        sets = make(alpha, seed=seed).fit(z[:n], y[:n]).sets(z[n:])
        covered += int(sets[np.arange(points), y[n:]].sum())
    share = covered / (repeats * points)
    error = 4 * math.sqrt(alpha * (1 - alpha) * (1 / n + 1 / points) / repeats)  # four standard errors
    assert alpha - error <= share <= alpha + 1 / (n + 1) + error
    assert error < 1 / (n + 1)  # tight enough to notice a threshold that is off by one


def test_too_few_points_for_alpha_reject_everything() -> None:
    z, y = draw(np.random.default_rng(0), 18, 2)  # ceil(19 x 0.95) = 19 > 18
    assert not APS(0.95).fit(z, y).accept(z)[1].any()
    assert RAPS(0.95).fit(z, y).threshold_ == math.inf
    z, y = draw(np.random.default_rng(0), 19, 2)
    assert APS(0.95).fit(z, y).threshold_ < math.inf


def test_the_penalty_cuts_the_large_sets() -> None:
    z, y = draw(np.random.default_rng(3), 2000, 10)
    large = [int((RAPS(0.9, penalty).fit(z, y).sets(z).sum(axis=1) > 4).sum()) for penalty in (0.0, 0.01, 0.1)]
    assert large[0] > large[1] > large[2]


def test_temperature_minimises_the_nll() -> None:
    rng = np.random.default_rng(1)
    for n_classes in (2, 4):
        z, y = draw(rng, 4000, n_classes)
        temperature = TemperatureScaling().fit(z, y).temperature_

        def nll(t: float, z: np.ndarray = z, y: np.ndarray = y) -> float:
            return -sum(math.log(slow.softmax((row / t).tolist())[c]) for row, c in zip(z, y, strict=True)) / len(y)

        grid = [temperature * factor for factor in (0.9, 0.99, 1.01, 1.1)]
        assert all(nll(temperature) < nll(t) for t in grid)
        assert temperature == pytest.approx(3.0, rel=0.1)  # draw() multiplied the true logits by 3


def test_temperature_is_invariant_to_scale_and_bounded() -> None:
    z, y = draw(np.random.default_rng(2), 300, 3)
    one, ten = TemperatureScaling(0.9).fit(z, y), TemperatureScaling(0.9).fit(10 * z + 5, y)
    assert ten.temperature_ == pytest.approx(10 * one.temperature_, rel=1e-6)
    assert (one.accept(z)[1] == ten.accept(10 * z + 5)[1]).all()
    separable = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert TemperatureScaling().fit(separable, [0, 1]).temperature_ == pytest.approx(1e-4)
    assert TemperatureScaling().fit(separable, [1, 0]).temperature_ == pytest.approx(1e4)
    assert TemperatureScaling().fit(np.zeros((4, 2)), [0, 1, 0, 1]).accept(np.zeros((1, 2)))[1].tolist() == [False]


def test_thresholds_on_a_worked_example() -> None:
    z = np.log([[0.95, 0.05], [0.949, 0.051], [0.03, 0.97], [0.5, 0.5]])
    y = [0, 0, 1, 0]
    predictions, accepted = SoftmaxThreshold(0.95 - 1e-12).fit(z, y).accept(z)
    assert predictions.tolist() == [0, 0, 1, 0]
    assert accepted.tolist() == [True, False, True, False]
    assert NoReject().fit(z, y).accept(z)[1].all()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), n_classes=st.integers(2, 5), alpha=st.sampled_from([0.6, 0.9, 0.95]))
def test_every_logit_baseline_predicts_the_argmax_and_repeats_itself(seed: int, n_classes: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    z, y = draw(rng, 30, n_classes)
    z_new, _ = draw(rng, 10, n_classes)
    for make in LOGIT_BASELINES:
        model: LogitBaseline = make(alpha).fit(z, y)
        predictions, accepted = model.accept(z_new)
        assert predictions.tolist() == [max(range(n_classes), key=row.__getitem__) for row in z_new.tolist()]
        assert accepted.dtype == bool
        assert accepted.shape == (10,)
        assert (make(alpha).fit(z, y).accept(z_new)[1] == accepted).all()
        assert model.accept(np.empty((0, n_classes)))[1].shape == (0,)


@pytest.mark.parametrize("make", LOGIT_BASELINES)
def test_bad_input_is_named(make: type[LogitBaseline]) -> None:
    z, y = draw(np.random.default_rng(0), 20, 2)
    with pytest.raises(ValueError, match="not fitted"):
        make().accept(z)
    with pytest.raises(ValueError, match="alpha"):
        make(0.4).fit(z, y)
    with pytest.raises(ValueError, match="NaN"):
        make().fit(np.full((20, 2), np.nan), y)
    with pytest.raises(ValueError, match="label"):
        make().fit(z, y[:-1])
    with pytest.raises(ValueError, match=r"whole numbers in 0\.\.1"):
        make().fit(z, y + 1)
    with pytest.raises(ValueError, match="shape"):
        make().fit(z[:, 0], y)
    with pytest.raises(ValueError, match="3 columns but there are 2 classes"):
        make().fit(z, y).accept(np.zeros((1, 3)))
    with pytest.raises(ValueError, match="penalty"):
        RAPS(penalty=-1.0).fit(z, y)


def blobs(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    return (rng.normal(size=(n, 8)) + 1.5 * y[:, None]).astype(np.float32), y


@pytest.fixture(scope="module")
def estimator() -> SDMEstimator:
    return SDMEstimator.published(alpha=0.9, **FAST).fit(*blobs(600, 0))


def test_sdm_rules_follow_their_formulas(estimator: SDMEstimator) -> None:
    X, y = blobs(200, 1)
    scores = estimator.score(X)
    by_softmax, by_sdm = [], []
    for z, d, q in zip(scores.z.tolist(), scores.d.tolist(), scores.q.tolist(), strict=True):
        by_softmax.append(max(slow.softmax([d * v for v in z])) >= 0.9)
        by_sdm.append(max(slow.softmax([d * math.log(2 + q) * v for v in z])) >= 0.9)
    expected = {
        DistanceSoftmax(estimator): by_softmax,
        SDMThreshold(estimator): by_sdm,
        SDMRegion(estimator): scores.accepted.tolist(),
        SDMRegion(estimator, lower=True): scores.accepted_lower.tolist(),
    }
    for model, accepted in expected.items():
        for given_points in (X, scores):
            predictions, mask = model.fit(X, y).accept(given_points)
            assert predictions.tolist() == scores.z.argmax(axis=1).tolist()
            assert mask.tolist() == accepted
    assert len({tuple(accepted) for accepted in expected.values()}) > 2  # the example tells the rules apart


def test_sdm_rules_follow_the_alpha_of_the_estimator(estimator: SDMEstimator) -> None:
    X, _ = blobs(200, 2)
    loose = SDMThreshold(estimator).accept(X)[1].sum()
    try:
        estimator.recalibrate(0.99)
        assert SDMThreshold(estimator).accept(X)[1].sum() < loose
    finally:
        estimator.recalibrate(0.9)


def test_cross_entropy_adaptor_learns_and_repeats_itself(estimator: SDMEstimator) -> None:
    train, held, test = blobs(300, 3), blobs(300, 4), blobs(300, 5)
    logits = cross_entropy_logits(estimator, train, held, progress=False)(test[0])
    assert logits.shape == (300, 2)
    assert (logits.argmax(axis=1) == test[1]).mean() > 0.9
    assert (cross_entropy_logits(estimator, train, held, progress=False)(test[0]) == logits).all()
    x, y, x_ca, y_ca, x_new = (torch.as_tensor(part) for part in (*train, *held, test[0]))
    settings = {name: getattr(estimator, name) for name in (*FAST, "batch_size", "center")}
    del settings["rounds"], settings["progress"]
    for loss, same in (("ce", True), ("sdm", False)):
        generator = torch.Generator().manual_seed(0)
        trained = train_adaptor((x, y), (x_ca, y_ca), 2, **settings, generator=generator, loss=loss)
        assert bool((trained.adaptor(x_new)[1].numpy() == logits).all()) == same
    assert (cross_entropy_logits(estimator, train, held, seed=1, progress=False)(test[0]) != logits).any()
