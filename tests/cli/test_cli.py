"""The command line, end to end."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_checks import fails, strict_json

from sdmlm import __version__
from sdmlm.cli import common, main
from sdmlm.cli.commands.explain import parse_rows

SMALL = [
    "--published",
    "--exemplar-dim",
    "16",
    "--epochs",
    "15",
    "--learning-rate",
    "1e-2",
    "--rounds",
    "1",
    "--alpha",
    "0.9",
]


def points(n: int, seed: int = 0, width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    return (rng.normal(size=(n, width)) + 1.5 * y[:, None]).astype(np.float32), y


def write_npz(path: Path, n: int = 200, seed: int = 0, names: tuple[str, str] | None = None, **extra: Any) -> str:
    X, y = points(n, seed)
    arrays = {"X": X, "y": y if names is None else np.array(names)[y], **extra}
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return str(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An estimator with named classes."""
    folder = tmp_path_factory.mktemp("cli")
    data = write_npz(
        folder / "train.npz", 400, names=("bad", "good"), texts=np.array([f"text {i}" for i in range(400)])
    )
    assert main(["fit", data, "--output", str(folder / "estimator"), *SMALL]) == 0
    return str(folder / "estimator")


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


# fit


def test_fit_saves_estimator_names_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_npz(tmp_path / "train.npz", names=("cat", "dog"))
    report = tmp_path / "sub" / "fit.html"
    args = ["fit", data, "--output", str(tmp_path / "est"), "--report", str(report), "--json", *SMALL]
    assert main(args) == 0
    out, _ = capsys.readouterr()
    facts = strict_json(out)
    assert facts["psi"].keys() == {"cat", "dog"}
    assert facts["calibration"]["points"] == facts["support"] == 100
    assert sum(c["points"] for c in facts["calibration"]["classes"].values()) == 100
    assert sum(c["accepted"] for c in facts["calibration"]["classes"].values()) == facts["calibration"]["accepted"] > 0
    estimator, names = common.load_estimator(str(tmp_path / "est"))
    assert names == ["cat", "dog"]
    assert estimator.region_.q_min == facts["q_min"]
    assert "dog" in report.read_text()
    assert {p.name.split("-")[0] for p in (tmp_path / "est").iterdir()} == {
        "config.json",
        "tensors",
        "texts",
    }


def test_balanced_loss_is_the_mean_of_the_losses_by_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_npz(tmp_path / "train.npz")
    assert main(["fit", data, "--output", str(tmp_path / "est"), "--json", *SMALL]) == 0
    facts = strict_json(capsys.readouterr().out)
    by_class = [c["loss"] for c in facts["calibration"]["classes"].values()]
    assert np.mean(by_class) == pytest.approx(facts["loss"], rel=1e-4)


