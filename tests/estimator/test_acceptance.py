import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import betabinom, binom

from sdmlm.estimator.acceptance import (
    CertifiedRule,
    Evidence,
    certify_rule,
    distance_bound,
    least_points,
)
from sdmlm.estimator.threshold_tests import (
    Candidates,
    beta_binomial_cdf,
    by_class,
    candidate_order,
    candidates_at,
    thresholds_of,
)

ALPHA, DELTA = 0.9, 0.1
DRAWS = 1000


class World:
    """Points whose accuracy is known: confidence is uniform on [0, 1], class c is predicted with probability share[c] and
    is then right with probability 1 - slope[c] (1 - confidence) - error[c]; a wrong one truly is the next class."""

    def __init__(self, share, error, slope=None):
        self.share, self.error = np.asarray(share), np.asarray(error)
        self.slope = np.zeros(len(share)) if slope is None else np.asarray(slope)

    def draw(self, rng, n):
        confidence = rng.random(n)
        predictions = rng.choice(len(self.share), size=n, p=self.share)
        wrong = rng.random(n) < self.slope[predictions] * (1 - confidence) + self.error[predictions]
        labels = (predictions + wrong) % len(self.share)
        return Evidence(confidence, np.ones(n), predictions, labels)

    def accuracies(self, thresholds):
        """(overall, by predicted class, by true class) among the accepted of the whole population; NaN for nobody."""
        t = np.clip(np.asarray(thresholds), 0, 1)
        mass = self.share * (1 - t)
        errors = mass * (self.error + self.slope * (1 - t) / 2)
        right = mass - errors
        with np.errstate(invalid="ignore"):
            return right.sum() / mass.sum(), right / mass, right / (right + np.roll(errors, 1))

    def broken(self, rule):
        """Whether the rule's promise is false here."""
        overall, predicted, true = self.accuracies(rule.thresholds)
        held = {"overall": [overall], "predicted": predicted, "class": [*predicted, *true]}[rule.promise]
        return bool((np.asarray(held) < rule.alpha - 1e-9).any())  # NaN: nothing is accepted, nothing is broken


def certify(world, rng, promise, n=500, **changes):
    options = {"alpha": ALPHA, "delta": DELTA, "promise": promise, "epsilon": 0.0, "candidates": 20, **changes}
    return certify_rule(world.draw(rng, n), world.draw(rng, n), len(world.share), **options)


# At most so many false promises in DRAWS: more happen once in a million even if delta is met just so.
MOST_BROKEN = binom.ppf(1 - 1e-6, DRAWS, DELTA)


@pytest.mark.parametrize(
    ("promise", "world"),
    [
        ("overall", World([0.5, 0.5], [0.1001, 0.1001])),  # just short everywhere: every certificate is false
        ("overall", World([0.5, 0.5], [0.0, 0.0], [0.4, 0.4])),  # holds from confidence 0.5 on
        ("overall", World([0.2, 0.8], [0.3, 0.05001])),
        ("predicted", World([0.4, 0.6], [0.1001, 0.1001])),
        ("predicted", World([0.5, 0.5], [0.1001, 0.01])),
        ("predicted", World([0.3, 0.3, 0.4], [0.0, 0.05, 0.1001], [0.4, 0.3, 0.0])),
        ("predicted", World([0.5, 0.5], [0.0, 0.0], [0.4, 0.4])),
        (
            "predicted",
            World([0.25] * 4, [0.1001, 0.0, 0.0, 0.0]),
        ),  # three leave their level to the one that must not pass
        ("predicted", World([0.2] * 5, [0.1001, 0.1001, 0.02, 0.02, 0.1001], [0, 0, 0.1, 0.3, 0])),
        ("class", World([0.5, 0.5], [0.1001, 0.01])),
        ("class", World([0.5, 0.5], [0.0, 0.0], [0.4, 0.4])),
        ("class", World([0.22, 0.78], [0.02, 0.0307])),  # each prediction is reliable, the points of class 0 are not
    ],
)
def test_the_promise_holds_over_a_thousand_draws(promise, world):
    rng = np.random.default_rng(0)
    broken = sum(world.broken(certify(world, rng, promise)) for _ in range(DRAWS))
    assert broken <= MOST_BROKEN


