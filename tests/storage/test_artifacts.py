import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sdmlm.storage import artifacts
from sdmlm.storage.artifacts import read_artifact, write_artifact, write_text_atomically

KIND = "test thing"


def write(folder, value=1.0, config=None):
    write_artifact(folder, KIND, 2, config or {"value": value}, {"t": torch.full((3,), value)}, {"text": str(value)})


def read(folder):
    return read_artifact(folder, KIND, 2)


def test_round_trip_and_replacement_leaves_no_litter(tmp_path):
    write(tmp_path / "a", 1.0)
    (tmp_path / "a" / "model.safetensors").write_text("somebody else's")
    write(tmp_path / "a", 2.0)
    config, tensors, texts = read(tmp_path / "a")
    assert config["value"] == 2.0
    assert tensors["t"].tolist() == [2.0] * 3
    assert texts == {"text": "2.0"}
    assert len(os.listdir(tmp_path / "a")) == 4  # config, tensors, texts and the stranger


@pytest.mark.parametrize("at", ["tensors", "texts", "config"])
def test_a_save_that_fails_leaves_the_old_artifact(tmp_path, monkeypatch, at):
    write(tmp_path, 1.0)
    before = sorted(os.listdir(tmp_path))
    replace = os.replace

    def full_disk(source, target):
        if os.path.basename(target).startswith(at):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(ValueError, match="No space left on device"):
        write(tmp_path, 2.0)
    monkeypatch.undo()
    assert read(tmp_path)[0]["value"] == 1.0
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error")])
@pytest.mark.parametrize("at", ["replace", "flush"])
def test_after_the_commit_nothing_is_taken_back(tmp_path, monkeypatch, error, at):
    """config.json names the new files by then."""
    write(tmp_path, 1.0)
    replace, flush = os.replace, artifacts._flush

    def replaced(source, target):
        replace(source, target)
        if os.path.basename(target) == "config.json":
            raise error

    def flushed(path):
        if os.path.isdir(path):
            raise error
        flush(path)

    monkeypatch.setattr(*((os, "replace", replaced) if at == "replace" else (artifacts, "_flush", flushed)))
    with pytest.raises((KeyboardInterrupt, ValueError, OSError)):
        write(tmp_path, 2.0)
    monkeypatch.undo()
    assert read(tmp_path)[0]["value"] == 2.0


def test_an_interrupt_at_any_point_leaves_old_or_new(tmp_path, monkeypatch):
    replace, calls = os.replace, 0
    for stop in range(4):
        write(tmp_path / str(stop), 1.0)
        calls = 0

        def interrupted(source, target, stop=stop):
            nonlocal calls
            if calls == stop:
                raise KeyboardInterrupt
            calls += 1
            replace(source, target)

        monkeypatch.setattr(os, "replace", interrupted)
        if stop < 3:
            with pytest.raises(KeyboardInterrupt):
                write(tmp_path / str(stop), 2.0)
        else:
            write(tmp_path / str(stop), 2.0)
        monkeypatch.undo()
        assert read(tmp_path / str(stop))[0]["value"] == (1.0 if stop < 3 else 2.0)
        assert len(os.listdir(tmp_path / str(stop))) == 3  # no litter


def test_a_first_save_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "new")
    assert os.listdir(tmp_path) == []


def damage(folder, name, how):
    path = next(p for p in folder.iterdir() if p.name.startswith(name))
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "cut":
        data = data[:-1]
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
@pytest.mark.parametrize("name", ["tensors", "texts"])
def test_damage_is_found(tmp_path, name, how):
    write(tmp_path)
    damage(tmp_path, name, how)
    with pytest.raises(ValueError, match="damaged"):
        read(tmp_path)


def test_config_problems_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read(tmp_path)
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in [
        ({"format_version": 3}, "newer"),
        ({"kind": "other"}, "not a test thing"),
        ({"files": None}, "damaged"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=message):
            read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        read(tmp_path)
    outside = {**config, "files": {**config["files"], "texts": {"name": "../x", "sha256": ""}}}
    (tmp_path / "config.json").write_text(json.dumps(outside))
    with pytest.raises(ValueError, match="damaged"):
        read(tmp_path)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        write(tmp_path / "f")


def test_a_folder_of_something_else_keeps_its_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"holds something else, whose config\.json would be lost"):
        write(tmp_path)
    assert (tmp_path / "config.json").read_text() == '{"model_type": "llama"}'
    (tmp_path / "config.json").write_text("{half")  # nobody's any more
    write(tmp_path)
    read(tmp_path)


def test_text_is_replaced_in_one_step(tmp_path, monkeypatch):
    write_text_atomically(tmp_path / "t", "old")

    def full_disk(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_text_atomically(tmp_path / "t", "new")
    assert (tmp_path / "t").read_text() == "old"
    assert os.listdir(tmp_path) == ["t"]


def test_many_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "tables.json"
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write_text_atomically, path, str(n) * 1000) for n in range(200)]:
            done.result()
    assert len(set(path.read_text())) <= 3
    assert [p.name for p in tmp_path.iterdir()] == ["tables.json"]


def test_a_really_full_disk_is_named(tmp_path):
    """A limit on the size of files stands in for a full disk: safetensors has an error of its own for it."""
    code = f"""
import resource, signal, sys, torch
from sdmlm.storage.artifacts import write_artifact
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_artifact({str(tmp_path / "a")!r}, "k", 1, {{}}, {{"t": torch.zeros(100_000)}}, {{}})
except ValueError as error:
    sys.exit(0 if "Could not save" in str(error) else 3)
sys.exit(4)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert os.listdir(tmp_path) == []
