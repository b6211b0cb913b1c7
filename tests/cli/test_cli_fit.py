"""`sdmlm fit`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_checks import SMALL, fails, points, strict_json, write_npz

from sdmlm.cli import common, main

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
