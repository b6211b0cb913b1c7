"""The report over runs: whole, self-contained, with the paper's figures beside ours and curves that can be checked."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_runs import run, some_runs

from sdmlm.experiments import published as paper
from sdmlm.experiments.runs import Run
from sdmlm.experiments.tables import tables
from sdmlm.report.replication import alpha_curves, evaluations_of, outcomes, training_curves, write_report


def history(sdm: bool, evaluations: int = 4) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for n in range(evaluations):
        step = 10 * (n + 1)
        rows += [{"loss": 1.0, "step": step - 5, **({"base": 2.2 + n / 10} if sdm else {})}]
        rows += [{"loss": 1.0, "step": step, **({"base": 2.4 + n / 10} if sdm else {})}]
        layer = {"eval_admitted": n / 10, "eval_sdm_loss": 1 / (n + 1), "eval_q_min": None if n == 0 else 9.0 - n}
        rows.append({"eval_loss": 1 / (n + 2), "epoch": (n + 1) / 2, "step": step, **(layer if sdm else {})})
    return [*rows, {"train_runtime": 90.0, "step": 10 * evaluations, "epoch": 2.0}]


def trained_runs() -> list[Run]:
    return [
        dataclasses.replace(r, history=[] if r.setting == "none" else history(r.setting == "sdm_hn"))
        for r in some_runs()
    ]


def test_evaluations_of_a_history() -> None:
    found = evaluations_of(history(sdm=True))
    assert found["epoch"] == [0.5, 1.0, 1.5, 2.0]
    assert found["eval_loss"] == [1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert found["eval_admitted"] == [0.0, 0.1, 0.2, 0.3]
    assert found["base"] == pytest.approx([2.3, 2.4, 2.5, 2.6])  # of the two logs before each
    assert np.isnan(found["eval_q_min"][0])  # infinite
    assert found["eval_q_min"][1:] == [8.0, 7.0, 6.0]
    ce = evaluations_of(history(sdm=False))
    assert ce["eval_loss"] == found["eval_loss"]
    assert np.isnan([ce[name] for name in ("eval_admitted", "eval_sdm_loss", "eval_q_min", "base")]).all()


def test_curves_show_every_run_and_only_what_it_has() -> None:
    figure = training_curves(trained_runs())
    assert figure is not None
    lines = {axes.get_title(): len(axes.get_lines()) for axes in figure.axes}
    assert lines["Next-token loss over D_ca"] == 6
    assert lines["Accepted, static negatives"] == lines["Mean base b"] == lines["q'min, static negatives"] == 3
    labels = [text.get_text() for text in figure.axes[-1].get_legend().get_texts()]
    assert sorted(labels) == ["CE + HN", "SDM + HN"]
    assert training_curves(some_runs()) is None
    alone = training_curves([run for run in trained_runs() if run.setting == "ce_hn"])  # has no SDM layers to show
    assert alone is not None
    assert [axes.get_title() for axes in alone.axes] == ["Next-token loss over D_ca", ""]
    assert alone.axes[-1].get_legend() is not None


def test_curves_by_alpha_show_every_run() -> None:
    runs = some_runs()
    figure = alpha_curves(runs)
    assert len(figure.axes) == 4  # two test sets
    for (share, accuracy), test in zip(np.reshape(figure.axes, (2, 2)), ("harvard", "test"), strict=True):
        assert share.get_ylabel() == test
        drawn = [line for line in share.get_lines() if len(line.get_xdata()) > 2]
        assert len(drawn) == len(runs)
        e = next(r for r in runs if (r.setting, r.seed) == ("ce_hn", 0)).evaluations[test]
        at = [region[0] for region in e.regions].index(0.8)
        inside = e.accepted_at(0.8)
        mine = [
            line for line in accuracy.get_lines()
            if len(line.get_xdata()) > 2 and line.get_ydata()[at] == (e.y == e.prediction)[inside].mean()
        ]  # fmt: skip
        assert inside.sum() >= 20
        assert mine
        few = [n for n, region in enumerate(e.regions) if e.accepted_at(region[0]).sum() < 20]
        assert few
        assert np.isnan(mine[0].get_ydata()[few]).all()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["No fine-tuning", "CE + HN", "SDM + HN"]


def test_bars_show_what_became_of_every_answer() -> None:
    runs = some_runs()
    (axes,) = outcomes(runs).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [f"{t}, {s}" for t in ("harvard", "test") for s in ("No fine-tuning", "CE + HN", "SDM + HN")]
    right, wrong, rest = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert np.add(np.add(right, wrong), rest) == pytest.approx(np.ones(6))
    mine = [r.evaluations["test"] for r in runs if r.setting == "sdm_hn"]
    assert right[-1] == pytest.approx(np.mean([(e.accepted & (e.y == e.prediction)).mean() for e in mine]))
    assert wrong[-1] == pytest.approx(np.mean([(e.accepted & (e.y != e.prediction)).mean() for e in mine]))
    assert rest[0] == 1.0


def test_no_line_is_drawn_through_two_evaluations() -> None:
    runs = [dataclasses.replace(run("sdm_hn", 0), history=history(sdm=True, evaluations=n)) for n in (2, 3)]
    for one, style in zip(runs, ("None", "-"), strict=True):
        figure = training_curves([one])
        assert figure is not None
        assert {line.get_linestyle() for axes in figure.axes for line in axes.get_lines()} == {style}


def test_the_page_opens_with_a_picture_and_marks_hidden_characters(tmp_path: Path) -> None:
    runs = some_runs()
    write_report(tmp_path / "report.html", runs, tables(runs, bootstrap=20), title="A \u202etitle\u200b")
    text = (tmp_path / "report.html").read_text()
    assert text.index("<figure") < text.index("<table")
    assert text.index("own answers to test prompts</h2>") < text.index("over calibration documents</h2>")
    assert "not verified: a person should look" in text
    assert r"A \u202etitle\u200b" in text
    assert "\u202e" not in text


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "path", "use", "rect"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        self.outside += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href") and not str(v).startswith("#")]

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "use", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


def test_the_page_is_whole_and_has_the_papers_figures_beside_ours(tmp_path: Path) -> None:
    runs = trained_runs()
    found = tables(runs, bootstrap=50)
    write_report(tmp_path / "report.html", runs, found, more=[("Answers", "<p>more</p>")], intro="For a <start>.")
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.outside == []
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    line = next(x for x in found.of("selective") if (x.dataset, x.setting) == ("test", "sdm_hn"))
    ours = [line.quantities["accuracy"].text(2, "R"), line.quantities["share"].text(2, "-")]
    assert ["test", "SDM + HN", *ours, *paper.SELECTIVE["test", "sdm_hn"]] in page.rows
    assert next(row for row in page.rows if row[:2] == ["test", "No fine-tuning"])[2] == "R"
    at = page.rows.index(["paper: CE + HN", *paper.CALIBRATION["ce_hn",]])
    assert page.rows[at - 1][0] == "CE + HN"
    assert "<dt>HN</dt>" in text
    assert not any(row[0] == "paper: SDM + HN" and row[-1] == "82.0" for row in page.rows)  # the re-run's is not ours
    assert "Training curves of fam" in text
    assert "more in 3 of 3" in text
    assert "<p>For a &lt;start&gt;.</p>" in text
    assert "<h2>Answers</h2><p>more</p>" in text
    assert "nan" not in text.lower().replace("domina", "")


def test_other_settings_and_test_sets_stand_without_the_paper(tmp_path: Path) -> None:
    runs = [dataclasses.replace(run("mine & <own>", 0), evaluations={"other": run("x", 0).evaluations["test"]})]
    write_report(tmp_path / "report.html", runs, tables(runs, bootstrap=20), title="A <title>")
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    row = next(row for row in page.rows if row[:1] == ["other"])
    assert row[1] == "mine & <own>"
    assert "A &lt;title&gt;" in text
    assert "nothing is compared" in text
    assert "No run was trained" in text


def test_the_papers_figures_stand_only_beside_runs_of_its_task(tmp_path: Path) -> None:
    same = [run("sdm_hn", 0), run("ce_hn", 0)]
    mixed = [same[0], dataclasses.replace(same[1], task="arithmetic")]
    for name, runs, beside in (("same", same, True), ("mixed", mixed, False)):
        write_report(tmp_path / f"{name}.html", runs, tables(runs, bootstrap=20))
        assert ("as published" in (tmp_path / f"{name}.html").read_text()) is beside
