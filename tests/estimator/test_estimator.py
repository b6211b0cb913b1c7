"""SDMEstimator against the plain reference versions."""

import argparse
import copy
import dataclasses
import inspect
import math

import numpy as np
import pytest
import reference as slow
import torch
from estimator_checks import SMALL, blobs, same
from hypothesis import given, settings
from hypothesis import strategies as st

from sdmlm import SDMClassifier, SDMEstimator
from sdmlm.cli.common import add_estimator_options, estimator_parameters
from sdmlm.estimator.certify import threshold_grid
from sdmlm.estimator.layer import ALPHA_GRID, SDMLayer
from sdmlm.estimator.region import HighReliabilityRegion
from sdmlm.estimator.splits import random_halves


def by_hand(estimator, x, h32, exclude=-1):
    """Scores of one point from the weights, support and calibration set, all in plain Python from the spec.

    h32 is h' as the estimator computed it: a distance that ties with a stored one must tie here too.
    """
    layer, alpha, classes = estimator.layers_[0], estimator.alpha_, len(estimator.classes_)
    a = {f.name: np.asarray(getattr(layer.adaptor, f.name), float) for f in dataclasses.fields(layer.adaptor) if f.init}

    def adapt(v):
        h = a["weight"] @ ((np.asarray(v, float) - a["mean"]) / a["std"]) + a["bias"]
        return h, a["out_weight"] @ h + a["out_bias"]

    support = layer.support
    vectors, labels, guesses = support.vectors.tolist(), support.labels.tolist(), support.predictions.tolist()

    def signals(h, z, own=-1):
        return slow.similarity(vectors, labels, guesses, h, int(np.argmax(z)), own)

    y_ca = layer.calibration.labels.tolist()
    z_ca = layer.calibration.z.tolist()
    found = [signals(h, z) for h, z in zip(layer.calibration_vectors.tolist(), z_ca, strict=True)]
    cdf = [[d for (q, d), y in zip(found, y_ca, strict=True) if y == c and q > 0] for c in range(classes)]
    p_ca = np.array([slow.sdm(z, q, slow.distance_quantile(d, cdf)) for z, (q, d) in zip(z_ca, found, strict=True)])
    q_prime_ca = [slow.q_prime(q, p[int(np.argmax(z))]) for (q, _), p, z in zip(found, p_ca, z_ca, strict=True)]
    q_min, psi = slow.find_region(q_prime_ca, p_ca, y_ca, alpha)

    h, z = adapt(x)
    np.testing.assert_allclose(h32, h, rtol=1e-4, atol=1e-5)
    q, d_nearest = signals(h32.tolist(), z, exclude)
    if exclude >= 0:  # a point of the training split: the eCDF of that split, self-matches ignored
        own = [
            signals(v, [g == c for c in range(classes)], i)
            for i, (v, g) in enumerate(zip(vectors, guesses, strict=True))
        ]
        cdf = [[d for (k, d), y in zip(own, labels, strict=True) if y == c and k > 0] for c in range(classes)]
    d = slow.distance_quantile(d_nearest, cdf)
    guess = int(np.argmax(z))

    def outcome(distance):
        p = slow.sdm(z, q, distance)
        q_prime = slow.q_prime(q, p[guess])
        inside = psi is not None and slow.contains(q_min, psi, [q_prime], np.array([p]), [guess])[0]
        return p, q_prime, bool(inside)

    p, q_prime, accepted = outcome(d)
    eps = slow.dkw_epsilon(slow.effective_sample_size(q_prime, q_prime_ca, y_ca, classes), alpha)
    lower, upper = max(d - eps, 0.0), min(d + eps, 1.0)
    return {
        "prediction": guess, "z": z, "q": q, "d_nearest": d_nearest, "d": d, "p": p, "q_prime": q_prime,
        "accepted": accepted, "out_of_distribution": q == 0, "d_lower": lower, "d_upper": upper,
        "p_lower": outcome(lower)[0], "q_prime_lower": outcome(lower)[1], "accepted_lower": outcome(lower)[2],
        "p_upper": outcome(upper)[0], "q_prime_upper": outcome(upper)[1],
    }  # fmt: skip


