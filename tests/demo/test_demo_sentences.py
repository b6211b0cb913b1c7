"""The grammar of the demo: deterministic, distinct, readable."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdmlm.demo import sentences as grammar
from sdmlm.demo.sentences import LEXICON, LONGEST, SHORTEST, sentence, sentences

SOME = sentences(5000, seed=7)


def bare(word: str) -> str:
    return word.rstrip(".,")


def tokens(text: str) -> list[str]:
    """Words without punctuation; the first in lower case unless it is a name."""
    words = [bare(word) for word in text.split()]
    return [words[0] if words[0] in LEXICON else words[0].lower(), *words[1:]]


def test_same_seed_same_sentences_in_any_process() -> None:
    here = sentences(20, seed=3)
    assert sentences(20, seed=3) == here
    assert sentences(10, seed=3) == here[:10]
    code = "from sdmlm.demo.sentences import sentences; print('\\n'.join(sentences(20, seed=3)))"
    other = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "123"}, capture_output=True, text=True, check=True
    )
    assert other.stdout.splitlines() == here


def test_other_seed_other_sentences() -> None:
    assert len(set(sentences(500, seed=1)) & set(sentences(500, seed=2))) < 25


def test_all_are_different_and_none_is_fine() -> None:
    assert len(set(SOME)) == len(SOME) == 5000
    assert sentences(0, seed=0) == []
    with pytest.raises(ValueError, match="negative"):
        sentences(-1, seed=0)


def test_lengths_have_a_long_tail() -> None:
    lengths = sorted(len(text.split()) for text in SOME)
    assert lengths[0] >= SHORTEST
    assert lengths[-1] <= LONGEST
    assert 10 <= lengths[len(lengths) // 2] <= 15
    assert lengths[len(lengths) * 98 // 100] >= 25


def test_a_few_hundred_words_and_all_of_them_used() -> None:
    assert 300 <= len(LEXICON) <= 700
    used = Counter(word for text in sentences(30_000, seed=5) for word in tokens(text))
    assert set(used) <= LEXICON
    assert set(used) >= LEXICON


@example(5464)
@given(st.integers(0, 2**32))
def test_every_sentence_is_well_formed(seed: int) -> None:
    text = sentence(random.Random(seed))
    assert text == " ".join(text.split())
    assert re.fullmatch(r"[A-Z][A-Za-z' ,]*[a-z]\.", text), text
    assert not re.search(r",[^ ]| ,|,,", text)
    words = tokens(text)
    assert SHORTEST <= len(words) <= LONGEST
    assert set(words) <= LEXICON
    for clause in text.split(","):  # "with Felix, Felix sold ..." is fine
        for first, second in itertools.pairwise(tokens(clause)):
            assert first != second or first in ("her",), text  # "gave her her ..." would be fine
            if first in ("a", "an"):
                assert (first == "an") == (second == "honest" or (second[0] in "aeiou" and second != "useful")), text


SINGULAR = {third for verbs in (grammar.REST, grammar.HANDLE, grammar.MEET) for _, third, _ in verbs}
BASE = {base for verbs in (grammar.REST, grammar.HANDLE, grammar.MEET) for base, _, past in verbs if past != base}


def test_verbs_agree_with_the_pronoun_before_them() -> None:
    seen = Counter()
    for text in SOME:
        words = tokens(text)
        for first, second in itertools.pairwise(words):
            if first in ("he", "she", "it") and second in BASE:
                raise AssertionError(text)
            if first == "they" and second in SINGULAR:
                raise AssertionError(text)
            seen[first] += second in SINGULAR | BASE
    assert min(seen[pronoun] for pronoun in ("he", "she", "it", "they")) > 10


def test_classes_of_adjectives_stand_in_their_order() -> None:
    classes = (grammar.CHARACTER, grammar.CONDITION, grammar.SIZE, grammar.AGE, grammar.COLOUR, grammar.MATERIAL)
    rank = {word: n for n, group in enumerate(classes) for word in group}
    found = Counter(
        (rank[first], rank[second])
        for text in SOME
        for first, second in zip(tokens(text), tokens(text)[1:], strict=False)
        if first in rank and second in rank
    )
    assert all(first <= second for first, second in found)
    assert sum(n for (first, second), n in found.items() if first < second) > 100


def orders(text: str) -> str | None:
    """Which of two open orders a sentence ends in: "adverb verb" or "verb adverb" before its last word."""
    verbs = {form for verb in grammar.REST for form in verb}
    *_, first, second, _ = tokens(text)
    if first in grammar.MANNER and second in verbs:
        return "before"
    return "after" if first in verbs and second in grammar.MANNER else None


def test_open_orders_are_open_and_the_context_counts() -> None:
    found = Counter((orders(text), "," in text) for text in SOME)
    share = {opened: found["before", opened] / (found["before", opened] + found["after", opened]) for opened in (0, 1)}
    assert 0.03 < share[False] < share[True] < 0.97
