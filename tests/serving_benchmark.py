"""benchmarks/serving.py and its parts for tests: benchmarks/ is not a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = str(Path(__file__).resolve().parents[1] / "benchmarks")


def serving_module(name: str) -> ModuleType:
    """One of the modules, by its name."""
    sys.path.insert(0, FOLDER)  # they import each other
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(FOLDER)