def test_the_level_is_used_up():
    """Not only do false promises stay below delta: where accuracy is just short of alpha, they come near it."""
    world, rng = World([0.5, 0.5], [0.1001, 0.1001]), np.random.default_rng(1)
    broken = sum(world.broken(certify(world, rng, "overall")) for _ in range(DRAWS))
    assert 0.4 * DELTA < broken / DRAWS <= MOST_BROKEN / DRAWS


def test_a_class_that_is_done_leaves_its_level():
    """Where one class passes everything, the other is tested at the full level: more than half of it is used up."""
    world, rng = World([0.5, 0.5], [0.1001, 0.0]), np.random.default_rng(1)
    rules = [certify(world, rng, "predicted", n=400) for _ in range(DRAWS)]
    broken = sum(map(world.broken, rules))
    assert 0.55 * DELTA < broken / DRAWS <= MOST_BROKEN / DRAWS
    assert np.mean([math.isfinite(rule.thresholds[1]) for rule in rules]) == 1.0


def lists(*sizes):
    """Candidates of classes 0, 1, ...: so many thresholds each, which all have the same good chance to pass."""
    return {
        c: Candidates(-np.arange(float(n)), np.full(n, 400.0), np.zeros(n), np.full(n, 400.0), np.zeros(n))
        for c, n in enumerate(sizes)
    }


def run(p_values, delta=0.06, found=None):
    """(certified, levels of all tests) of `by_class` with the given p-value of each class and threshold."""
    levels = []

    def passes(c, threshold, level):
        levels.append((c, threshold, round(level, 10)))
        return p_values[c][round(-threshold)] <= level

    return by_class(found or lists(*map(len, p_values)), 0.9, delta, passes), levels


def test_levels_are_shared_by_the_classes_that_are_not_done():
    certified, levels = run([[0.01, 0.01], [0.025, 0.01], [0.05, 0.0]])
    assert certified == {0: -1.0, 1: -1.0, 2: -1.0}
    assert levels == [
        (0, 0.0, 0.02), (0, -1.0, 0.02),  # done
        (1, 0.0, 0.02), (2, 0.0, 0.02),  # both fail at a third
        (1, 0.0, 0.03), (1, -1.0, 0.03), (2, 0.0, 0.03),  # class 1 passes at half
        (2, 0.0, 0.06), (2, -1.0, 0.06),  # and class 2 with all
    ]  # fmt: skip


def test_a_class_that_fails_keeps_its_level():
    certified, levels = run([[0.01, 0.5], [0.025, 0.01], [0.05, 0.0]])
    assert certified == {0: 0.0, 1: math.inf, 2: math.inf}
    assert {level for *_, level in levels} == {0.02}


def test_classes_without_a_fair_chance_come_last_at_the_full_level():
    poor = Candidates(np.zeros(1), np.full(1, 100.0), np.full(1, 12.0), np.full(1, 100.0), np.zeros(1))
    found = {**lists(1, 1), 2: poor}
    assert poor.chances(0.9, 0.06)[0] < 0.3
    assert run([[0.0], [0.05], [0.05]], found=found)[0] == {0: 0.0, 1: 0.0, 2: 0.0}
    certified, levels = run([[0.0], [0.07], [0.0]], found=found)
    assert certified == {0: 0.0, 1: math.inf, 2: math.inf}
    assert 2 not in {c for c, *_ in levels}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_the_chance_to_pass_is_that_of_scipy(seed):
    rng = np.random.default_rng(seed)
    n, seen = rng.integers(0, 300, 5), rng.integers(1, 300, 5)
    errors = rng.integers(0, seen + 1)
    k = rng.integers(0, 40, 5)
    expected = betabinom.cdf(np.minimum(k, n), n, errors + 0.5, seen - errors + 0.5)
    mine = beta_binomial_cdf(k.astype(float), n.astype(float), errors + 0.5, seen - errors + 0.5)
    np.testing.assert_allclose(mine, expected, atol=1e-9)
    found = Candidates(np.zeros(5), seen.astype(float), errors.astype(float), n.astype(float), np.zeros(5))
    for i, chance in enumerate(found.chances(0.9, 0.05)):
        allowed = max((e for e in range(n[i] + 1) if binom.cdf(e, n[i], 0.1) <= 0.05), default=None)
        beta = (errors[i] + 0.5, seen[i] - errors[i] + 0.5)
        assert chance == pytest.approx(0.0 if allowed is None else betabinom.cdf(allowed, n[i], *beta), abs=1e-9)