@pytest.mark.parametrize("classes", [2, 3])
def test_scores_equal_those_by_hand(classes):
    X, y = blobs(160, classes)
    estimator = SDMEstimator.published(alpha=0.75, **SMALL).fit(X, y)
    new, _ = blobs(20, classes, seed=5)
    new[:3] *= 30
    exclude = estimator.support_index(range(15))
    X_some = np.concatenate([new, X[:15]])
    own = np.concatenate([np.full(20, -1), exclude])
    assert (exclude >= 0).any()
    scores = estimator.score(X_some, exclude=own)
    exemplars, _ = estimator.layers_[0].adaptor(torch.from_numpy(X_some))
    for i in range(len(X_some)):
        expected = by_hand(estimator, X_some[i], exemplars[i], own[i])
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(scores, name)[i], value, rtol=1e-5, atol=1e-6, err_msg=f"{name} of {i}")
    assert estimator.region_.q_min < math.inf
    assert 0 < scores.accepted.sum() < len(scores)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_modes_of_the_caller_change_nothing(mode):
    X, y = blobs(60)
    plain = SDMEstimator.published(**SMALL).fit(X, y)
    with mode():
        inside = SDMEstimator.published(**SMALL).fit(X, y)
        scores, of_tensor = plain.score(X), plain.score(torch.from_numpy(X))
    assert same(inside.score(X), plain.score(X))
    assert same(scores, plain.score(X))
    assert same(of_tensor, plain.score(X))


def test_same_seed_same_result_and_another_seed_another():
    X, y = blobs()
    one, two, three = (SDMEstimator.published(seed=s, **SMALL).fit(X, y) for s in (3, 3, 4))
    assert same(one.score(X), two.score(X))
    assert not np.array_equal(one.score(X).z, three.score(X).z)


def test_the_best_round_wins():
    X, y = blobs()
    single = [SDMEstimator.published(**{**SMALL, "rounds": r}).fit(X, y) for r in (1, 2, 4)]
    losses = [e.loss_ for e in single]
    assert losses[0] >= losses[1] >= losses[2]
    every = SDMEstimator.published(combine="all", **{**SMALL, "rounds": 4}).fit(X, y)
    assert [layer.loss for layer in every.layers_] == sorted(layer.loss for layer in every.layers_)
    assert every.loss_ == losses[2]
    assert losses[0] in [layer.loss for layer in every.layers_]


def test_ensembles_accept_only_what_all_accept():
    X, y = blobs()
    new, _ = blobs(seed=1)
    ensemble = SDMEstimator.published(alpha=0.8, combine="all", **{**SMALL, "rounds": 3}).fit(X, y)
    scores = ensemble.score(new)
    parts = [layer.score(torch.from_numpy(new), 0.8) for layer in ensemble.layers_]
    agree = np.all([p.prediction == parts[0].prediction for p in parts], axis=0)
    for name in ("accepted", "accepted_lower"):
        expected = agree & np.all([getattr(p, name) for p in parts], axis=0)
        assert np.array_equal(getattr(scores, name), expected)
    assert scores.accepted.sum() < parts[0].accepted.sum()  # or nothing was shown
    for i in range(len(new)):
        at = [
            alpha
            for alpha in ALPHA_GRID
            if agree[i]
            and all(
                layer.region(alpha).contains(p.q_prime, p.p, p.prediction)[i]
                for layer, p in zip(ensemble.layers_, parts, strict=True)
            )
        ]
        assert scores.highest_alpha[i] == max(at) if at else np.isnan(scores.highest_alpha[i])


