"""The tables of some made-up runs."""

from __future__ import annotations

import pytest
from example_runs import some_runs

from sdmlm.experiments.tables import Tables, tables


@pytest.fixture(scope="module")
def found() -> Tables:
    return tables(some_runs(), bootstrap=200)
