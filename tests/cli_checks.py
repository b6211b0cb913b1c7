"""What every test of the commands asks: one clear sentence on failure, JSON as the standard has it."""

from __future__ import annotations

import json
from typing import Any

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
