"""Exercises in copying, for a small LM that cannot copy yet: a stage before fine-tuning on word ordering.

Every exercise says explicitly in which order the words go: as given, reversed, rotated, with two words swapped, or by number. None asks
for the order that makes sense, so what word ordering asks for is left to fine-tuning. Exercises in the given order teach copying;
the others teach to fetch a word from any place, without which a fine-tuned LM drops or doubles words of the shuffled ending.
Every answer is in the XML of word ordering; the prompts do not say so, since what is the same in every prompt only costs time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sdmlm.tasks.word_ordering import CLOSE, OPEN

Exercise = tuple[str, str]  # the prompt, and the answer inside the tags


def example(rng: random.Random, sentences: Sequence[str], in_order: float = 0.4) -> dict[str, str]:
    """One exercise as a row of prompt and completion; `in_order` is the share of exercises that keep the given order.

    >>> example(random.Random(1), ["A small red bird sang in the old tree."])["completion"]
    '<sentence>A small red bird sang in the old tree.</sentence>'
    """
    kinds = IN_ORDER if rng.random() < in_order else REORDERED
    make = rng.choices(list(kinds), weights=list(kinds.values()))[0]
    prompt, answer = make(rng, sentences)
    return {"prompt": prompt, "completion": f"{OPEN}{answer}{CLOSE}"}


def _sentence(rng: random.Random, sentences: Sequence[str]) -> list[str]:
    return rng.choice(sentences).split()


def _words(rng: random.Random, sentences: Sequence[str], least: int = 3, most: int = 10) -> list[str]:
    """Words that make no sense together, without their punctuation."""
    words = [rng.choice(_sentence(rng, sentences)).strip(".,!?\"'") for _ in range(rng.randint(least, most))]
    return [word or "and" for word in words]


def _distinct_words(rng: random.Random, sentences: Sequence[str], most: int = 9) -> list[str]:
    words = list(dict.fromkeys(_words(rng, sentences, 4, most)))
    return words if len(words) >= 3 else ["one", "two", "three"]


# In the given order


def repeat_sentence(rng: random.Random, sentences: Sequence[str]) -> Exercise:
    text = " ".join(_sentence(rng, sentences))
    return f"Repeat the sentence '{text}'.", text


def repeat_words(rng: random.Random, sentences: Sequence[str]) -> Exercise:
    text = " ".join(_words(rng, sentences, 3, 14))
    return f"Repeat the words '{text}'.", text


def complete(rng: random.Random, sentences: Sequence[str]) -> Exercise:
    words = _sentence(rng, sentences)
    k = rng.randint(1, min(6, len(words) - 1))
    start, end = " ".join(words[:-k]), " ".join(words[-k:])
    return f"Complete the sentence '{start}' by adding all of the following: '{end}'.", f"{start} {end}"


def drop_word(rng: random.Random, sentences: Sequence[str]) -> Exercise:
    words = _sentence(rng, sentences)
    k = rng.randrange(len(words))
    left = " ".join(words[:k] + words[k + 1 :])
    return f"Repeat the sentence '{' '.join(words)}' without word number {k + 1}, '{words[k]}'.", left


# In another order, which the prompt spells out


def reverse_words(rng: random.Random, sentences: Sequence[str]) -> Exercise:
    words = _words(rng, sentences, 3, 7)
    return f"Write the words '{' '.join(words)}' in reverse order.", " ".join(reversed(words))


def rotate_words(rng: random.Random, sentences: Sequence[str]) -> Exercise:
    words = _words(rng, sentences, 3, 8)
    if rng.random() < 0.5:
        prompt = f"Move the first of the words '{' '.join(words)}' to the end."
        return prompt, " ".join(words[1:] + words[:1])
    prompt = f"Move the last of the words '{' '.join(words)}' to the front."
    return prompt, " ".join(words[-1:] + words[:-1])


def swap_words(rng: random.Random, sentences: Sequence[str]) -> Exercise:
    words = _distinct_words(rng, sentences)
    i, j = sorted(rng.sample(range(len(words)), 2))
    swapped = list(words)
    swapped[i], swapped[j] = words[j], words[i]
    return f"Swap '{words[i]}' and '{words[j]}' in the words '{' '.join(words)}'.", " ".join(swapped)


def pick_word(rng: random.Random, sentences: Sequence[str]) -> Exercise:
    words = _words(rng, sentences, 3, 8)
    k = rng.randrange(len(words))
    return f"Which is word number {k + 1} of '{' '.join(words)}'?", words[k]


def insert_word(rng: random.Random, sentences: Sequence[str]) -> Exercise:
    words = _distinct_words(rng, sentences)
    new, k = _words(rng, sentences, 1, 1)[0], rng.randrange(len(words))
    asked = f"Insert '{new}' before '{words[k]}' in the words '{' '.join(words)}'."
    return asked, " ".join([*words[:k], new, *words[k:]])


def words_by_number(rng: random.Random, sentences: Sequence[str]) -> Exercise:
    words = _words(rng, sentences, 3, 6)
    numbered = list(enumerate(words, start=1))
    rng.shuffle(numbered)
    shown = " ".join(f"{n} {word}" for n, word in numbered)
    return f"Write the words by their numbers: '{shown}'.", " ".join(words)


def complete_reordered(rng: random.Random, sentences: Sequence[str]) -> Exercise:
    """An ending of two to five words, given in another order, with how to restore the right one."""
    words = _sentence(rng, sentences)
    k = rng.randint(2, max(2, min(5, len(words) - 1)))
    start, end = " ".join(words[:-k]), words[-k:]
    kind = rng.choice(("reverse", "first", "last", "numbers"))
    if kind == "reverse":
        shown, how = end[::-1], "in reverse order"
    elif kind == "first":
        shown, how = end[-1:] + end[:-1], "with the first of them moved to the end"
    elif kind == "last":
        shown, how = end[1:] + end[:1], "with the last of them moved to the front"
    else:
        numbered = list(enumerate(end, start=1))
        rng.shuffle(numbered)
        shown, how = [f"{n} {word}" for n, word in numbered], "by their numbers"
    asked = f"Complete the sentence '{start}' by adding all of the following {how}: '{' '.join(shown)}'."
    return asked, f"{start} {' '.join(end)}"


Kinds = dict[Callable[[random.Random, Sequence[str]], Exercise], float]
IN_ORDER: Kinds = {repeat_sentence: 3, repeat_words: 3, complete: 3, drop_word: 1}
REORDERED: Kinds = {
    reverse_words: 2,
    rotate_words: 2,
    swap_words: 1,
    pick_word: 1,
    insert_word: 1,
    words_by_number: 2,
    complete_reordered: 4,
}