def test_what_needs_a_single_model_says_so():
    X, y = blobs(60)
    ensemble = SDMEstimator.published(combine="all", **{**SMALL, "rounds": 2}).fit(X, y)
    with pytest.raises(ValueError, match="accepted_at works on a single model"):
        ensemble.accepted_at(ensemble.score(X), [0.9])
    with pytest.raises(ValueError, match="certify works on a single model"):
        ensemble.certify(X, y)
    with pytest.raises(ValueError, match="exclude works on a single model"):
        ensemble.score(X, exclude=np.full(60, -1))


def test_a_fit_that_diverges_says_so():
    X, y = blobs(60)
    with pytest.raises(ValueError, match="diverged"):
        SDMEstimator.published(**{**SMALL, "learning_rate": 1e38}).fit(X, y)


def test_given_calibration_split_is_used():
    (X, y), (Xc, yc) = blobs(), blobs(100, seed=1)
    names = [f"c{i}" for i in range(100)]
    estimator = SDMEstimator.published(**SMALL).fit(X, y, calibration=(Xc, yc, names))
    layer = estimator.layers_[0]
    assert layer.calibration_ids == names
    assert layer.calibration.labels.tolist() == yc.tolist()
    assert len(layer.support) == len(X)
    assert estimator.support_index([0, 5, "c3"]).tolist() == [0, 5, -1]


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_halves_are_halves_and_lose_no_class(seed):
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.repeat(np.arange(4), rng.integers(2, 9, 4)), rng.integers(0, 4, 5)])
    one, two = random_halves(labels, rng)
    assert sorted([*one, *two]) == list(range(len(labels)))
    assert abs(len(one) - len(two)) <= 1
    for c in range(4):
        counts = (labels[one] == c).sum(), (labels[two] == c).sum()
        assert min(counts) >= 1
        assert abs(counts[0] - counts[1]) <= 1


def test_scores_do_not_depend_on_the_batch():
    """Also for the points it was fitted on, which lie exactly on the steps of the eCDFs."""
    X, y = blobs(400, dim=300)
    estimator = SDMEstimator.published(alpha=0.8, **{**SMALL, "exemplar_dim": 200, "learning_rate": 1e-3}).fit(X, y)
    whole = estimator.score(X)
    single = [estimator.score(X[i : i + 1]) for i in range(len(X))]
    assert np.array_equal(whole.q, np.concatenate([s.q for s in single]))
    np.testing.assert_allclose(np.concatenate([s.d for s in single]), whole.d, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([s.p for s in single]), whole.p, atol=1e-9)
    assert np.array_equal(whole.accepted, np.concatenate([s.accepted for s in single]))


def test_lower_is_stricter_and_zero_q_is_out_of_distribution(fitted):
    new, _ = blobs(400, seed=2)
    new[:50] *= 20
    scores = fitted.score(new)
    assert not (scores.accepted_lower & ~scores.accepted).any()
    assert (scores.q_prime_lower <= scores.q_prime).all()
    assert (scores.q_prime <= scores.q_prime_upper).all()
    assert np.array_equal(scores.out_of_distribution, scores.q == 0)
    assert scores.out_of_distribution.any()
    assert not scores.accepted[scores.out_of_distribution].any()
    assert np.array_equal(scores.prediction, scores.z.argmax(axis=1))


def test_recalibrate_equals_fitting_at_that_alpha():
    X, y = blobs()
    one = SDMEstimator.published(alpha=0.9, **SMALL).fit(X, y).recalibrate(0.7)
    two = SDMEstimator.published(alpha=0.7, **SMALL).fit(X, y)
    assert one.region_ == two.region_
    assert same(one.score(X), two.score(X))
    with pytest.raises(ValueError, match="alpha"):
        one.recalibrate(0.4)
    assert one.alpha_ == 0.7


def test_regions_of_many_alphas_take_bounded_memory(fitted):
    """A server may be asked for any alpha."""
    layer = copy.deepcopy(fitted.layers_[0])
    assert isinstance(layer, SDMLayer)
    for alpha in np.linspace(0.51, 1.0, 600):
        assert layer.region(float(alpha)).alpha == alpha
    assert len(layer._regions) <= 256


