"""The tables against plain counting, run by run and prompt by prompt; the comparison against its definition."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import statistics

import numpy as np
import pytest
from example_runs import evaluation, regions, run, scripted, some_runs
from rich.console import Console
from scipy.stats import binom, binomtest

from sdmlm.experiments.loss_comparison import FEW, compare_losses
from sdmlm.experiments.quantities import Quantity, proportion
from sdmlm.experiments.tables import ALPHAS, Tables, tables


@pytest.fixture(scope="module")
def found() -> Tables:
    return tables(some_runs(), bootstrap=200)


def slow_cell(points: list[tuple[int, int, bool]], group: str) -> tuple[float | None, float, int]:
    """Accuracy, n/|D| and n of a group, one point at a time."""
    n = right = 0
    for y, y_hat, admitted in points:
        value = {"y": y, "y_hat": y_hat}.get(group.split("=")[0])
        if admitted and (group == "all" or value == int(group[-1])):
            n += 1
            right += y == y_hat
    return (right / n if n else None), n / len(points), n


def test_full_and_selective_agree_with_counting(found: Tables) -> None:
    by = {(r.setting, r.seed): r for r in some_runs()}
    assert len(found.of("full")) == 3 * 2 * 3
    for line in found.of("full"):
        for i, seed in enumerate(line.seeds):
            e = by[line.setting, seed].evaluations[line.dataset]
            admitted = {"no-reject": [True] * len(e), "HR": e.accepted, "HR lower": e.accepted_lower}[line.estimator]
            points = list(zip(e.y.tolist(), e.prediction.tolist(), map(bool, admitted), strict=True))
            for group in ("y=0", "y=1", "y_hat=0", "y_hat=1", "all"):
                values = tuple(line.quantities[f"{group} {what}"].values[i] for what in ("accuracy", "share", "n"))
                assert values == pytest.approx(slow_cell(points, group))
    for line in found.of("selective"):
        full = next(
            other
            for other in found.of("full")
            if (other.dataset, other.setting, other.estimator) == (line.dataset, line.setting, "HR")
        )
        assert line.quantities["accuracy"] == full.quantities["all accuracy"]
        assert line.quantities["share"].values == full.quantities["all share"].values


def test_generation_and_calibration_are_means_of_what_the_runs_have(found: Tables) -> None:
    by = {(r.setting, r.seed): r for r in some_runs()}
    for line in found.of("generation"):
        for i, seed in enumerate(line.seeds):
            e = by[line.setting, seed].evaluations[line.dataset]
            assert line.quantities["sentence"].values[i] == sum(e.answer_right.tolist()) / len(e)
            assert line.quantities["exact_match"].values[i] == sum(e.exact_match.tolist()) / len(e)
    lines = {line.setting: line for line in found.of("calibration")}
    assert lines["sdm_hn"].quantities["mean_q_0"].values == (40.25,) * 3
    assert lines["none"].quantities["q_min"].values == (None,)
    assert lines["none"].quantities["psi_1"].values == (None,)
    assert lines["none"].quantities["sdm_loss_0"].values == (0.25,)


def test_lines_are_in_the_papers_order_with_seeds_in_theirs(found: Tables) -> None:
    order = [(line.dataset, line.setting) for line in found.of("selective")]
    assert order == [(d, s) for d in ("harvard", "test") for s in ("none", "ce_hn", "sdm_hn")]
    assert [line.seeds for line in found.of("calibration")] == [(7,), (0, 1, 2), (0, 1, 2)]
    assert list(dict.fromkeys(line.table for line in found.lines)) == ["selective", "generation", "full", "calibration"]


def test_a_proportion_has_the_interval_of_resampled_points() -> None:
    hits = np.random.default_rng(0).random(2000) < 0.3
    share, (low, high) = proportion(hits, 20_000, seed=0)
    assert share == hits.mean()
    expected = binom.ppf([0.025, 0.975], 2000, share) / 2000  # resampled hits are binomial
    assert [low, high] == pytest.approx(expected.tolist(), abs=1.5 / 2000)
    assert proportion(hits, 100, seed=0) == proportion(hits, 100, seed=0)
    for n in (1, 9, 200):  # without any variety the exact interval: scipy's, by other means
        for hits, exact in ((n, binomtest(n, n)), (0, binomtest(0, n))):
            share, bounds = proportion(np.arange(n) < hits, 50, 0)
            low, high = exact.proportion_ci(0.95, "exact")
            assert share == hits / n
            assert bounds == pytest.approx((low, high))


def test_intervals_hold_their_values_and_are_seeded() -> None:
    runs = some_runs()
    one, again, other = (tables(runs, 100, seed) for seed in (0, 0, 1))
    assert one == again
    assert one != other
    for line in one.lines:
        for quantity in line.quantities.values():
            for value, interval in zip(quantity.values, quantity.intervals, strict=False):
                if interval is not None and value is not None:
                    assert interval[0] <= value <= interval[1]


def test_quantities_over_seeds() -> None:
    quantity = Quantity((0.5, None, 0.7, 0.9))
    assert quantity.mean == pytest.approx(0.7)
    assert quantity.sd == pytest.approx(0.2)
    assert quantity.text(2, "R") == "0.70 ± 0.20 (0.50 to 0.90), R in 1 of 4"
    assert quantity.text(1, "∞", brief=True) == "0.7, ∞ in 1"
    assert quantity.text(1, "-", brief=True) == "0.7"
    assert quantity.json() == {"values": [0.5, None, 0.7, 0.9], "intervals": [], "mean": pytest.approx(0.7), "sd": pytest.approx(0.2), "min": 0.5, "max": 0.9}  # fmt: skip
    assert Quantity((0.25, None)).text(2, "R") == "0.25, R in 1 of 2"
    assert Quantity((None, None)).text(2, "R") == "R"
    assert Quantity((0.25,), ((0.125, 0.5),)).text(3, "R") == "0.250 [0.125, 0.500]"
    assert Quantity((0.25,), (None,)).text(2, "R") == "0.25"
    assert Quantity((0.001,)).text(2, "R") == "<0.01"
    assert Quantity((0.0,)).text(2, "R") == "0.00"
    assert Quantity((0.001,), ((0.0, 0.003),)).text(2, "R") == "<0.01 [0.00, <0.01]"
    assert Quantity((0.5,)).json() == {"values": [0.5], "intervals": []}


def test_several_families_are_told_apart() -> None:
    names = {line.model for line in tables([run("ce", 0, "a"), run("ce", 0, "b")], 10).lines}
    assert names == {"a: ce", "b: ce"}


def test_runs_of_different_alphas_or_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"alpha 0\.9 and 0\.95"):
        tables([run("ce", 0), run("ce", 1, alpha=0.9)], 10)
    with pytest.raises(ValueError, match="no runs"):
        tables([])


# What is printed


def test_csv_and_json_keep_every_number(found: Tables) -> None:
    data = json.loads(json.dumps(found.json(), allow_nan=False))
    lines = list(csv.DictReader(io.StringIO(found.csv())))
    by_key = {(x["table"], x["dataset"], x["model"], x["estimator"], x["seed"], x["quantity"]): x for x in lines}
    assert len(by_key) == len(lines)
    for line in found.lines:
        plain = next(
            x
            for x in data["tables"][line.table]
            if (x["setting"], x.get("dataset", ""), x.get("estimator", ""))
            == (line.setting, line.dataset, line.estimator)
        )
        for name, quantity in line.quantities.items():
            assert plain["quantities"][name]["values"] == list(quantity.values)
            for seed, value in zip(line.seeds, quantity.values, strict=True):
                told = by_key[line.table, line.dataset, line.model, line.estimator, str(seed), name]["value"]
                assert (float(told) if told else None) == value
                mark = by_key[line.table, line.dataset, line.model, line.estimator, str(seed), name]["mark"]
                assert mark == "" if value is not None else mark in ("all rejected", "no points", "infinite")
            mean = by_key.get((line.table, line.dataset, line.model, line.estimator, "mean", name))
            assert (mean is not None) == (len(line.seeds) > 1)
            if mean is not None and quantity.known:
                assert float(mean["value"]) == pytest.approx(statistics.fmean(quantity.known))
    assert len(data["comparisons"]) == 2


def test_the_full_table_pools_seeds_and_has_the_interval_of_one_seed_or_the_range_of_several(found: Tables) -> None:
    table = found.full()
    assert table.alpha == 0.95
    rows = {(r.dataset, r.model, r.estimator): r.metrics for r in table.rows}
    line = next(x for x in found.of("full") if (x.dataset, x.setting, x.estimator) == ("test", "sdm_hn", "HR"))
    cell = rows["test", "SDM + HN", "HR"].marginal
    admitted = [
        y == c_hat
        for e in (r.evaluations["test"] for r in some_runs() if r.setting == "sdm_hn")
        for y, c_hat, ours in zip(e.y, e.prediction, e.accepted, strict=True)
        if ours
    ]
    assert cell.accuracy == pytest.approx(sum(admitted) / len(admitted))
    assert cell.accuracy != pytest.approx(statistics.fmean(line.quantities["all accuracy"].known))
    assert cell.share == pytest.approx(statistics.fmean(line.quantities["all share"].known))
    known = line.quantities["all accuracy"].known
    assert (cell.low, cell.high) == (min(known), max(known))
    one = next(x for x in found.of("full") if (x.dataset, x.setting, x.estimator) == ("test", "none", "no-reject"))
    alone = rows["test", "No fine-tuning", "no-reject"].marginal
    assert (alone.low, alone.high) == one.quantities["all accuracy"].intervals[0]
    assert rows["test", "No fine-tuning", "HR"].marginal.accuracy is None


def test_cells_say_where_all_was_rejected_and_where_there_was_nothing() -> None:
    nothing, right = [False] * 4, [True] * 4
    some = [scripted("sdm_hn", seed, [True] * 4 if seed == 2 else nothing, right) for seed in range(3)]
    table = tables(some).full()
    rows = {row.estimator: row.metrics for row in table.rows}
    assert (rows["HR"].marginal.accuracy, rows["HR"].marginal.rejected) == (1.0, 2)
    whole = rows["no-reject"]
    empty = [cell for cell in whole.class_conditional if cell.n == 0]
    assert len(empty) == 1
    assert empty[0].empty
    assert not whole.marginal.rejected
    lines = csv.DictReader(io.StringIO(tables(some).csv()))
    marks = {(x["estimator"], x["seed"], x["quantity"]): x["mark"] for x in lines if x["table"] == "full"}
    there = "y=1" if whole.class_conditional[0].empty else "y=0"
    assert marks["HR", "0", f"{there} accuracy"] == marks["HR", "0", "all accuracy"] == "all rejected"
    assert marks["HR", "2", f"{there} accuracy"] == ""
    assert {marks[name, "0", f"{'y=0' if there == 'y=1' else 'y=1'} accuracy"] for name in rows} == {"no points"}
    text = table.latex()
    assert "1.00R2" in text
    assert "Over several seeds: accuracy among the admitted of all of them" in text
    assert "Over several seeds" not in tables(some[:1]).full().latex()
    assert "-" in [cell.strip() for line in text.splitlines() if "no-reject" in line for cell in line.split("&")]


def test_a_seed_without_points_of_a_class_has_rejected_none() -> None:
    """Nothing is rejected by the estimator that rejects nothing, even if two of three seeds never predict a class."""
    predicted = [[1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]
    some = [scripted("sdm_hn", seed, [True] * 4, [True] * 4) for seed in range(3)]
    runs = []
    for one, y in zip(some, predicted, strict=True):
        new = {n: dataclasses.replace(e, prediction=np.array(y), y=np.array(y)) for n, e in one.evaluations.items()}
        runs.append(dataclasses.replace(one, evaluations=new))
    rows = {row.estimator: row.metrics.prediction_conditional[0] for row in tables(runs).full().rows}
    for estimator in ("no-reject", "HR"):
        assert (rows[estimator].accuracy, rows[estimator].rejected, rows[estimator].empty) == (1.0, 0, False)


def test_pooled_accuracies_are_over_all_points(found: Tables) -> None:
    by = {(r.setting, r.seed): r for r in some_runs()}
    for line in found.of("selective"):
        right = total = 0
        for seed in line.seeds:
            e = by[line.setting, seed].evaluations[line.dataset]
            for y, y_hat, admitted in zip(e.y.tolist(), e.prediction.tolist(), e.accepted.tolist(), strict=True):
                total += admitted
                right += admitted and y == y_hat
        assert line.quantities["accuracy"].pooled == (pytest.approx(right / total) if total else None)
        assert ("pooled" in line.quantities["accuracy"].json()) == (len(line.seeds) > 1)
        assert "pooled" not in line.quantities["share"].json()
    quantity = Quantity((1.0, 0.2, None), weights=(2, 98, 0))
    assert quantity.pooled == pytest.approx(0.216)
    assert quantity.text(2, "R") == "0.60 ± 0.57 (0.20 to 1.00), 0.22 pooled, R in 1 of 3"


def test_csv_has_the_comparisons(found: Tables) -> None:
    lines = [x for x in csv.DictReader(io.StringIO(found.csv())) if x["table"] == "comparison"]
    by = {(x["dataset"], x["model"], x["estimator"], x["seed"], x["quantity"]): x for x in lines}
    assert len(by) == len(lines)
    alphas = {f"HR at alpha {alpha:g}" for alpha in (0.8, 0.85, 0.9, 0.95)}
    assert {x["estimator"] for x in lines} == alphas
    for c in (*found.comparisons, *(c for c in found.by_alpha if c.alpha != found.alpha)):
        key = c.dataset, f"HR at alpha {c.alpha:g}"
        row = by[key[0], "SDM + HN minus CE + HN", key[1], "mean", "share"]
        assert [float(row[name]) for name in ("value", "low", "high")] == pytest.approx([c.mean, *c.interval])
        for i, model in enumerate(("SDM + HN", "CE + HN")):
            for seed, shares, accuracies in zip(c.seeds, c.shares, c.accuracies, strict=True):
                assert float(by[key[0], model, key[1], str(seed), "share"]["value"]) == shares[i]
                told = by[key[0], model, key[1], str(seed), "accuracy"]["value"]
                assert (float(told) if told else None) == accuracies[i]


def test_latex_has_four_whole_tables(found: Tables) -> None:
    text = found.latex()
    for name in ("table*", "tabular"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") == 4
    assert text.count("{") == text.count("}")
    first, second, _, last = text.split(r"\end{table*}")[:4]
    assert "test & No fine-tuning & R & 0.00 [0.00, 0.02]" in first
    assert r"$\pm$" in second
    assert r"No fine-tuning & 0.25 & 0.35 & 0.90 & 0.80 & 40.2 & 30.5 & - & - & $\infty$ \\" in last
    assert "∞" not in text
    assert "±" not in text


def test_markdown_has_four_whole_tables_and_the_statements(found: Tables) -> None:
    text = found.markdown()
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert [len(lines) - 2 for lines in tables] == [6, 6, 18, 3]
    for lines in tables:
        assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1
    assert r"| Dataset | Model | Acc. | n/\|D\| |" in text
    assert "| test | No fine-tuning | R | 0.00 [0.00, 0.02] |" in text
    assert "**Generation.**" in text  # no alpha in it
    for comparison in found.comparisons:
        assert comparison.statement() in text


def test_terminal_tables_fit(found: Tables) -> None:
    console = Console(width=80, file=io.StringIO())
    for table in found.rich():
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("harvard", "SDM + HN", "n/|D|", "Exact match", "HR lower", "q'min", "∞", "12.5"):
        assert word in text
    assert "…" not in text


def test_a_line_of_the_full_table_is_a_line_in_the_terminal() -> None:
    nothing, some = [False] * 4, [True] * 4
    runs = [scripted("sdm_hn", seed, some if seed == 2 else nothing, some) for seed in range(3)]
    console = Console(width=80, file=io.StringIO())
    console.print(tables(runs).full().rich())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    (line,) = [line for line in text.splitlines() if line.strip().startswith("HR ") and "lower" not in line]
    assert "1.00R2" in line
    assert line.split()[-1] == "0.33"  # the share of the last column, beside its accuracy


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
    b[:200] = a[:200]  # the same prompts are admitted by both
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
    assert "sdm_hn admits 52.0% of the generations and ce_hn 10.0%: +42.0 points" in says
    assert f"more in {FEW} of {FEW}" in says
    assert says.endswith(
        f"below alpha = 0.95 in 0 of {FEW} with sdm_hn and in 0 of {FEW} with ce_hn. Here sdm_hn admits more."
    )
    assert statement(less, more, yes).endswith("Here sdm_hn admits less.")
    wrong = [False] * 10 + yes[:90]  # a fifth and all of the admitted are wrong
    says = statement(more, less, wrong)
    assert f"in {FEW} of {FEW} with sdm_hn and in {FEW} of {FEW} with ce_hn" in says
    assert says.endswith("Here sdm_hn admits more, but what sdm_hn admits is not as accurate as asked for (80.8%).")
    says = statement(less, more, wrong)
    assert says.endswith("Here sdm_hn admits less, but what ce_hn admits is not as accurate as asked for (80.8%).")
    none = statement([no] * FEW, more, yes)
    assert f"alpha = 0.95 nowhere with sdm_hn and in 0 of {FEW} with ce_hn" in none
    mixed = [yes, no, yes, no, yes]
    assert statement(mixed, mixed[::-1], yes).endswith("This shows no difference either way.")
    assert "in 0 of 3 with sdm_hn and in 0 of 3 with ce_hn" in statement(mixed, mixed[::-1], yes)
    assert "no difference either way. 2 seeds are few" in statement([yes, no], [no, yes], yes)


def test_one_seed_below_alpha_by_chance_is_no_failure() -> None:
    """Accuracies of 0.9, 1.0, ...: one is below alpha = 0.95, the admitted of all seeds together are not."""
    yes, no = [True] * 100, [False] * 100
    runs = [scripted("sdm_hn", s, yes[: 50 + s] + no[: 50 - s], [s > 0] * 5 + yes[:95]) for s in range(FEW)]
    runs += [scripted("ce_hn", s, yes[:10] + no[:90], yes) for s in range(FEW)]
    (found,) = compare_losses(runs, bootstrap=50)
    assert found.accuracies[0][0] == 0.9
    assert found.pooled == (pytest.approx(1 - 5 / sum(50 + s for s in range(FEW))), 1.0)
    assert "in 1 of 5 with sdm_hn" in found.statement()
    assert found.statement().endswith("Here sdm_hn admits more.")


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
