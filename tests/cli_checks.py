"""What the tests of the commands share: one clear sentence on failure, JSON as the standard has it, small data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdmlm.cli import main


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that must fail: exit code 2, nothing on stdout, one line on stderr, which is returned."""
    capsys.readouterr()
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sdmlm: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


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