def test_fit_shows_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_npz(tmp_path / "train.npz", names=("cat", "dog"))
    assert main(["fit", data, "--output", str(tmp_path / "est"), *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "cat" in out
    assert "q'min" in out
    assert err == ""


def test_fit_without_a_region_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_npz(tmp_path / "train.npz")
    args = ["fit", data, "--output", str(tmp_path / "est"), *SMALL, "--alpha", "0.99", "--learning-rate", "1e-6"]
    assert main([*args, "--json"]) == 0
    facts = strict_json(capsys.readouterr().out)
    assert facts["q_min"] is None
    assert set(facts["psi"].values()) == {None}
    assert main([*args, "--force"]) == 0
    assert "nothing will be accepted" in capsys.readouterr().err


def test_fit_reads_every_kind_of_file(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    X, y = points(200)
    labels = ["no" if c == 0 else "yes" for c in y]
    table = pa.table({"embedding": X.tolist(), "label": labels, "id": [f"doc{i}" for i in range(200)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    lines = [
        json.dumps({"embedding": x.tolist(), "label": c, "id": f"doc{i}"})
        for i, (x, c) in enumerate(zip(X, labels, strict=True))
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = []
    for kind in ("parquet", "jsonl"):
        assert main(["fit", str(tmp_path / f"a.{kind}"), "--output", str(tmp_path / kind), *SMALL]) == 0
        found.append(common.load_estimator(str(tmp_path / kind)))
    assert found[0][0].region_ == found[1][0].region_
    assert found[0][1] == ["no", "yes"]
    assert found[0][0].layers_[0].support_ids[0].startswith("doc")


def test_fit_with_a_calibration_file_keeps_ids_apart(tmp_path: Path) -> None:
    texts = np.array([f"train {i}" for i in range(100)])
    train = write_npz(tmp_path / "train.npz", 100, names=("no", "yes"), texts=texts)
    held_texts = np.array([f"held {i}" for i in range(60)])
    held = write_npz(tmp_path / "held.npz", 60, seed=1, names=("no", "yes"), texts=held_texts)
    assert main(["fit", train, "--calibration", held, "--output", str(tmp_path / "est"), *SMALL]) == 0
    estimator, _ = common.load_estimator(str(tmp_path / "est"))
    layer = estimator.layers_[0]
    assert (len(layer.support_ids), len(layer.calibration_ids)) == (100, 60)
    assert estimator.documents_[layer.support_ids[5]] == "train 5"
    assert estimator.documents_[layer.calibration_ids[5]] == "held 5"


def test_fit_overwrites_only_an_estimator_and_only_when_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_npz(tmp_path / "a.npz", names=("cat", "dog"))
    second = write_npz(tmp_path / "b.npz", seed=5, names=("old", "young"))
    folder = tmp_path / "est"
    assert main(["fit", first, "--output", str(folder), *SMALL]) == 0
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert "--force" in fails(capsys, "fit", second, "--output", str(folder), *SMALL)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert main(["fit", second, "--output", str(folder), "--force", *SMALL]) == 0
    assert common.load_estimator(str(folder))[1] == ["old", "young"]
    assert len(list(folder.iterdir())) == 3

    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    for force in ([], ["--force"]):
        assert "something else" in fails(capsys, "fit", first, "--output", str(other), *force, *SMALL)
    assert [p.name for p in other.iterdir()] == ["thesis.tex"]
    assert "is a file" in fails(capsys, "fit", first, "--output", first, *SMALL)


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_save_leaves_what_was_there(
    failure: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdmlm.estimator.estimator import SDMEstimator

    first = write_npz(tmp_path / "a.npz", names=("cat", "dog"))
    second = write_npz(tmp_path / "b.npz", seed=5, names=("old", "young"))
    folder = tmp_path / "est"
    assert main(["fit", first, "--output", str(folder), *SMALL]) == 0
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def fail(self: SDMEstimator, folder: str) -> None:
        raise failure

    monkeypatch.setattr(SDMEstimator, "save_pretrained", fail)
    fails(capsys, "fit", second, "--output", str(folder), "--force", *SMALL)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    fails(capsys, "fit", second, "--output", str(tmp_path / "new"), *SMALL)
    assert not (tmp_path / "new").exists()


# Bad input

BAD = {
    "empty": ({"X": np.empty((0, 4)), "y": np.empty(0, int)}, "empty"),
    "no labels": ({"X": points(40)[0]}, "no labels"),
    "one class": ({"X": points(40)[0], "y": np.zeros(40, int)}, "one class"),
    "one named class": ({"X": points(40)[0], "y": np.full(40, "cat")}, "cat"),
    "fewer points than classes": ({"X": points(3)[0], "y": np.array([0, 1, 5])}, "class"),
    "a lonely class": ({"X": points(21)[0], "y": np.array([0, 1] * 10 + [2])}, "class 2"),
    "NaN": ({"X": np.where(np.arange(320).reshape(40, 8) == 77, np.nan, 1.0), "y": points(40)[1]}, "NaN"),
    "infinite": ({"X": np.full((40, 8), np.inf), "y": points(40)[1]}, "infinite"),
    "mismatched lengths": ({"X": points(40)[0], "y": points(39)[1]}, "must match"),
    "a vector": ({"X": np.zeros(40), "y": points(40)[1]}, "matrix"),
    "words for vectors": ({"X": np.full((40, 8), "a"), "y": points(40)[1]}, "not numbers"),
    "ids twice": ({"X": points(40)[0], "y": points(40)[1], "ids": np.zeros(40, int)}, "twice"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_data_is_refused_in_one_sentence(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays, says = BAD[what]
    np.savez(tmp_path / "bad.npz", **arrays)
    for command in ("fit", "compare"):
        output = tmp_path / command
        report = ["--report", str(tmp_path / "r.html")] if command == "fit" else []
        assert says in fails(capsys, command, str(tmp_path / "bad.npz"), "--output", str(output), *report, *SMALL)
        assert not output.exists()
        assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--alpha", "0.5"], "alpha"),
        (["--alpha", "1.01"], "alpha"),
        (["--alpha", "nan"], "alpha"),
        (["--epochs", "0"], "epochs"),
        (["--learning-rate", "-1"], "learning_rate"),
        (["--max-q", "0"], "max_q"),
        (["--device", "nowhere"], "device"),
        (["--report", "report.txt"], ".html"),
        (["--calibration", "missing.npz"], "does not exist"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_npz(tmp_path / "train.npz", 40)
    assert says in fails(capsys, "fit", data, "--output", str(tmp_path / "est"), *SMALL, *options)
    assert not (tmp_path / "est").exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.npz", None, "does not exist"),
        ("a.txt", b"1 2 3", "unknown kind"),
        ("a.npz", b"not a zip", "not a readable"),
        ("a.npz", b"", "a.npz is empty"),
        ("", None, "is a folder"),
        ("a.parquet", b"not parquet", "not a readable"),
        ("a.jsonl", b"", "empty"),
        ("a.jsonl", b'{"embedding": [1, 2]', "line 1"),
        ("a.jsonl", b'{"embedding": [1, 2], "label": 0}\n{"embedding": [1], "label": 1}', "different lengths"),
        ("a.jsonl", b"\xff\xfe", "UTF-8"),
    ],
)
def test_bad_files_are_refused(
    name: str, content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert says in fails(capsys, "fit", str(tmp_path / name), "--output", str(tmp_path / "est"), *SMALL)
    assert not (tmp_path / "est").exists()


def test_scoring_what_was_fitted_over_is_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, new = write_npz(tmp_path / "train.npz", 80), write_npz(tmp_path / "new.npz", 80, seed=5)
    assert main(["fit", train, "--output", str(tmp_path / "est"), *SMALL]) == 0
    capsys.readouterr()
    assert main(["score", str(tmp_path / "est"), train]) == 0
    assert "100% of the first points were fitted over" in capsys.readouterr().err
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


def test_damaged_or_newer_artifacts_are_refused(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    data = write_npz(tmp_path / "test.npz", 10, names=("bad", "good"))

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(saved, tmp_path / name))

    tensors = next(damaged("flipped").glob("tensors-*"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    fewer = damaged("fewer") / "config.json"
    fewer.write_text(json.dumps({**json.loads(fewer.read_text()), "class_names": ["one"]}))
    config = damaged("newer") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "format_version": 999}))
    (damaged("config") / "config.json").write_text("{}")
    words = {"flipped": "damaged", "fewer": "damaged", "newer": "newer", "config": "damaged"}
    for name, says in {**words, "nothing": "not a saved"}.items():
        assert says in fails(capsys, "score", str(tmp_path / name), data)


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
    assert "played no part" in fails(capsys, "certify", other, fresh)
    assert main(["certify", saved, fresh, "--alpha", "0.8", "--json"]) == 0
    assert strict_json(capsys.readouterr().out)["alpha"] == 0.8
