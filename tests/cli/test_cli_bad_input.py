"""Bad data, options and files are refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_checks import SMALL, fails, points, write_npz

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
