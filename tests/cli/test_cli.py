"""The commands of the estimator: score, explain, compare, certify, and the whole of `sdmlm`."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_checks import SMALL, fails, points, strict_json, write_npz

from sdmlm import __version__
from sdmlm.cli import common, main
from sdmlm.cli.commands.explain import parse_rows

# The whole command


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"sdmlm {__version__}\n"
    for command in ("fit", "score", "explain", "compare", "certify", "demo"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"examples:\n  sdmlm {command}" in capsys.readouterr().out


@pytest.mark.parametrize("args", [[], ["nonsense"], ["fit"], ["fit", "a.npz", "--output", "b", "--epochs", "many"]])
def test_wrong_usage_exits_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_help_does_not_load_torch() -> None:
    code = "import sys; from sdmlm.cli import build_parser; build_parser(); print({'torch', 'matplotlib', 'numpy'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_closed_pipe_is_no_error() -> None:
    code = (
        "import sys; from sdmlm import cli; from sdmlm.cli.commands import score; score.run = lambda args: print('x' * 1_000_000);"
        "sys.exit(cli.main(['score', 'a', 'b']))"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_scoring_what_was_fitted_over_is_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, new = write_npz(tmp_path / "train.npz", 80), write_npz(tmp_path / "new.npz", 80, seed=5)
    assert main(["fit", train, "--output", str(tmp_path / "est"), *SMALL]) == 0
    capsys.readouterr()
    assert main(["score", str(tmp_path / "est"), train]) == 0
    assert "100% of the first points were used for fitting" in capsys.readouterr().err
    assert main(["score", str(tmp_path / "est"), new]) == 0
    assert capsys.readouterr().err == ""


def test_an_estimator_is_looked_for_in_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lm" / "sdm").mkdir(parents=True)
    for folder in ("lm", "lm/sdm"):
        (tmp_path / folder / "config.json").write_text("{}")
    data = write_npz(tmp_path / "new.npz", 8)
    assert f"its SDM layer is {tmp_path / 'lm' / 'sdm'}" in fails(capsys, "score", str(tmp_path / "lm"), data)


def test_unknown_calibration_label_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write_npz(tmp_path / "train.npz", 40, names=("cat", "dog"))
    held = write_npz(tmp_path / "held.npz", 40, names=("cat", "wolf"))
    err = fails(capsys, "fit", train, "--calibration", held, "--output", str(tmp_path / "est"), *SMALL)
    assert "outside the classes (cat, dog), the first in row 1" in err


def test_wrong_width_and_unknown_labels_at_score_time(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    X, y = points(10, width=5)
    np.savez(tmp_path / "narrow.npz", X=X, y=y)
    unknown = write_npz(tmp_path / "unknown.npz", 10, names=("bad", "ugly"))
    for command in ("score", "explain", "certify"):
        assert "8 wide" in fails(capsys, command, saved, str(tmp_path / "narrow.npz"))
    output = tmp_path / "rows.csv"
    assert "outside the classes" in fails(capsys, "score", saved, unknown, "--output", str(output))
    assert "outside the classes" in fails(capsys, "certify", saved, unknown)
    assert not output.exists()


# score


def test_score_writes_rows_and_prints_the_same_as_json(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.array([f"t{i}" for i in range(60)])
    data = write_npz(tmp_path / "test.npz", 60, seed=2, names=("bad", "good"), ids=ids)
    capsys.readouterr()
    report = tmp_path / "score.html"
    args = ["score", saved, data, "--output", str(tmp_path / "rows.jsonl"), "--report", str(report), "--json"]
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert err == ""
    facts = strict_json(out)
    rows = [strict_json(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == facts["rows"]
    assert [row["id"] for row in rows] == ids.tolist()
    assert {row["label"] for row in rows} == {"bad", "good"}
    estimator, _ = common.load_estimator(saved)
    scores = estimator.score(points(60, seed=2)[0])
    assert [row["accepted"] for row in rows] == scores.accepted.tolist()
    assert [row["prediction"] for row in rows] == [("bad", "good")[c] for c in scores.prediction]
    assert [row["probability"] for row in rows] == pytest.approx(scores.probability)
    counts = facts["summary"]
    assert counts["accepted"] + counts["rejected"] + counts["out_of_distribution"] == counts["points"] == 60
    hr = next(row for row in counts["metrics"] if row["estimator"] == "SDM HR")
    right = scores.prediction == points(60)[1]
    assert hr["marginal"]["accuracy"] == pytest.approx(right[scores.accepted].mean())
    assert "scored points" in report.read_text()


def test_score_csv_other_alpha_and_no_labels(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_npz(tmp_path / "test.npz", 30, seed=2, y=None)
    output = tmp_path / "rows.csv"
    assert main(["score", saved, data, "--alpha", "0.999", "--output", str(output)]) == 0
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 30
    assert "label" not in rows[0]
    out, _ = capsys.readouterr()
    assert "alpha 0.999" in out
    assert "out of distribution" in out
    assert "alpha is 0.3" in fails(capsys, "score", saved, data, "--alpha", "0.3")
    assert ".jsonl or .csv" in fails(capsys, "score", saved, data, "--output", str(tmp_path / "rows.xlsx"))


def test_scoring_in_blocks_is_scoring_at_once(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    estimator, _ = common.load_estimator(saved)
    X = points(50, seed=4)[0]
    at_once = estimator.score(X)
    monkeypatch.setattr(common, "_SCORE_BLOCK", 7)
    in_blocks = common.score_rows(estimator, X)
    np.testing.assert_array_equal(in_blocks.accepted, at_once.accepted)
    np.testing.assert_array_equal(in_blocks.q, at_once.q)
    np.testing.assert_allclose(in_blocks.p, at_once.p)


# explain


def test_explain_names_classes_and_shows_texts(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_npz(tmp_path / "test.npz", 20, seed=2)
    capsys.readouterr()
    assert main(["explain", saved, data, "--rows", "0,3,7-9", "-k", "2", "--json"]) == 0
    entries = strict_json(capsys.readouterr().out)
    assert [entry["row"] for entry in entries] == [0, 3, 7, 8, 9]
    for entry in entries:
        assert entry["decision"] in ("accepted", "rejected", "out of distribution")
        assert entry["reason"].endswith(".")
        assert [x["label"] in ("bad", "good") for x in entry["exemplars"]] == [True, True]
        assert entry["exemplars"][0]["text"].startswith("text ")
        assert entry["exemplars"][0]["distance"] <= entry["exemplars"][1]["distance"]
    assert any('"good"' in entry["reason"] or '"bad"' in entry["reason"] for entry in entries)
    assert main(["explain", saved, data, "--rows", "3"]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("Row 3 (id 3): ")
    assert "text " in out


def test_rows() -> None:
    assert parse_rows("0, 3,7-9", 10) == [0, 3, 7, 8, 9]
    assert parse_rows(None, 3) == [0, 1, 2]
    for text in ("", "a", "-1", "3-", "5-4", "10", "1.5"):
        with pytest.raises(ValueError, match="--rows"):
            parse_rows(text, 10)


# compare and certify


def test_compare_writes_tables_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_npz(tmp_path / "all.npz", 300, names=("cat", "dog"))
    options = ["--output", str(tmp_path / "out"), "--bootstrap", "20", "--json", *SMALL]
    assert main(["compare", data, *options]) == 0
    table = strict_json(capsys.readouterr().out)
    no_reject = next(row for row in table["rows"] if row["estimator"] == "no-reject")
    assert no_reject["marginal"]["n"] == 60
    assert no_reject["class_conditional"][0]["n"] == 30  # a fifth of each class
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "tables.csv",
        "tables.json",
        "tables.md",
        "tables.tex",
        "report.html",
    }
    assert strict_json((tmp_path / "out" / "tables.json").read_text())["rows"] == table["rows"]
    assert "SDM HR lower" in (tmp_path / "out" / "report.html").read_text()


def test_compare_on_test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_npz(tmp_path / "train.npz", 200)
    (tmp_path / "other").mkdir()
    tests = [write_npz(tmp_path / "a.npz", 40, seed=1), write_npz(tmp_path / "other" / "a.npz", 40, seed=2)]
    args = ["compare", data, "--test", *tests, "--name", "toy", "--output", str(tmp_path / "out"), *SMALL]
    assert main([*args, "--bootstrap", "0", "--json"]) == 0
    table = strict_json(capsys.readouterr().out)
    assert {row["dataset"] for row in table["rows"]} == set(tests)  # the same file name: the paths tell them apart
    assert any("toy" in row["model"] for row in table["rows"])


def test_too_few_points_to_hold_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_npz(tmp_path / "few.npz", 8)
    assert "--test" in fails(capsys, "compare", data, "--output", str(tmp_path / "out"), *SMALL)


def test_certify(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fresh = write_npz(tmp_path / "fresh.npz", 1500, seed=9, names=("bad", "good"))
    capsys.readouterr()
    assert main(["certify", saved, fresh, "--delta", "0.1", "--classes", "good", "--json"]) == 0
    certificate = strict_json(capsys.readouterr().out)
    assert certificate["certified"] is True
    assert certificate["region"]["psi"]["bad"] is None  # never accepted
    assert {test["predicted_class"] for test in certificate["tests"]} == {"good"}
    few = write_npz(tmp_path / "few.npz", 10, seed=9, names=("bad", "good"))
    assert main(["certify", saved, few]) == 0
    assert "No threshold could be certified" in capsys.readouterr().out
    assert "--classes" in fails(capsys, "certify", saved, fresh, "--classes", "ugly")
    assert "delta" in fails(capsys, "certify", saved, fresh, "--delta", "2")


def test_a_certificate_can_be_saved_and_applied(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fresh = write_npz(tmp_path / "fresh.npz", 600, seed=7, names=("bad", "good"))
    new = write_npz(tmp_path / "new.npz", 200, seed=8, names=("bad", "good"))
    file = str(tmp_path / "certificate.json")
    assert main(["certify", saved, fresh, "--classes", "good", "--output", file, "--json"]) == 0
    certified = strict_json(capsys.readouterr().out)
    assert certified["certified"]
    assert '"good" (all others are rejected)' in certified["says"]
    assert main(["score", saved, new, "--certificate", file, "--json"]) == 0
    facts = strict_json(capsys.readouterr().out)
    assert facts["psi"]["bad"] is None  # the region shown is the one applied
    page = str(tmp_path / "r.html")
    assert main(["score", saved, new, "--certificate", file, "--report", page]) == 0
    capsys.readouterr()
    text = Path(page).read_text()
    assert "<th scope='row'>bad</th><td>none</td>" in text
    assert f"of at least {facts['q_min']:.4g} whose" in text
    accepted = [row for row in facts["rows"] if row["accepted"]]
    assert accepted
    assert {row["prediction"] for row in accepted} == {"good"}  # the certificate covers nothing else
    assert "alpha" in fails(capsys, "score", saved, new, "--certificate", file, "--alpha", "0.6")
    assert "certificate" in fails(capsys, "score", saved, new, "--certificate", str(tmp_path / "fresh.npz"))
    other = str(tmp_path / "other")
    assert main(["fit", fresh, "--output", other, *SMALL]) == 0
    capsys.readouterr()
    assert "another estimator" in fails(capsys, "score", other, new, "--certificate", file)
    assert "were not used for fitting" in fails(capsys, "certify", other, fresh)
    assert main(["certify", saved, fresh, "--alpha", "0.8", "--json"]) == 0
    assert strict_json(capsys.readouterr().out)["alpha"] == 0.8
