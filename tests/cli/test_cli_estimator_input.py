"""Files and places that `sdmlm fit`, `score` and `explain` are given: odd labels, damaged files, disks that are full."""

from __future__ import annotations

import errno
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_checks import fails, strict_json
from toy_points import blobs

from sdmlm.cli import common
from sdmlm.cli.main import main

X, Y = blobs(240, 2, gap=4.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An estimator with three wrong labels among its points, and texts."""
    folder = tmp_path_factory.mktemp("input")
    y = Y.copy()
    y[[5, 100, 200]] = 1 - y[[5, 100, 200]]
    names = np.array(["no", "yes"])[y]
    np.savez(folder / "train.npz", X=X, y=names, texts=np.array([f"text {i} \x1b[31m" for i in range(240)]))
    assert main(["fit", str(folder / "train.npz"), "--output", str(folder / "e"), "--rule", "region"]) == 0
    return str(folder / "e")


# Label errors


def test_suspected_label_errors_are_listed(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", saved, "--label-errors", "-k", "3", "--json"]) == 0
    rows = strict_json(capsys.readouterr().out)
    assert {row["id"] for row in rows} == {5, 100, 200}
    for row in rows:
        assert list(row) == ["id", "label", "suggested", "confidence", "q", "d", "text"]
        assert row["suggested"] == ["no", "yes"][Y[row["id"]]] != row["label"]
        assert row["text"].startswith(f"text {row['id']}")
    assert main(["explain", saved, "--label-errors"]) == 0
    shown = capsys.readouterr().out
    assert "Suspected label errors" in shown
    assert "\x1b[31m" not in shown
    assert "text 100" in shown


def test_no_label_error_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points, y = blobs(240, 2, gap=12.0)
    np.savez(tmp_path / "train.npz", X=points, y=y)
    assert main(["fit", str(tmp_path / "train.npz"), "--output", str(tmp_path / "e"), "--rounds", "1"]) == 0
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "e"), "--label-errors"]) == 0
    assert "No label is suspected to be wrong." in capsys.readouterr().out


def test_rows_or_label_errors(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "EMBEDDINGS is missing" in fails(capsys, "explain", saved)
    assert "leave out EMBEDDINGS" in fails(capsys, "explain", saved, "rows.npz", "--label-errors")
    assert "leave out EMBEDDINGS" in fails(capsys, "explain", saved, "--label-errors", "--rows", "3")
    assert "-k is 0" in fails(capsys, "explain", saved, "--label-errors", "-k", "0")


# Labels of any kind in files


@pytest.mark.parametrize(("labels", "names"), [([-1, 1], ["-1", "1"]), ([2, 10], ["2", "10"]), ([0, 1], ["0", "1"])])
@pytest.mark.parametrize("kind", ["npz", "jsonl"])
def test_whole_number_labels_of_any_kind(
    kind: str, labels: list[int], names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, y = tmp_path / f"train.{kind}", np.array(labels)[Y]
    if kind == "npz":
        np.savez(path, X=X, y=y)
    else:
        rows = [{"embedding": x.tolist(), "label": int(c)} for x, c in zip(X, y, strict=True)]
        path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["fit", str(path), "--output", str(tmp_path / "e"), "--rounds", "1"]) == 0
    assert common.load_estimator(str(tmp_path / "e"))[1] == names
    capsys.readouterr()
    fresh, fresh_y = blobs(60, 2, seed=1, gap=4.0)
    np.savez(tmp_path / "fresh.npz", X=fresh, y=np.array(labels)[fresh_y])
    assert main(["score", str(tmp_path / "e"), str(tmp_path / "fresh.npz"), "--json"]) == 0
    rows = strict_json(capsys.readouterr().out)["rows"]
    predicted = [names.index(str(row["prediction"])) for row in rows]
    assert np.mean(predicted == fresh_y) > 0.95
    np.savez(tmp_path / "other.npz", X=fresh, y=np.full(60, 7))
    assert "outside the classes" in fails(capsys, "score", str(tmp_path / "e"), str(tmp_path / "other.npz"))


# Files that cannot be read


def object_labels(path: Path) -> None:
    np.savez(path, X=X[:4], y=np.array(["a", "b", "a", "b"], dtype=object))


def text_file(path: Path) -> None:
    path.write_text("label,x\n1,2\n")


def huge_integer(path: Path) -> None:
    path.write_text(json.dumps({"embedding": [1.0, 10**400], "label": 0}))


def huge_float(path: Path) -> None:
    np.savez(path, X=np.where(np.arange(12).reshape(4, 3) == 4, 1e300, 1.0), y=[0, 1, 0, 1])


@pytest.mark.parametrize(
    ("name", "write", "says"),
    [
        ("a.npz", object_labels, "the array y holds Python objects"),
        ("a.npz", text_file, "is not a readable .npz file: write one with np.savez"),
        ("a.jsonl", huge_integer, "a number too large for a float"),
        ("a.npz", huge_float, "beyond float32 counts as infinite"),
    ],
)
def test_one_sentence_and_nothing_else(
    name: str, write: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        message = fails(capsys, "fit", str(tmp_path / name), "--output", str(tmp_path / "e"))
    assert says in message
    assert "allow_pickle" not in message
    assert not (tmp_path / "e").exists()


# Places that cannot be written


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
@pytest.mark.parametrize("option", ["--output", "--report"])
def test_a_place_that_cannot_be_written_is_noticed_before_fitting(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "train.npz", X=X, y=Y)
    monkeypatch.setattr("sdmlm.estimator.estimator.SDMEstimator.fit", lambda *_: pytest.fail("it was fitted"))
    places = {"--output": str(tmp_path / "e"), "--report": str(tmp_path / "r.html")}
    places[option] = "/proc/none/r.html"
    message = fails(capsys, "fit", str(tmp_path / "train.npz"), *(part for pair in places.items() for part in pair))
    assert "/proc cannot be written to" in message
    assert "name another place" in message


def test_a_full_disk_names_the_file_and_keeps_the_old_one(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "rows.npz", X=X[:20] + 0.1)
    target = tmp_path / "rows.csv"
    target.write_text("old")

    def full(self: Path, *_: Any, **__: Any) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    message = fails(capsys, "score", saved, str(tmp_path / "rows.npz"), "--output", str(target))
    monkeypatch.undo()
    assert "rows.csv: No space left on device" in message
    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.csv", "rows.npz"]
