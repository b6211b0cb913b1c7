"""The estimator demo."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from sdmlm.cli import main
from sdmlm.demo import estimator
from sdmlm.demo.estimator import ALPHA, art, digits
from sdmlm.estimator.embedding_files import read_embeddings


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(the folder, what the terminal showed)."""
    path = tmp_path_factory.mktemp("demo")
    with redirect_stdout(io.StringIO()) as shown:
        assert main(["demo", "--digits", "--fast", "--output", str(path)]) == 0
    return path, shown.getvalue()


def test_demo_writes_everything(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    files = {"estimator", "report.html", "tables.csv", "tables.json", "tables.md", "tables.tex"}
    tests = {f"{name}.npz" for name in ("unseen", "rotated", "shifted", "shuffled")}
    assert {p.name for p in folder.iterdir()} == files | tests
    assert (folder / "report.html").stat().st_size < 2_000_000
    assert len(read_embeddings(folder / "unseen.npz")) == 540


def test_demo_shows_what_it_is_for(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    table = json.loads((folder / "tables.json").read_text())
    found = {(row["dataset"], row["estimator"]): row["marginal"] for row in table["rows"] if "SDM" in row["model"]}
    unseen = found["unseen", "SDM HR"]
    assert unseen["accuracy"] >= ALPHA
    assert unseen["share"] > 0.3
    assert found["unseen", "no-reject"]["accuracy"] > 0.9
    assert found["shifted", "SDM HR"]["share"] < unseen["share"]
    assert found["shuffled", "SDM HR"]["share"] < 0.01


def test_demo_explains(demo: tuple[Path, str]) -> None:
    _, shown = demo
    for words in (
        "The first accepted of the unseen",
        "The first rejected of the shuffled",
        "Accepted as",
        "SDM HR lower",
    ):
        assert words in shown


def test_demo_files_can_be_used(demo: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = demo
    assert main(["score", str(folder / "estimator"), str(folder / "shuffled.npz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["points"] == 540


def test_demo_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(estimator.FAST, "epochs", 2)
    tables = []
    for _ in range(2):
        assert main(["demo", "--digits", "--fast", "--output", str(tmp_path)]) == 0
        tables.append((tmp_path / "tables.csv").read_bytes())
    assert tables[0] == tables[1]


def test_demo_data_keep_fit_and_test_apart() -> None:
    fit, tests = digits()
    numbers = {str(i).split("-")[1] for i in fit.ids}
    for data in tests.values():
        assert not numbers & {str(i).split("-")[1] for i in data.ids}
        np.testing.assert_array_equal(data.y, tests["unseen"].y)
    unseen, shuffled, shifted = (tests[name].X for name in ("unseen", "shuffled", "shifted"))
    np.testing.assert_array_equal(np.sort(unseen, axis=1), np.sort(shuffled, axis=1))
    np.testing.assert_array_equal(unseen.reshape(-1, 8, 8)[:, :, :7], shifted.reshape(-1, 8, 8)[:, :, 1:])


def test_art() -> None:
    image = np.zeros((8, 8))
    image[0, 1] = 1.0
    assert art(image) == "  ██" + "\n" * 7
