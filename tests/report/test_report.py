"""The HTML report and its plots."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from sdmlm.estimator.embedding_files import Embeddings
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.evaluation.metrics import selective_metrics
from sdmlm.evaluation.score_table import ScoredPoints
from sdmlm.evaluation.selective_table import SelectiveRow, SelectiveTable
from sdmlm.report import Example, plots, write_report

VOID = {"meta", "br", "link", "img", "hr", "input"}


def blobs(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    return (rng.normal(size=(n, 6)) + 1.2 * y[:, None]).astype(np.float32), y


def embeddings(n: int, seed: int = 1, labels: bool = True) -> Embeddings:
    X, y = blobs(n, seed)
    return Embeddings(X, y if labels else None, ["bad", "good"], list(range(n)), None, None)


@pytest.fixture(scope="module")
def estimator() -> SDMEstimator:
    parameters = {"exemplar_dim": 16, "epochs": 15, "learning_rate": 1e-2, "rounds": 1, "progress": False}
    return SDMEstimator.published(alpha=0.9, **parameters).fit(*blobs(400))


class Page(HTMLParser):
    """Collects what a page holds and checks that its tags match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self.rows: list[list[str]] = []  # of all tables
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_suspected_label_errors_are_shown(tmp_path: Path) -> None:
    X, y = blobs(300)
    X[y == 1] += 3
    y = y.copy()
    wrong = list(range(0, 120, 10))
    y[wrong] = 1 - y[wrong]
    texts = {i: f"<b>{i}</b>" for i in range(300)}
    estimator = SDMEstimator(rule="region", rounds=1, progress=False).fit(X, y, documents=texts)
    write_report(tmp_path / "r.html", estimator, class_names=["bad", "good"])
    found = page(tmp_path / "r.html")
    assert "Suspected label errors" in found.text
    assert "averages over 5 cross-fitted layers" in found.text
    head = ["id", "label", "suggested", "confidence", "q", "d", "text"]
    rows = found.rows[found.rows.index(head) + 1 :][:11]
    listed = [row for row in rows if len(row) == 7 and row[6].startswith("<b>")]
    assert len(listed) == 10
    assert {int(row[0]) for row in listed} <= set(wrong)
    assert all({row[1], row[2]} == {"bad", "good"} and row[6] == f"<b>{row[0]}</b>" for row in listed)


def test_report_of_a_certified_rule(tmp_path: Path) -> None:
    X, y = blobs(400)
    X[y == 1] += 2
    estimator = SDMEstimator(alpha=0.9, epsilon=0.1, rounds=2, progress=False).fit(X, y)
    write_report(tmp_path / "r.html", estimator, class_names=["bad", "good"])
    found, rule = page(tmp_path / "r.html"), estimator.certificate_
    accepted = rule.accepts(estimator.calibration_evidence())
    assert 0.5 < accepted.mean() < 1
    assert f"the certified rule accepts {accepted.mean():.1%} of the {len(accepted)} calibration points" in found.text
    assert "with probability at least 0.95, at least 90% of all accepted predictions are right" in found.text
    far = int((~rule.near_enough(estimator.calibration_.d.numpy())).sum())
    assert ["not accepted because d is smaller", f"{far} ({far / len(accepted):.1%})"] in found.rows
    assert 0.04 < far / len(accepted) <= 0.1  # steps of d are equal for some points
    layers = [row for row in found.rows if len(row) == 5 and row[0].isdecimal()]
    assert len(layers) == len(estimator.layers_)
    write_report(tmp_path / "s.html", estimator, embeddings(60, labels=False), class_names=["bad", "good"])
    shown = estimator.score(blobs(60, 1)[0]).accepted
    assert f"accepts {shown.mean():.1%} of the 60 scored points" in page(tmp_path / "s.html").text


@pytest.mark.filterwarnings("error")
def test_names_and_texts_cannot_hide_or_reverse_anything(estimator: SDMEstimator, tmp_path: Path) -> None:
    """Terminal escapes, bidirectional and zero-width characters are shown as escapes, in figures too."""
    hidden = "\x1b[2J\x9b\u202e\u200b"
    path = tmp_path / "report.html"
    names = [f"name {c}{hidden}" for c in range(len(estimator.classes_))]
    write_report(path, estimator, title=f"title{hidden}", class_names=names)
    page = path.read_text(encoding="utf-8")
    assert not set(hidden) - set("[2J") & set(page)
    shown = r"\x1b[2J\x9b\u202e\u200b"
    assert f"title{shown}" in page
    svg = "".join(re.findall("<svg.*?</svg>", page, re.DOTALL))
    assert f"name 0{shown}" in svg


