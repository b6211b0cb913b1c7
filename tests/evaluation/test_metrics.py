"""Selective metrics against plain counting, the bootstrap against resampling points, and what the tables print."""

from __future__ import annotations

import csv
import io
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy.stats import binomtest

from sdmlm.evaluation.metrics import Cell, SelectiveMetrics, selective_metrics
from sdmlm.evaluation.selective_table import SelectiveRow, SelectiveTable


def slow_cell(points: list[tuple[int, int]], total: int, empty: bool = False) -> Cell:
    """`points` are the (label, prediction) of the accepted of a group."""
    right = sum(1 for label, prediction in points if label == prediction)
    return Cell(len(points), len(points) / total, right / len(points) if points else None, empty=empty)


problems = st.integers(2, 6).flatmap(
    lambda c: st.tuples(
        st.just(c),
        st.lists(st.tuples(st.integers(0, c - 1), st.integers(0, c - 1), st.booleans()), min_size=1, max_size=60),
    )
)


@settings(max_examples=200, deadline=None)
@given(problems)
def test_metrics_agree_with_counting(problem: tuple[int, list[tuple[int, int, bool]]]) -> None:
    n_classes, points = problem
    metrics = selective_metrics(*zip(*points, strict=True), n_classes)  # type: ignore[call-arg]
    admitted = [(label, prediction) for label, prediction, accepted in points if accepted]
    for c in range(n_classes):
        empty = [all(p[side] != c for p in points) for side in (0, 1)]
        assert metrics.class_conditional[c] == slow_cell([p for p in admitted if p[0] == c], len(points), empty[0])
        assert metrics.prediction_conditional[c] == slow_cell([p for p in admitted if p[1] == c], len(points), empty[1])
    assert metrics.marginal == slow_cell(admitted, len(points))


@settings(max_examples=100, deadline=None)
@given(problems)
def test_groups_add_up_to_the_marginal(problem: tuple[int, list[tuple[int, int, bool]]]) -> None:
    n_classes, points = problem
    metrics = selective_metrics(*zip(*points, strict=True), n_classes, bootstrap=20)  # type: ignore[call-arg]
    for cells in (metrics.class_conditional, metrics.prediction_conditional):
        assert sum(cell.n for cell in cells) == metrics.marginal.n
        assert sum(cell.share for cell in cells) == pytest.approx(metrics.marginal.share)
        if metrics.marginal.accuracy is not None:
            weighted = sum(cell.n * cell.accuracy for cell in cells if cell.accuracy is not None)
            assert weighted / metrics.marginal.n == pytest.approx(metrics.marginal.accuracy)
    for cell in (*metrics.class_conditional, *metrics.prediction_conditional, metrics.marginal):
        assert (cell.accuracy is None) == (cell.n == 0)
        if cell.low is not None and cell.high is not None:
            assert 0 <= cell.low <= cell.high <= 1
            if cell.accuracy in (0.0, 1.0):  # no resample could show anything else: the exact interval
                exact = binomtest(round(cell.n * cell.accuracy), cell.n).proportion_ci(0.95, "exact")
                assert (cell.low, cell.high) == pytest.approx((exact.low, exact.high))


def problem(seed: int, n: int = 300, n_classes: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.choice(n_classes, n, p=[0.6, 0.3, 0.1])
    y_hat = np.where(rng.random(n) < 0.85, y, rng.integers(0, n_classes, n))
    return y, y_hat, rng.random(n) < 0.5


def test_intervals_agree_with_resampling_points_one_by_one() -> None:
    y, y_hat, accepted = problem(0)
    metrics = selective_metrics(y, y_hat, accepted, 3, bootstrap=20_000)
    rng = np.random.default_rng(1)
    seen: dict[tuple[str, int], list[float]] = {}
    for _ in range(3000):
        drawn = rng.integers(0, len(y), len(y))
        a, b, ok = y[drawn], y_hat[drawn], accepted[drawn]
        for name, mask in [
            ("all", [ok]),
            ("y", [ok & (a == c) for c in range(3)]),
            ("p", [ok & (b == c) for c in range(3)]),
        ]:
            for c, group in enumerate(mask):
                if group.any():
                    seen.setdefault((name, c), []).append(float((a == b)[group].mean()))
    cells = {("all", 0): metrics.marginal}
    cells |= {("y", c): cell for c, cell in enumerate(metrics.class_conditional)}
    cells |= {("p", c): cell for c, cell in enumerate(metrics.prediction_conditional)}
    for key, cell in cells.items():
        if cell.accuracy == 1.0:
            assert set(seen[key]) == {1.0}
            continue
        low, high = np.percentile(seen[key], [2.5, 97.5])
        # Percentiles of 3,000 resamples are only so exact: a tenth of the width of the interval.
        assert cell.low == pytest.approx(low, abs=0.1 * (high - low))
        assert cell.high == pytest.approx(high, abs=0.1 * (high - low))


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    truth, covered, repeats = 0.8, 0, 600
    rng = np.random.default_rng(5)
    for seed in range(repeats):
        right = rng.random(400) < truth
        cell = selective_metrics(np.zeros(400, int), 1 - right, rng.random(400) < 0.7, 2, 300, seed).marginal
        assert cell.low is not None
        assert cell.high is not None
        covered += cell.low <= truth <= cell.high
    assert covered / repeats == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / repeats))


