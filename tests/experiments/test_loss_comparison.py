"""The comparison of two losses."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from example_runs import evaluation, regions, run, scripted, some_runs

from sdmlm.experiments.loss_comparison import FEW, compare_losses
from sdmlm.experiments.tables import ALPHAS, Tables

# The comparison


def test_comparison_is_paired_by_seed() -> None:
    runs = some_runs()
    by = {(r.setting, r.seed): r for r in runs}
    for found in compare_losses(runs, bootstrap=100):
        expected = []
        for seed in (0, 1, 2):
            a, b = (by[s, seed].evaluations[found.dataset].accepted.tolist() for s in ("sdm_hn", "ce_hn"))
            expected.append(sum(a) / len(a) - sum(b) / len(b))
        assert found.seeds == (0, 1, 2)
        assert found.differences == pytest.approx(expected)
        mean, sd = sum(expected) / 3, math.sqrt(sum((x - sum(expected) / 3) ** 2 for x in expected) / 2)
        half = 4.302652729911275 * sd / math.sqrt(3)  # Student's t, 2 degrees of freedom
        assert found.interval == pytest.approx((mean - half, mean + half))
        assert (found.mean, found.sd) == pytest.approx((mean, sd))
        assert found.verdict == "more"
        assert "3 seeds are few" in found.statement()
        assert f"{100 * mean:+.1f} points on average" in found.statement()


def test_comparison_at_other_alphas_agrees_with_counting(found: Tables) -> None:
    by = {(r.setting, r.seed): r for r in some_runs()}
    thresholds = {alpha: more for alpha, *more in regions()}
    assert [(c.dataset, c.alpha) for c in found.by_alpha] == [(d, a) for d in ("harvard", "test") for a in ALPHAS]
    for c in found.by_alpha:
        q_min, *psi = thresholds[c.alpha]
        for n, seed in enumerate(c.seeds):
            for i, setting in enumerate(("sdm_hn", "ce_hn")):
                e = by[setting, seed].evaluations[c.dataset]
                admitted = []
                for y, c_hat, p, q in zip(e.y, e.prediction, e.probability, e.q_prime, strict=True):
                    other = 1 - p >= psi[1 - c_hat]  # then two classes reach their thresholds: refused
                    if q >= q_min and p >= psi[c_hat] and not other:
                        admitted.append(y == c_hat)
                assert c.shares[n][i] == pytest.approx(len(admitted) / len(e))
                assert c.accuracies[n][i] == (pytest.approx(sum(admitted) / len(admitted)) if admitted else None)
    assert {c.alpha: any(sum(c.shares, ())) for c in found.by_alpha} == {0.8: True, 0.85: True, 0.9: True, 0.95: False}
    assert [c["alpha"] for c in found.json()["by_alpha"]] == [*ALPHAS, *ALPHAS]


def test_one_seed_has_the_paired_interval_over_prompts() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.random(400) < 0.5, rng.random(400) < 0.45
    b[:200] = a[:200]  # the same prompts are accepted by both
    pair = [scripted("sdm_hn", 0, a.tolist(), [True] * 400), scripted("ce_hn", 0, b.tolist(), [True] * 400)]
    (found,) = compare_losses(pair, bootstrap=20_000)
    slow = []
    for _ in range(4000):
        drawn = rng.integers(0, 400, 400)
        slow.append(a[drawn].mean() - b[drawn].mean())
    assert list(found.interval) == pytest.approx(np.percentile(slow, (2.5, 97.5)).tolist(), abs=0.006)
    assert "One run says nothing about the spread" in found.statement()
    assert found.sd is None


def test_statements_say_what_the_numbers_say() -> None:
    yes, no = [True] * 100, [False] * 100

    def statement(first: list[list[bool]], second: list[list[bool]], right: list[bool]) -> str:
        runs = [scripted("sdm_hn", s, a, right) for s, a in enumerate(first)]
        runs += [scripted("ce_hn", s, a, right) for s, a in enumerate(second)]
        (found,) = compare_losses(runs, bootstrap=50)
        return found.statement()

    assert statement([no], [no], yes).endswith("both sdm_hn and ce_hn reject every answer.")
    more = [yes[:50] + no[: 50 - i] + yes[:i] for i in range(FEW)]
    less = [yes[:10] + no[:90] for _ in range(FEW)]
    says = statement(more, less, yes)
    assert "sdm_hn accepts 52.0% of the generations and ce_hn 10.0%: +42.0 points" in says
    assert f"more in {FEW} of {FEW}" in says
    assert says.endswith(
        f"below alpha = 0.95 in 0 of {FEW} with sdm_hn and in 0 of {FEW} with ce_hn. Here sdm_hn accepts more."
    )
    assert statement(less, more, yes).endswith("Here sdm_hn accepts less.")
    wrong = [False] * 10 + yes[:90]  # a fifth and all of the accepted are wrong
    says = statement(more, less, wrong)
    assert f"in {FEW} of {FEW} with sdm_hn and in {FEW} of {FEW} with ce_hn" in says
    assert says.endswith("Here sdm_hn accepts more, but what sdm_hn accepts is not as accurate as asked for (80.8%).")
    says = statement(less, more, wrong)
    assert says.endswith("Here sdm_hn accepts less, but what ce_hn accepts is not as accurate as asked for (80.8%).")
    none = statement([no] * FEW, more, yes)
    assert f"alpha = 0.95 nowhere with sdm_hn and in 0 of {FEW} with ce_hn" in none
    mixed = [yes, no, yes, no, yes]
    assert statement(mixed, mixed[::-1], yes).endswith("This shows no difference either way.")
    assert "in 0 of 3 with sdm_hn and in 0 of 3 with ce_hn" in statement(mixed, mixed[::-1], yes)
    assert "no difference either way. 2 seeds are few" in statement([yes, no], [no, yes], yes)


def test_one_seed_below_alpha_by_chance_is_no_failure() -> None:
    """Accuracies of 0.9, 1.0, ...: one is below alpha = 0.95, the accepted of all seeds together are not."""
    yes, no = [True] * 100, [False] * 100
    runs = [scripted("sdm_hn", s, yes[: 50 + s] + no[: 50 - s], [s > 0] * 5 + yes[:95]) for s in range(FEW)]
    runs += [scripted("ce_hn", s, yes[:10] + no[:90], yes) for s in range(FEW)]
    (found,) = compare_losses(runs, bootstrap=50)
    assert found.accuracies[0][0] == 0.9
    assert found.pooled == (pytest.approx(1 - 5 / sum(50 + s for s in range(FEW))), 1.0)
    assert "in 1 of 5 with sdm_hn" in found.statement()
    assert found.statement().endswith("Here sdm_hn accepts more.")


def test_equal_differences_of_one_answer_show_nothing() -> None:
    """Student's t alone would give an interval of no width, and so a verdict on a single answer in a hundred."""
    yes, no = [True] * 100, [False] * 100
    runs = [scripted(name, s, a, yes) for s in range(3) for name, a in (("sdm_hn", [True, *no[1:]]), ("ce_hn", no))]
    (found,) = compare_losses(runs, bootstrap=5000)
    assert found.differences == [0.01] * 3
    assert found.interval[0] == 0 < found.interval[1]
    assert found.verdict == "open"


