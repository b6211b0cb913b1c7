"""Which sentences of the demo's grammar have another right order of their last three words."""

from __future__ import annotations

import pytest

from sdmlm.demo.sentences import order_is_open, sentences, settled_sentences


def swapped(text: str) -> str:
    words = text.split()
    words[-3], words[-2] = words[-2], words[-3]
    return " ".join(words)


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("The dog slept quietly there.", True),
        ("The dog never slept quietly there.", False),
        ("The dog slept quietly there today.", True),
        ("Anna only wants bread.", True),
        ("Anna also wants bread.", False),
        ("Tom found the farmer's old cup.", True),
        ("Tom found the clever farmer's cup.", False),
        ("Tom saw the kind shy man.", True),
        ("Tom saw an honest kind man.", False),
        ("Tom saw the kind old man.", False),
        ("Anna wants bread and soup.", False),
        ("Anna put the coat on.", False),
    ],
)
def test_examples_of_open_and_settled_orders(text: str, is_open: bool) -> None:
    assert order_is_open(text) is is_open


def test_an_open_order_is_open_from_both_sides() -> None:
    found = [text for text in sentences(1000, seed=3) if order_is_open(text)]
    assert len(found) > 100
    assert all(order_is_open(swapped(text)) for text in found)


def test_no_order_that_the_grammar_writes_both_ways_counts_as_settled() -> None:
    # Whole sentences hardly ever come twice; their last four words do.
    written = {" ".join(text.split()[-4:]) for text in sentences(60_000, seed=5)}
    both = [text for text in written if swapped(text) in written and swapped(text) != text]
    assert len(both) > 100
    assert [text for text in both if not order_is_open(text)] == []


def test_settled_sentences_are_those_without_an_open_order() -> None:
    kept = settled_sentences(500, seed=0)
    assert kept == [text for text in sentences(500, seed=0) if not order_is_open(text)]
    assert 300 < len(kept) < 450