def test_names_that_matplotlib_would_read_otherwise(estimator: SDMEstimator, tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", estimator, class_names=["a$_$b^$", "_hidden"])
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert text.count("_hidden") > text.count("<td>_hidden")
    figure = plots.distributions(estimator, None, ["a$_$b^$", "_hidden"])
    shown = [
        t.get_text()
        for legend in [*figure.legends, *(a.get_legend() for a in figure.axes)]
        if legend
        for t in legend.get_texts()
    ]
    assert {r"a\$_\$b^\$", "\u200b_hidden"} <= set(shown)


@pytest.fixture(scope="module")
def report(estimator: SDMEstimator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on the calibration points, alone in its folder."""
    path = tmp_path_factory.mktemp("report") / "r.html"
    write_report(path, estimator, title="A <title> & more", class_names=["<b>bad</b>", "good"])
    return path


def test_report_on_calibration_points(estimator: SDMEstimator, report: Path) -> None:
    found = page(report)
    assert "b" not in found.counts  # names are text, not markup
    assert "<b>bad</b>" in found.text
    assert "A <title> & more" in found.text
    assert found.counts["svg"] == found.counts["figure"] == found.counts["figcaption"] == 5
    assert found.counts["table"] == found.counts["caption"] == 3
    ca, region = estimator.layers_[0].calibration, estimator.region_
    inside = region.contains(ca.q_prime, ca.p, ca.predictions)
    assert f"accepts {float(inside.double().mean()):.1%} of the {len(inside)} calibration points" in found.text
    assert f"{region.q_min:.4g}" in found.text
    assert "Comparison" not in found.text
    assert "Examples" not in found.text
    assert [p.name for p in report.parent.iterdir()] == ["r.html"]


def test_report_stands_alone_and_is_accessible(report: Path) -> None:
    text, found = report.read_text(encoding="utf-8"), page(report)
    for tag, name, value in found.attributes:
        if name in ("src", "href", "xlink:href"):
            assert (value or "").startswith("#"), (tag, name, value)
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    labels = [value for tag, name, value in found.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == len(set(labels)) == 5
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))  # figures keep their parts apart
    targets = [(value or "")[1:] for _, name, value in found.attributes if name == "xlink:href"]
    assert set(targets) <= set(ids)
    assert plots.INK not in text  # axes take the colour of the page, light or dark
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_same_data_same_file(estimator: SDMEstimator, report: Path, tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", estimator, title="A <title> & more", class_names=["<b>bad</b>", "good"])
    assert (tmp_path / "r.html").read_bytes() == report.read_bytes()


def test_report_with_data_tables_and_examples(estimator: SDMEstimator, tmp_path: Path) -> None:
    data = embeddings(5000)
    scores = estimator.score(data.X)
    metrics = selective_metrics(data.labels("data"), scores.prediction, scores.accepted, 2)
    nothing = selective_metrics(data.labels("data"), scores.prediction, np.zeros(5000, bool), 2)
    rows = [SelectiveRow("test", "toy", "SDM HR", metrics), SelectiveRow("test", "toy", "never", nothing)]
    tables = [("All estimators", SelectiveTable(rows, 1.0, ["bad", "good"]))]
    examples = [Example("Row 0", "some <text>", e) for e in estimator.explain(data.X[:2], k=3)]
    write_report(tmp_path / "r.html", estimator, data, scores, tables, examples, class_names=["bad", "good"])
    found = page(tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size < 2_000_000
    assert "A random sample of 3000 of 5000 points" in found.text
    y, accepted, right = data.labels("data"), scores.accepted, scores.prediction == data.labels("data")
    assert f"Of these, {right[accepted].mean():.1%} are right; over all points {right.mean():.1%} are." in found.text
    for c, name in enumerate(["bad", "good"]):
        cells = [name, f"{estimator.region_.psi[c]:.4g}"]
        for group in (y == c, scores.prediction == c):
            inside = group & accepted
            cells += [str(group.sum()), f"{inside.sum() / group.sum():.1%}", f"{right[inside].mean():.1%}"]
        assert cells in found.rows
    assert right[accepted].mean() < 1
    assert "of the 5000 scored points" in found.text
    assert "all rejected" in found.text
    assert f"▼ {metrics.marginal.accuracy:.3f} ({metrics.marginal.share:.2f})" in found.text
    assert found.counts["article"] == 2
    assert examples[0].explanation.reason in found.text
    assert "some <text>" in found.text


def test_report_without_labels_or_region(estimator: SDMEstimator, tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", estimator, embeddings(50, labels=False))
    assert "Reliability" not in page(tmp_path / "r.html").text
    parameters = {"exemplar_dim": 8, "epochs": 2, "learning_rate": 1e-6, "rounds": 1, "progress": False}
    hopeless = SDMEstimator.published(alpha=0.99, **parameters).fit(*blobs(60))
    write_report(tmp_path / "none.html", hopeless, embeddings(50))
    assert "there is no high-reliability region" in page(tmp_path / "none.html").text


def test_more_classes_than_can_be_told_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(300) % 15
    X = rng.normal(size=(15, 8))[y] * 4 + rng.normal(size=(300, 8))
    parameters = {"exemplar_dim": 16, "epochs": 10, "learning_rate": 1e-2, "rounds": 1, "progress": False}
    many = SDMEstimator.published(alpha=0.9, **parameters).fit(X, y)
    assert len(plots.shown_classes(many)) == 10
    write_report(tmp_path / "r.html", many)
    assert "Only the 10 classes with the most points are drawn" in page(tmp_path / "r.html").text


def test_a_failure_leaves_the_old_report(
    estimator: SDMEstimator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(path, estimator)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_reliability_bins() -> None:
    probability = np.array([0.05, 0.95, 0.97, 1.0])
    mean, accuracy, count, error = plots.reliability_bins(probability, np.array([False, True, True, False]))
    assert count.tolist() == [1, 3]
    np.testing.assert_allclose(mean, [0.05, 2.92 / 3])
    np.testing.assert_allclose(accuracy, [0.0, 2 / 3])
    assert error == pytest.approx((0.05 + 0.92) / 4)


def test_scatter_tells_right_from_wrong_and_accepted_from_rejected(estimator: SDMEstimator) -> None:
    view = plots.calibration_view(estimator)
    with matplotlib.rc_context(plots.STYLE):
        (axes,) = plots.similarity_distance(estimator.region_, view).axes
    lines = {str(line.get_label()).rsplit(" ", 1)[0]: line for line in axes.get_lines()}
    for name, right in (("right", True), ("wrong", False)):
        for decision, accepted in (("accepted", True), ("rejected", False)):
            line, here = lines[f"{name} {decision}"], (view.right == right) & (view.accepted == accepted)
            assert len(line.get_xdata()) == here.sum()
            assert (line.get_markerfacecolor() == "none") != accepted
    assert lines["right accepted"].get_marker() != lines["wrong accepted"].get_marker()
    assert len(axes.collections) == 1  # the shaded region


def test_admitted_share_against_alpha(estimator: SDMEstimator) -> None:
    view = plots.calibration_view(estimator)
    with matplotlib.rc_context(plots.STYLE):
        left, right = plots.against_alpha(estimator, view).axes
    alphas, shares = left.get_lines()[0].get_data()
    at = list(alphas).index(0.9)
    assert shares[at] == pytest.approx(view.accepted.mean())
    assert view.labels is not None
    worst = []
    for groups in (view.labels, view.predictions):
        inside = [view.accepted & (groups == c) for c in (0, 1)]
        worst.append(min(view.right[some].mean() for some in inside if some.any()))
    assert len({view.right[view.accepted].mean(), *worst}) > 1
    found = [line.get_data()[1][at] for line in right.get_lines()[:3]]
    assert found == pytest.approx([view.right[view.accepted].mean(), *worst])


def test_scatter_of_many_points_is_a_sample(estimator: SDMEstimator) -> None:
    view = plots.scored_view(estimator.score(blobs(4000, seed=3)[0]), None)
    with matplotlib.rc_context(plots.STYLE):
        (axes,) = plots.similarity_distance(estimator.region_, view).axes
    assert sum(len(line.get_xdata()) for line in axes.get_lines() if line.get_marker() == "o") == plots.MOST_POINTS


def test_risk_coverage_shows_every_curve_and_the_rule_of_each_estimator() -> None:
    correct = np.array([True, False, True, True])
    scores = np.array([4.0, 3.0, 2.0, 1.0])
    good = ScoredPoints("d", "m", "one", scores, scores > 1.5, correct)
    none = ScoredPoints("d", "m", "other", -scores, np.zeros(4, bool), correct)
    (axes,) = plots.risk_coverage([good, none], alpha=0.9).axes
    lines = {line.get_label(): line for line in axes.lines}
    first, second = (str(name) for name in lines if "AURC" in str(name))
    assert first == f"one (AURC {np.mean([0, 1 / 2, 1 / 3, 1 / 4]):.3f})"
    assert lines[first].get_xdata().tolist() == [0.25, 0.5, 0.75, 1.0]
    assert lines[first].get_ydata().tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 4])
    assert second.startswith("other")
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [(float(d.get_xdata()[0]), float(d.get_ydata()[0])) for d in dots] == [(0.75, pytest.approx(1 / 3))]
