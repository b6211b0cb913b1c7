"""The tables of the experiments."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics

import numpy as np
import pytest
import reference as slow
from example_runs import run, scripted, some_runs
from rich.console import Console
from scipy.stats import binom, binomtest

from sdmlm.experiments.quantities import Quantity, proportion
from sdmlm.experiments.tables import Tables, tables


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
                assert values == pytest.approx(slow.group_cell(points, group))
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
    assert "Over several seeds: accuracy among the accepted of all of them" in text
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
