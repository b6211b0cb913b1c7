"""A small estimator that was fitted by `sdmlm fit`."""

from __future__ import annotations

import numpy as np
import pytest
from cli_checks import SMALL, write_npz

from sdmlm.cli import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An estimator with named classes."""
    folder = tmp_path_factory.mktemp("cli")
    data = write_npz(
        folder / "train.npz", 400, names=("bad", "good"), texts=np.array([f"text {i}" for i in range(400)])
    )
    assert main(["fit", data, "--output", str(folder / "estimator"), *SMALL]) == 0
    return str(folder / "estimator")
