"""docs/security.md says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_modules import benchmark

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["adversary-demo", "adversary-demo-ce"])
def test_the_tables_are_those_of_their_files(name: str) -> None:
    module = benchmark("adversary")
    figures = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    results = [module.Result(**line) for line in figures["results"]]
    assert module.table(results) in (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert figures["rows"] == 200
    share = {r.kind: r.verified for r in results}
    # What the page says about them.
    assert share["right answers"] > 0.1
    for kind in ("forged turns", "canned answers", "wrong answers with words to the judge", "empty answers"):
        assert share[kind] <= 0.01, kind
    assert share["forged turns"] <= share["forged turns without the control strings"]
    assert share["wrong answers with a verification suffix"] == share["wrong answers"]