def test_the_chance_to_pass_counts_how_many_points_are_accepted_by_chance():
    """59 accepted points without an error are needed at 0.95: a threshold that is expected to accept 59 passes half of the time at most."""
    rng = np.random.default_rng(6)
    seen, total, held_out = 400, 500, 74
    one = candidates_at(np.array([0.2]), np.linspace(1, 0, total), np.ones(total, bool), held_out / total, total)
    assert (one.seen[0], round(one.expected[0], 1)) == (seen, 59.2)
    share = rng.beta(
        seen + 1, total - seen + 1, 20_000
    )  # of all points; known up to the error of the calibration points
    passed = rng.binomial(held_out, share) >= 59
    errors = rng.random(20_000) < 1 - np.exp(-59 * 0.5 / (seen + 1))  # of 59 points, with Jeffreys' prior
    assert one.chances(0.95, 0.05)[0] == pytest.approx((passed & ~errors).mean(), abs=0.08)
    sure = Candidates(one.thresholds, one.seen, one.errors, one.expected, np.zeros(1))
    assert sure.chances(0.95, 0.05)[0] > 0.9


@pytest.mark.parametrize(("promise", "largest"), [("overall", 0.93), ("predicted", 0.94)])
def test_what_is_accepted_comes_close_to_alpha(promise, largest):
    """Alpha would be met from confidence 0.5 on; with 2,000 points hardly more than that is asked for."""
    world, rng = World([0.5, 0.5], [0.0, 0.0], [0.4, 0.4]), np.random.default_rng(2)
    rules = [certify(world, rng, promise, n=2000, candidates=100) for _ in range(60)]
    thresholds = np.array([rule.thresholds for rule in rules])
    certified = np.isfinite(thresholds)
    assert certified.mean() > 0.9  # the first test of the sequence may fail
    assert ALPHA <= np.mean([world.accuracies(rule.thresholds)[0] for rule in rules if rule.certified]) < largest
    assert 0.5 < thresholds[certified].mean() < 0.7


def test_true_classes_are_only_promised_where_asked():
    world, rng = World([0.2, 0.8], [0.0, 0.05]), np.random.default_rng(3)
    assert world.accuracies([0.0, 0.0])[2][0] == pytest.approx(0.2 / 0.24)  # of class 0 one point in six is taken for 1
    certified = {
        promise: np.mean([certify(world, rng, promise, n=1000).certified for _ in range(100)])
        for promise in ("overall", "predicted", "class")
    }
    assert certified["overall"] == certified["predicted"] == 1.0
    assert certified["class"] <= DELTA + 0.1


def test_without_the_fixed_sequence_the_promise_would_break():
    """Taking the loosest of all candidates that pass, in whatever order, is false more often than delta."""
    world, rng = World([0.5, 0.5], [0.1001, 0.1001]), np.random.default_rng(4)
    naive = sequence = 0
    for _ in range(DRAWS):
        known, fresh = world.draw(rng, 400), world.draw(rng, 400)
        options = {"alpha": ALPHA, "delta": DELTA, "epsilon": 0.0, "candidates": 20}
        sequence += certify_rule(known, fresh, 2, **options).certified
        inside = fresh.confidence >= np.quantile(known.confidence, np.arange(20) / 20)[:, None]
        passed = binom.cdf((inside & ~fresh.right).sum(axis=1), inside.sum(axis=1), 1 - ALPHA) <= DELTA
        naive += passed.any()
    assert naive > 2 * DELTA * DRAWS
    assert sequence <= MOST_BROKEN