def test_several_alphas_and_the_highest(fitted):
    new, _ = blobs(seed=3)
    scores = fitted.score(new)
    at = fitted.accepted_at(scores, ALPHA_GRID)
    for i in range(len(new)):
        accepted = [alpha for alpha, inside in zip(ALPHA_GRID, at[i], strict=True) if inside]
        assert (math.isnan(scores.highest_alpha[i]) and not accepted) or scores.highest_alpha[i] == max(accepted)
    assert np.array_equal(fitted.accepted_at(scores, [0.8])[:, 0], scores.accepted)
    assert len(set(scores.highest_alpha[~np.isnan(scores.highest_alpha)])) > 1


def test_score_at_another_alpha_or_by_other_regions_changes_nothing_else(fitted):
    X, _ = blobs(60, seed=3)
    other = copy.copy(fitted).recalibrate(0.7)
    assert same(fitted.score(X, alpha=0.7), other.score(X))
    assert fitted.alpha_ == 0.8
    none = fitted.score(X, regions=lambda alpha: HighReliabilityRegion(alpha, math.inf, (math.inf, math.inf)))
    assert not none.accepted.any()
    assert np.isnan(none.highest_alpha).all()
    assert np.array_equal(none.p, fitted.score(X).p)


def test_a_copy_with_more_support_leaves_the_original_as_it_was(fitted):
    X, y = blobs(20, seed=4)
    probe, _ = blobs(40, seed=5)
    before, digest, ids = fitted.score(probe), fitted.digest(), list(fitted.support_ids_)
    new = fitted.with_support(X, y, documents={"added:0": "a text"})
    assert same(fitted.score(probe), before)
    assert (fitted.digest(), fitted.support_ids_, fitted.documents_) == (digest, ids, {})
    assert len(new.support_ids_) == len(ids) + 20
    assert new.documents_ == {"added:0": "a text"}
    assert same(new.score(probe), copy.deepcopy(fitted).add_to_support(X, y).score(probe))


def test_adding_to_the_support_changes_q_and_d_but_not_predictions():
    X, y = blobs()
    new, y_new = blobs(60, seed=7)
    estimator = SDMEstimator.published(alpha=0.8, **SMALL).fit(X, y)
    before = estimator.score(new)
    estimator.add_to_support(new[:30], np.full(30, -1), ids=[f"ood{i}" for i in range(30)], documents={"ood3": "odd"})
    after = estimator.score(new)
    assert np.array_equal(before.z, after.z)
    assert (after.q[:30] == 0).all()  # they stand on a point that is known to be out of distribution
    assert (after.q <= before.q).all()
    assert (after.d_nearest <= before.d_nearest).all()
    assert estimator.explain(new[3:4], k=1)[0].exemplars[0].text == "odd"
    # The region follows the support: it is the one Algorithm 1 finds for the calibration points as they score now.
    ca = estimator.layers_[0].calibration
    q_min, _ = slow.find_region(ca.q_prime.tolist(), ca.p.numpy(), ca.labels.tolist(), 0.8)
    assert estimator.region_.q_min == q_min
    estimator.add_to_support(new[30:], y_new[30:])
    assert estimator.score(new[30:]).d_nearest.max() < 1e-4
    with pytest.raises(ValueError, match="already in use"):
        estimator.add_to_support(new[:1], [0], ids=["ood3"])


