"""The comparison of scores for the runs of an experiment: its file, and the table over seeds."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

from sdmlm.evaluation.metrics import auroc
from sdmlm.evaluation.score_table import ScoredPoints, ScoreTable
from sdmlm.experiments.answer_comparison import AnswerComparison
from sdmlm.experiments.answer_runs import (
    StoredComparison,
    comparison_csv,
    comparison_rows,
    read_comparison,
    write_comparison,
)
from sdmlm.experiments.runs import Run
from sdmlm.report.replication import _scores


def points(seed: int, n: int = 60) -> list[ScoredPoints]:
    rng = np.random.default_rng(seed)
    right = rng.random(n) < 0.7
    score = rng.normal(right)
    return [
        ScoredPoints("test", "", "mean log-probability", score, score > 1, right),
        ScoredPoints("shifted", "", "mean log-probability", score, np.zeros(n, bool), np.zeros(n, bool)),
    ]


def stored(seed: int) -> StoredComparison:
    return StoredComparison(tuple(points(seed)), 0.9, 2)


def run(seed: int, answers: StoredComparison | None) -> Run:
    return Run("demo", "sdm_hn", "SDM + HN", seed, {}, answers=answers)


def test_a_comparison_is_kept_for_the_layer_that_made_it(tmp_path: Path) -> None:
    assert read_comparison(tmp_path, "layer") is None
    table = ScoreTable(points(0), 0.9)
    write_comparison(tmp_path, AnswerComparison(table, {}, {}, 2), "layer")
    assert read_comparison(tmp_path, "another layer") is None
    for layer in ("layer", None):
        again = read_comparison(tmp_path, layer)
        assert again is not None
        assert (again.alpha, again.samples) == (0.9, 2)
        for one, before in zip(again.points, table.rows, strict=True):
            assert (one.dataset, one.estimator) == (before.dataset, before.estimator)
            np.testing.assert_array_equal(np.argsort(one.scores), np.argsort(before.scores))
            np.testing.assert_array_equal(one.accepted, before.accepted)
            np.testing.assert_array_equal(one.correct, before.correct)
    (tmp_path / "answers.json").write_text("{")
    with pytest.raises(ValueError, match=r"answers.json is damaged"):
        read_comparison(tmp_path, "layer")


def test_the_table_has_means_over_the_seeds() -> None:
    runs = [run(seed, stored(seed)) for seed in range(3)]
    rows = comparison_rows(runs)
    assert [row[:3] for row in rows] == [
        ["demo: SDM + HN", "test", "mean log-probability"],
        ["demo: SDM + HN", "shifted", "mean log-probability"],
    ]
    areas = [auroc(points(seed)[0].scores, points(seed)[0].correct) for seed in range(3)]
    assert rows[0][3] == f"{fmean(areas):.3f} ({stdev(areas):.3f})"
    assert rows[1][3] == "-"  # nothing there is right
    lines = comparison_csv(runs).splitlines()
    assert len(lines) == 1 + 2 * 3
    assert lines[1].startswith("demo,SDM + HN,0,test,mean log-probability,")


def test_the_report_shows_scores_only_where_they_were_compared() -> None:
    assert _scores([run(0, None)]) == ""
    page = _scores([run(0, stored(0)), run(1, None)])
    assert "Which score tells right answers from wrong ones?" in page
    assert "writes 2 further answers" in page
    assert "<svg" in page or "<img" in page