def order_of(confidence, right, share, alpha, level, most):
    found = candidates_at(thresholds_of(confidence, most), confidence, right, share, len(confidence))
    for threshold, seen, errors in zip(found.thresholds, found.seen, found.errors, strict=True):
        inside = confidence >= threshold
        assert (seen, errors) == (inside.sum(), (inside & ~right).sum())
    return candidate_order([found], alpha, level)


def test_the_group_with_the_least_chance_decides_where_the_tests_begin():
    sure, seen = np.zeros(3), np.array([5.0, 200, 300])
    one = Candidates(-np.arange(3.0), np.full(3, 300.0), np.zeros(3), np.full(3, 300.0), sure)
    two = Candidates(-np.arange(3.0), seen, np.array([0.0, 2, 30]), seen, sure)
    assert candidate_order([one], 0.9, 0.05).tolist() == [0.0, -1.0, -2.0]
    assert candidate_order([one, two], 0.9, 0.05).tolist() == [-1.0, -2.0]


def test_the_tests_are_exact_and_stop_at_the_first_failure():
    rng = np.random.default_rng(5)
    world = World([0.5, 0.5], [0.0, 0.0], [0.4, 0.4])
    known, fresh = world.draw(rng, 600), world.draw(rng, 600)
    rule = certify_rule(known, fresh, 2, alpha=ALPHA, delta=DELTA, epsilon=0.0)
    order = order_of(known.confidence, known.right, 1.0, ALPHA, DELTA, 100)
    assert [test.threshold for test in rule.tests] == order[: len(rule.tests)].tolist()
    assert [test.passed for test in rule.tests] == [True] * (len(rule.tests) - 1) + [False]
    assert rule.thresholds == (rule.tests[-2].threshold,) * 2
    for test in rule.tests:
        inside = [i for i in range(600) if fresh.confidence[i] >= test.threshold]
        errors = sum(fresh.predictions[i] != fresh.labels[i] for i in inside)
        assert (test.group, test.accepted, test.errors) == ("all", len(inside), errors)
        tail = sum(math.comb(len(inside), k) * 0.1**k * 0.9 ** (len(inside) - k) for k in range(errors + 1))
        assert test.p_value == pytest.approx(tail)


def test_candidates_follow_from_calibration_points_alone():
    """Whatever the held-out points are, the thresholds that are tested first are the same."""
    world, rng = World([0.5, 0.5], [0.0, 0.0], [0.4, 0.4]), np.random.default_rng(6)
    known = world.draw(rng, 500)
    tested = []
    for _ in range(5):
        rule = certify_rule(known, world.draw(rng, 500), 2, alpha=ALPHA, delta=DELTA, epsilon=0.0)
        tested.append([test.threshold for test in rule.tests])
    shortest = min(map(len, tested))
    assert all(thresholds[:shortest] == tested[0][:shortest] for thresholds in tested)
    assert set(tested[0]) <= set(known.confidence)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 300), st.integers(0, 10**6), st.floats(0.1, 3), st.floats(0.6, 0.99), st.integers(1, 50))
def test_candidates_go_from_strict_to_loose_among_finite_values(n, seed, share, alpha, most):
    rng = np.random.default_rng(seed)
    confidence = np.where(rng.random(n) < 0.2, -np.inf, rng.normal(size=n).round(1))
    order = order_of(confidence, rng.random(n) < 0.9, share, alpha, 0.05, most)
    assert len(order) <= most
    assert (np.diff(order) < 0).all()
    assert set(order) <= set(confidence[np.isfinite(confidence)])
    assert bool(len(order)) == bool(np.isfinite(confidence).any())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=200), st.floats(0, 0.9))
def test_the_distance_bound_gives_up_at_most_epsilon_of_the_known(d, epsilon):
    d = np.array(d)
    bound = distance_bound(d, epsilon)
    assert (d < bound).mean() <= epsilon
    assert bound == 0.0 or (d <= bound).mean() >= epsilon - 1 / len(d)


def rule_of(**changes):
    values = {
        "alpha": 0.9, "delta": 0.1, "promise": "predicted", "epsilon": 0.05, "thresholds": (0.5, math.inf),
        "least_distance": 0.2, "classes": (0, 1), "held_out": 100, "needed": 0, "tests": (),
    }  # fmt: skip
    return CertifiedRule(**{**values, **changes})


