"""Running a test file as a script, in a process of its own: for tests that fork or kill processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def run_script(file: str, *arguments: object) -> None:
    """Run a Python file on one thread; fails with the end of its stderr."""
    path = f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}"
    done = subprocess.run(
        [sys.executable, file, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
