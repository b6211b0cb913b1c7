"""What the tests of SDMLanguageModel share: prompts, and when two verifications are the same."""

from __future__ import annotations

import pytest
from tiny_sdm_lm import marked_rows

from sdmlm import Verification

PROMPTS = [row["prompt"] for row in marked_rows(40, 5)]
SUFFIXED = ["abc\n<verified>Yes</verified>", "abc\n<verified>No</ver", "good\n<verified>Yes</verified> bad", ""]
NUMBERS = ("probability", "probability_lower", "probability_upper", "d", "d_nearest", "q_prime")


def same(a: Verification, b: Verification) -> None:
    """The same decision; numbers up to the rounding of different passes."""
    assert (a.text, a.verdict, a.accepted, a.accepted_lower) == (b.text, b.verdict, b.accepted, b.accepted_lower)
    assert (a.q, a.out_of_distribution, a.highest_alpha) == (b.q, b.out_of_distribution, b.highest_alpha)
    assert [e.id for e in a.exemplars] == [e.id for e in b.exemplars]
    for name in NUMBERS:
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-4, abs=1e-5)


def all_same(first: list[Verification], second: list[Verification]) -> None:
    for a, b in zip(first, second, strict=True):
        same(a, b)