def test_the_interval_over_prompts_keeps_the_seeds_of_a_prompt_together() -> None:
    rng = np.random.default_rng(4)
    masks = {(name, 0): rng.random(300) < share for name, share in (("sdm_hn", 0.3), ("ce_hn", 0.35))}
    masks |= {(name, 1): np.roll(mask, 150) for (name, _), mask in masks.items()}  # Student's t has no width then
    (found,) = compare_losses(
        [scripted(n, s, m.tolist(), [True] * 300) for (n, s), m in masks.items()], bootstrap=20_000
    )
    slow = []
    for _ in range(4000):
        drawn = rng.integers(0, 300, 300)
        means = [masks["sdm_hn", s][drawn].mean() - masks["ce_hn", s][drawn].mean() for s in range(2)]
        slow.append(sum(means) / 2)
    assert found.sd == 0
    assert list(found.interval) == pytest.approx(np.percentile(slow, (2.5, 97.5)).tolist(), abs=0.006)
    (one,) = compare_losses(
        [scripted(n, 0, masks[n, 0].tolist(), [True] * 300) for n in ("sdm_hn", "ce_hn")], bootstrap=20_000
    )
    assert one.interval[1] - one.interval[0] > 1.2 * (found.interval[1] - found.interval[0])


def test_only_what_both_have_is_compared() -> None:
    runs = [run("sdm_hn", 0), run("sdm_hn", 1), run("ce_hn", 1), run("ce_hn", 2), run("sdm_hn", 1, "other")]
    assert [(c.family, c.dataset, c.seeds) for c in compare_losses(runs, bootstrap=10)] == [
        ("fam", "harvard", (1,)),
        ("fam", "test", (1,)),
    ]
    assert compare_losses([run("sdm_hn", 0)]) == []
    shorter = dataclasses.replace(runs[2], evaluations={"test": evaluation(0, n=10)})
    with pytest.raises(ValueError, match="different rows of test"):
        compare_losses([runs[1], shorter])
