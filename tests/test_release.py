"""The wheel that `make dist` builds works by itself: away from the source tree, with its model and its page in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import sdmlm

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("build", reason="the wheel is built with build: pip install build")


def run(command: list[str | Path], cwd: Path) -> str:
    """Run without the variables that could lead Python back to the source tree; return stdout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_", "PYTEST"))}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the source tree stays clean and two test processes do not meet in build/."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    ignore = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", output, source], output)
    (built,) = output.glob("*.whl")
    assert len(list(output.glob("*.tar.gz"))) == 1
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a new environment: our package from the wheel, its dependencies from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    programs = folder / "bin"
    run(
        [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", "--no-index", wheel],
        folder,
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file is only searched: the .pth files found there, such as that of an editable install, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def test_the_version_is_the_same_everywhere(wheel: Path) -> None:
    version = sdmlm.__version__
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == version
    assert re.search(rf"^## \[?{re.escape(version)}\]?( |$)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert wheel.name == f"sdmlm-{version}-py3-none-any.whl"


def test_the_wheel_works_away_from_the_source_tree(installed: Path, tmp_path: Path) -> None:
    where = run([installed / "python", "-c", "import sdmlm; print(sdmlm.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    page = "from importlib.resources import files; print(len(files('sdmlm.server').joinpath('page/index.html').read_text()))"
    assert int(run([installed / "python", "-c", page], tmp_path)) > 0
    assert "accepted" in run([installed / "sdmlm", "demo", "--digits", "--output", "digits"], tmp_path).lower()
    sizes = ["--train", "32", "--calibration", "32", "--test", "2", "--shifted", "2"]
    run([installed / "sdmlm", "data", "word-ordering", "--sentences", "demo", "--output", "rows", *sizes], tmp_path)
    rows = ["--data", "rows/train.jsonl", "--calibration", "rows/calibration.jsonl"]
    train = [installed / "sdmlm", "train", "--model", "demo", *rows, "--output", "lm", "--use-cpu", "--dry-run"]
    assert "nothing was trained" in run(train, tmp_path)


@pytest.mark.timeout(1800)  # it trains two models: 80 seconds on a free machine
def test_the_wheel_runs_the_fast_demo(installed: Path, tmp_path: Path) -> None:
    shown = run([installed / "sdmlm", "demo", "--fast", "--output", "demo"], tmp_path)
    assert "Try next" in shown
    assert {"report.html", "tables.csv", "verified", "sdm_hn", "ce_hn"} <= {
        p.name for p in (tmp_path / "demo").iterdir()
    }