def test_few_resamples_may_miss_a_group() -> None:
    y, y_hat, accepted = np.array([0] * 98 + [1, 1]), np.array([0] * 98 + [1, 0]), np.ones(100, bool)
    cells = [selective_metrics(y, y_hat, accepted, 2, 1, seed).class_conditional[1] for seed in range(40)]
    assert {cell.low is None for cell in cells} == {True, False}


def test_bootstrap_is_seeded() -> None:
    first, again, other = (selective_metrics(*problem(2), 3, 100, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert selective_metrics(*problem(2), 3).marginal.low is None


@pytest.mark.parametrize(
    ("labels", "predictions", "accepted", "message"),
    [
        ([], [], [], "at least one point"),
        ([0, 2], [0, 1], [True, True], r"labels must hold whole numbers in 0\.\.1"),
        ([0, -1], [0, 1], [True, True], "labels"),
        ([0, 1], [0, 5], [True, True], "predictions"),
        ([0, 1], [0.5, 1], [True, True], "predictions"),
        ([0, 1], [0, 1], [True], "differ in length"),
        ([0, 1, 1], [0, 1], [True, True], "differ in length"),
    ],
)
def test_bad_input_is_named(labels: list[int], predictions: list[float], accepted: list[bool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selective_metrics(labels, predictions, accepted, 2)


def test_negative_bootstrap_is_named() -> None:
    with pytest.raises(ValueError, match="bootstrap"):
        selective_metrics([0], [0], [True], 2, bootstrap=-1)


def example(n_classes: int = 2, names: list[str] | None = None) -> SelectiveTable:
    """Two datasets, two estimators; in the second dataset everything is rejected by the second estimator."""
    rows = []
    for i, dataset in enumerate(["in_domain", "shifted"]):
        rng = np.random.default_rng(i)
        y = rng.integers(0, n_classes, 500)
        y_hat = np.where(rng.random(500) < 0.97, y, rng.integers(0, n_classes, 500))
        y_hat[0] = y[0]
        for estimator, accepted in [("no-reject", np.ones(500, bool)), ("HR", np.arange(500) < 1 - i)]:
            rows.append(
                SelectiveRow(dataset, "LM & co", estimator, selective_metrics(y, y_hat, accepted, n_classes, 50))
            )
    return SelectiveTable(rows, 0.95, names or [str(c) for c in range(n_classes)])


def printed(table: SelectiveTable, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(table.rich())
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


@pytest.mark.parametrize("n_classes", [2, 7])
def test_json_and_csv_keep_everything(n_classes: int) -> None:
    table = example(n_classes)
    data = json.loads(json.dumps(table.json(), allow_nan=False))
    lines = list(csv.DictReader(io.StringIO(table.csv())))
    assert data["alpha"] == 0.95
    assert len(data["rows"]) == len(lines) == 4
    for row, plain, line in zip(table.rows, data["rows"], lines, strict=True):
        assert (row.dataset, row.model, row.estimator) == (line["dataset"], line["model"], line["estimator"])
        assert (row.dataset, row.model, row.estimator) == (plain["dataset"], plain["model"], plain["estimator"])
        for group, symbol in (("class_conditional", "y"), ("prediction_conditional", "y_hat")):
            assert len(plain[group]) == n_classes
            for c, cell in enumerate(getattr(row.metrics, group)):
                assert Cell(**{k: v for k, v in plain[group][c].items() if k != "class"}) == cell
                assert plain[group][c]["class"] == str(c)
                accuracy = line[f"{symbol}={c} accuracy"]
                assert (float(accuracy) if accuracy else None) == cell.accuracy
                assert int(line[f"{symbol}={c} n"]) == cell.n
        assert float(line["marginal share"]) == row.metrics.marginal.share == plain["marginal"]["share"]
    assert data["rows"][-1]["marginal"] == {"n": 0, "share": 0.0, "accuracy": None, "low": None, "high": None}


def test_latex_follows_the_layout_of_the_paper() -> None:
    text = example().latex()
    body = [line for line in text.splitlines() if line.startswith(("in", "shifted"))]
    assert len(body) == 4
    assert all(line.count(" & ") == 12 for line in body)  # 3 names and 5 pairs
    assert r"in\_domain & LM \& co & HR" in body[1]
    assert r"\multicolumn{4}{c}{Class-conditional}" in text
    assert r"$\hat{y}$=1" in text
    assert text.count(r"\midrule") == 2  # one before each dataset
    assert body[3].count(r"\colorbox{reachesalpha}{R} & 0.00") == 5
    assert "$<$0.01" in body[1]
    for name in ("table*", "tabular"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") == 1
    assert text.count("{") == text.count("}")


def marked(accuracy: float | None, share: float = 0.5) -> tuple[str, str]:
    """The LaTeX and the terminal rendering of one cell."""
    cell = Cell(1, share, accuracy)
    table = SelectiveTable(
        [SelectiveRow("d", "m", "e", SelectiveMetrics((cell, cell), (cell, cell), cell))], 0.95, ["0", "1"]
    )
    return next(line for line in table.latex().splitlines() if line.startswith("d &")), printed(table)


def test_cells_are_marked_before_rounding() -> None:
    red, green = "\x1b[31m", "\x1b[32m"
    latex, terminal = marked(0.9499)
    assert latex.count(r"\colorbox{belowalpha}{0.95}") == 5
    assert terminal.count(f"{red}0.95") == 5
    latex, terminal = marked(0.95)
    assert latex.count(r"\colorbox{reachesalpha}{0.95}") == 5
    assert terminal.count(f"{green}0.95") == 5
    latex, terminal = marked(None, 0.0)
    assert latex.count(r"\colorbox{reachesalpha}{R}") == 5
    assert red not in terminal
    assert "all rejected" in terminal
    for share, text in [(0.0, "0.00"), (0.0001, "<0.01"), (0.0049, "<0.01"), (0.006, "0.01"), (0.999, "1.00")]:
        assert text in marked(1.0, share)[1].split("1.00", 1)[1]


def test_marks_are_explained_only_where_they_stand() -> None:
    def marks(*cells: Cell) -> str:
        table = SelectiveTable(
            [SelectiveRow("d", "m", "e", SelectiveMetrics(cells[:2], cells[2:4], cells[4]))], 0.95, ["0", "1"]
        )
        assert table.marks() in table.latex()
        return table.marks()

    plain, some, nothing = Cell(1, 0.5, 1.0), Cell(1, 0.5, 1.0, rejected=2), Cell(0, 0.0, None, empty=True)
    assert marks(plain, plain, plain, plain, plain) == "R: all rejected"
    assert marks(plain, plain, plain, some, plain) == "R: all rejected (0.97R2: in 2 seeds)"
    assert marks(plain, nothing, plain, plain, plain) == "R: all rejected; -: no such points"
    row = SelectiveRow("d", "m", "e", SelectiveMetrics((plain, plain), (plain, plain), plain))
    assert (
        SelectiveTable([row], 0.95, ["0", "1"], seeds=3)
        .marks()
        .endswith("accuracy among the accepted of all of them, mean share")
    )


def test_terminal_table_fits_and_names_everything() -> None:
    text = printed(example(names=["no", "yes[b]"]), width=80)
    for word in ("in_domain", "shifted", "LM & co", "no-reject", "HR", "y=no", "ŷ=yes[b]", "<0.01", "0.95"):
        assert word in text
    assert "…" not in text


def test_many_classes_show_the_worst_cell() -> None:
    table = example(7, [f"c_{c}" for c in range(7)])
    text, latex = printed(table, width=80), table.latex()
    first = table.rows[0].metrics
    for cells in (first.class_conditional, first.prediction_conditional):
        worst = min(range(7), key=lambda c: cells[c].accuracy)
        assert f"c_{worst}: " in text
        assert rf"{{c\_{worst}: {cells[worst].accuracy:.2f}}} & {cells[worst].share:.2f}" in latex
    assert "worst" in text
    last = latex.splitlines()[-4]
    assert last.startswith("shifted & LM \\& co & HR")
    assert last.count("{R}") == 3


def test_markdown_marks_what_is_below_alpha() -> None:
    labels, predictions = [0] * 300 + [1] * 300, [0] * 290 + [1] * 310
    accepted = [True] * 295 + [False] * 303 + [True, False]
    rows = [
        SelectiveRow("a|b", "m", "HR", selective_metrics(labels, predictions, accepted, 2)),
        SelectiveRow("a|b", "m", "none", selective_metrics(labels, predictions, [False] * 600, 2)),
    ]
    head, rule, first, second = SelectiveTable(rows, 0.99, ["no", "yes"]).markdown().splitlines()
    assert head == "| Dataset | Model | Estimator | y=no | y=yes | ŷ=no | ŷ=yes | all |"
    assert rule.count("---:") == 5
    assert first == (
        r"| a\|b | m | HR | **0.98** (0.49) | 1.00 (&lt;0.01) | 1.00 (0.48) | **0.17** (0.01) | **0.98** (0.49) |"
    )
    assert second.endswith("| R (0.00) | R (0.00) | R (0.00) | R (0.00) | R (0.00) |")