def test_both_parts_must_hold():
    confidence = np.array([0.5, 0.49, 0.9, 9.0, 0.9])
    d = np.array([0.2, 0.9, 0.19, 1.0, 0.0])
    predictions = np.array([0, 0, 0, 1, 0])
    assert rule_of().accepts(Evidence(confidence, d, predictions)).tolist() == [True, False, False, False, False]
    open_rule = rule_of(least_distance=0.0)  # d = 0 is beyond every known point
    assert open_rule.accepts(Evidence(confidence, d, predictions)).tolist() == [True, False, True, False, False]
    blind = rule_of(least_distance=0.0, epsilon=0.0)
    assert blind.accepts(Evidence(confidence, d, predictions)).tolist() == [True, False, True, False, True]


def test_some_classes_only():
    world, rng = World([0.5, 0.5], [0.01, 0.01]), np.random.default_rng(7)
    for promise in ("overall", "predicted", "class"):
        rule = certify(world, rng, promise, classes=[1])
        assert math.isinf(rule.thresholds[0])
        assert math.isfinite(rule.thresholds[1])
        assert "Predictions of no are never accepted" in rule.sentence(["no", "yes"])
    with pytest.raises(ValueError, match="must name some of the classes"):
        certify(world, rng, "overall", classes=[2])


def test_saved_and_loaded_it_is_the_same(tmp_path):
    world, rng = World([0.5, 0.5], [0.3, 0.01]), np.random.default_rng(8)
    for promise in ("overall", "predicted", "class"):
        rule = dataclasses.replace(certify(world, rng, promise), estimator="abc")
        rule.save(tmp_path / "rule.json")
        assert CertifiedRule.load(tmp_path / "rule.json") == rule
    for damaged in ("{}", "[" * 100_000, "[]", '{"kind": "sdmlm certified rule"}'):
        (tmp_path / "rule.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"rule\.json is not a readable certificate"):
            CertifiedRule.load(tmp_path / "rule.json")


def test_what_is_missing_is_said():
    rng = np.random.default_rng(9)
    good, poor = World([0.5, 0.5], [0.005, 0.005]), World([0.5, 0.5], [0.4, 0.4])
    assert least_points(0.95, 0.05) == 59
    assert 0.95**59 <= 0.05 < 0.95**58
    few = certify_rule(good.draw(rng, 300), good.draw(rng, 40), 2, alpha=0.95, delta=0.05)
    assert not few.certified
    assert "even without an error 59 are needed, so fit on at least 118 points" in str(few)
    some = certify_rule(good.draw(rng, 300), good.draw(rng, 70), 2, alpha=0.99, delta=0.2, epsilon=0.0)
    assert some.certified or "would be needed" in str(some) or "are needed" in str(some)
    never = certify_rule(poor.draw(rng, 300), poor.draw(rng, 300), 2, alpha=0.95)
    assert "the predictions are too often wrong" in str(never)
    exact = certify_rule(good.draw(rng, 300), good.draw(rng, 300), 2, alpha=1.0)
    assert "no number of points can show" in str(exact)
    none = Evidence(np.empty(0), np.empty(0), np.empty(0, int), np.empty(0, int))
    assert not certify_rule(good.draw(rng, 300), none, 2, alpha=0.9).certified


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 0.4}, "alpha"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"promise": "all"}, "promise"),
        ({"epsilon": -0.1}, "epsilon"),
        ({"epsilon": 1.0}, "epsilon"),
    ],
)
def test_bad_settings_are_named(changes, message):
    world, rng = World([0.5, 0.5], [0.1, 0.1]), np.random.default_rng(0)
    with pytest.raises(ValueError, match=message):
        certify(world, rng, **{"promise": "overall", **changes})


def test_points_without_labels_cannot_certify():
    world, rng = World([0.5, 0.5], [0.01, 0.01]), np.random.default_rng(0)
    unlabelled = dataclasses.replace(world.draw(rng, 200), labels=None)
    with pytest.raises(ValueError, match="needs labelled points"):
        certify_rule(world.draw(rng, 200), unlabelled, 2, alpha=0.9)
