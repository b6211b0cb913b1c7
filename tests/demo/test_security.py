"""docs/security.md says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmark_modules import benchmark

ROOT = Path(__file__).resolve().parents[2]
HONEST = ("the model's own answers", "right answers")


def measured(name: str) -> dict[str, Any]:
    """The results of a file by kind of answer; the page must show them as they are."""
    module = benchmark("adversary")
    figures = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    results = [module.Result(**line) for line in figures["results"]]
    assert module.table(results) in (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert figures["rows"] == 200
    return {result.kind: result for result in results}


def test_the_certified_rule_verifies_no_forged_answer() -> None:
    found = measured("adversary-demo")
    assert len(found) >= 20
    for kind, result in found.items():
        if kind in HONEST:
            assert result.verified > 0.8
        else:
            assert result.any_verified == 0, kind


def test_what_the_page_says_of_the_region() -> None:
    found = measured("adversary-demo-region")
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    unprotected = found[benchmark("adversary").UNPROTECTED]
    assert f"would verify {unprotected.verified:.0%} of them, and {unprotected.any_verified:.0%} of" in page
    others, one = (
        found[kind].verified for kind in ("right answers to other prompts", "one right answer, given to all prompts")
    )
    assert f"{others:.0%} of them are verified, and one right answer is verified for {one:.0%} of all prompts" in page
    for kind in ("forged turns", "canned answers", "wrong answers with words to the judge", "empty answers"):
        assert found[kind].verified == 0, kind