def test_after_adding_the_training_quantiles_are_those_of_the_new_support():
    X, y = blobs(160)
    new, y_new = blobs(40, seed=7)
    estimator = SDMEstimator.published(alpha=0.75, **SMALL).fit(X, y)
    own = estimator.support_index(range(15))
    before = estimator.score(X[:15], exclude=own)
    estimator.add_to_support(new, np.where(np.arange(40) < 10, -1, y_new), ids=[f"new{i}" for i in range(40)])
    scores = estimator.score(X[:15], exclude=own)
    exemplars, _ = estimator.layers_[0].adaptor(torch.from_numpy(X[:15]))
    for i in range(15):
        expected = by_hand(estimator, X[i], exemplars[i], own[i])
        for name in ("q", "d", "d_nearest", "q_prime"):
            np.testing.assert_allclose(getattr(scores, name)[i], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert (own >= 0).any()
    assert not np.allclose(before.d, scores.d)


def test_certify_on_fresh_points(fitted):
    X, y = blobs(2000, seed=9)
    certificate = fitted.certify(X, y, delta=0.1)
    assert certificate.region is not None
    assert certificate.region.q_min >= fitted.region_.q_min
    fresh, y_fresh = blobs(4000, seed=10)
    scores = fitted.score(fresh)
    accepted = certificate.accepts(scores)
    for c in range(2):
        own = accepted & (scores.prediction == c)
        assert (y_fresh == c)[own].mean() >= 0.8


def test_certify_takes_its_thresholds_from_calibration(fitted):
    certificate = fitted.certify(*blobs(500, seed=9))
    q_prime = fitted.layers_[0].calibration.q_prime.numpy()
    expected = threshold_grid(fitted.region_, q_prime)
    assert len(expected) > 3
    assert sorted({test.q_min for test in certificate.tests}) == expected
    assert set(expected) <= set(q_prime.tolist())


def test_defaults_agree_in_all_three_places_and_the_published_ones_are_the_papers():
    parser = argparse.ArgumentParser()
    add_estimator_options(parser)
    defaults = [
        {n: p.default for n, p in inspect.signature(c).parameters.items()} for c in (SDMEstimator, SDMClassifier)
    ]
    assert {**defaults[1], "progress": True} == defaults[0]
    command = estimator_parameters(parser.parse_args([]))
    assert all(defaults[0][name] == value for name, value in command.items())
    published = {
        "exemplar_dim": 1000,
        "epochs": 200,
        "batch_size": 50,
        "learning_rate": 1e-5,
        "rounds": 10,
        "center": "global",
        "combine": "best",
        "rule": "region",
        "distance": "exemplar",
        "max_q": None,
    }
    by_name = SDMEstimator.published()
    assert {name: getattr(by_name, name) for name in published} == published
    by_option = estimator_parameters(parser.parse_args(["--published"]))
    assert {**published, **by_option} == {**by_option, **published}


def test_certify_refuses_points_that_it_was_fitted_over(fitted):
    X, y = blobs()
    layer = fitted.layers_[0]
    for own in (layer.support_ids, layer.calibration_ids):
        with pytest.raises(ValueError, match="of these points were fitted over"):
            fitted.certify(X[list(own)], y[list(own)])


def test_bad_input_to_score_is_named(fitted):
    with pytest.raises(ValueError, match="3 wide but the estimator was fitted on vectors 6 wide"):
        fitted.score(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="row 0"):
        fitted.score([[np.inf] * 6])
    with pytest.raises(ValueError, match="exclude"):
        fitted.score(np.zeros((2, 6)), exclude=[10**6, -1])
    with pytest.raises(ValueError, match="not fitted"):
        SDMEstimator().score(np.zeros((1, 2)))
    assert len(fitted.score(np.empty((0, 6)))) == 0
    with pytest.raises(ValueError, match="k is 0"):
        fitted.explain(np.zeros((1, 6)), k=0)


def test_on_a_device_without_double_precision_the_cpu_works():
    X, y = blobs(60)
    assert SDMEstimator.published(device="mps", **SMALL).fit(X, y).layers_[0].adaptor.weight.device.type == "cpu"


def test_the_estimator_needs_no_language_model_library():
    """Importing the estimator half must not import transformers."""
    import subprocess
    import sys

    code = "import sys, sdmlm; sdmlm.SDMEstimator, sdmlm.SDMClassifier; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
