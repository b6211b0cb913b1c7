"""The paper's task: put the last words of a sentence back into order.

The prompt gives the sentence without its last three words, and those words shuffled; the answer is the sentence in XML.
The negative of a row has the words in another wrong order; in one of ten rows it also lacks a `sentence` tag.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

from sdmlm.rewards import exact_match

REFERENCE = "sentence"  # the column with the right answer
PROMPT = (
    "Complete the sentence '{start}' by reordering all of the following without adding new punctuation nor words: '{end}'. "
    "Only reply with the sentence in the XML <sentence> </sentence> followed by <verified>Yes</verified> if your answer "
    "correctly addressed the instructions, and <verified>No</verified> if it did not."
)
OPEN, CLOSE = "<sentence>", "</sentence>"
TAGS = (OPEN, CLOSE, "<verified>", "</verified>")  # all tags in the prompt
UNTAGGED = 0.1  # share of the negatives that lose the opening tag, the closing tag or both, with equal probability

reward = exact_match  # r: the body is the reference, tags included


def answer(text: str) -> str | None:
    """The first tagged sentence of a completion, which sentence accuracy compares.

    >>> answer("<sentence>Neat plans fail without luck.</sentence><sentence>Or not.</sentence>")
    'Neat plans fail without luck.'
    """
    match = re.search(f"{OPEN}(.*?){CLOSE}", text, re.DOTALL)
    return match[1].strip() if match else None


def make_row(sentence: str, suffix: int = 3, seed: int = 0, prompt: str = PROMPT) -> dict[str, str] | None:
    """The row of a sentence, or None where its last words allow no two distinct wrong orders.

    Random choices depend only on the seed and the sentence, so a row does not change with the other sentences. `prompt` is a
    template with {start} and {end}.

    >>> row = make_row("Neat plans fail without luck.")
    >>> row["chosen"]
    '<sentence>Neat plans fail without luck.</sentence>'
    """
    words = sentence.split()
    start, end = " ".join(words[:-suffix]), tuple(words[-suffix:])
    wrong = sorted(set(permutations(end)) - {end})
    if len(wrong) < 2:
        return None
    rng = random.Random(f"{seed} {sentence}")
    shown, negative = rng.sample(wrong, 2)  # two different wrong orders: of the prompt and of the negative
    parts = {"start": start, "end": " ".join(shown)}
    tags = [OPEN, CLOSE]
    if rng.random() < UNTAGGED:
        tags = rng.choice([["", CLOSE], [OPEN, ""], ["", ""]])
    return {
        "prompt": re.sub(r"{(start|end)}", lambda found: parts[found[1]], prompt),
        "chosen": f"{OPEN}{' '.join(words)}{CLOSE}",
        "rejected": f"{tags[0]}{start} {' '.join(negative)}{tags[1]}",
        "sentence": " ".join(words),
    }


@dataclass(frozen=True)
class Splits:
    """Rows by split, and how many sentences were left out for which reason."""

    rows: dict[str, list[dict[str, str]]]
    left_out: dict[str, int]


def make_splits(
    sentences: Iterable[str],
    harvard: Sequence[str] | None = None,
    *,
    train: int = 5000,
    calibration: int = 5000,
    test: int = 2000,
    shifted: int = 2000,
    seed: int = 0,
    suffix: int = 3,
    min_words: int = 5,
    max_words: int = 60,
    prompt: str = PROMPT,
) -> Splits:
    """Random train, calibration and test splits; `shifted`: the longest sentences; `harvard`: given separately.

    No sentence occurs twice, within a split or across splits.
    """
    _check(train, calibration, test, shifted, suffix, min_words, max_words)
    if "{start}" not in prompt or "{end}" not in prompt:
        raise ValueError(f"prompt is {prompt!r} but must contain {{start}} and {{end}}, for the parts of the sentence.")
    left_out = {"too short": 0, "too long": 0, "with a tag of ours": 0, "duplicate": 0, "too few wrong orders": 0}
    seen: set[str] = set()

    def usable(lines: Iterable[str]) -> list[str]:
        sentences = []
        for line in lines:
            words = line.split()
            sentence = " ".join(words)
            if not min_words <= len(words) <= max_words:
                left_out["too short" if len(words) < min_words else "too long"] += bool(words)
            elif any(tag in sentence for tag in TAGS):  # its answer could not be parsed
                left_out["with a tag of ours"] += 1
            elif sentence in seen:
                left_out["duplicate"] += 1
            else:
                seen.add(sentence)
                if make_row(sentence, suffix, seed) is None:
                    left_out["too few wrong orders"] += 1
                else:
                    sentences.append(sentence)  # not the row: of millions of sentences, a few thousand become rows
        return sentences

    own = {} if harvard is None else {"harvard": usable(harvard)}  # first: a test sentence must not be trained on
    if own and not own["harvard"]:
        raise ValueError("None of the Harvard sentences can be used: give one sentence a line.")
    pool = usable(sentences)
    needed = train + calibration + test + shifted
    if len(pool) < needed:
        reasons = ", ".join(f"{n} {why}" for why, n in left_out.items() if n) or "none left out"
        raise ValueError(
            f"Only {len(pool)} usable sentences ({reasons}) but {train} + {calibration} + {test} + {shifted} = {needed} are "
            "needed for train, calibration, test and shifted: give more sentences or ask for fewer rows."
        )
    random.Random(seed).shuffle(pool)
    # The pool is shuffled, so ties in length are broken at random, and the rest is in random order.
    longest = sorted(range(len(pool)), key=lambda i: -len(pool[i].split()))[:shifted]
    apart = set(longest)
    rest = [sentence for i, sentence in enumerate(pool) if i not in apart]
    parts = {
        "train": rest[:train],
        "calibration": rest[train : train + calibration],
        "test": rest[train + calibration : train + calibration + test],
        "shifted": [pool[i] for i in longest],
    }
    made = {name: [make_row(s, suffix, seed, prompt) for s in part] for name, part in (parts | own).items() if part}
    return Splits({name: [row for row in rows if row is not None] for name, rows in made.items()}, left_out)


def _check(train: int, calibration: int, test: int, shifted: int, suffix: int, min_words: int, max_words: int) -> None:
    for name, value in (("train", train), ("calibration", calibration), ("test", test), ("shifted", shifted)):
        if value < 0:
            raise ValueError(f"{name} is {value} but must be at least 0.")
    if not 3 <= suffix <= 6:  # two words have one wrong order, and two are needed; 6! = 720 orders
        raise ValueError(
            f"suffix is {suffix} but must be between 3 and 6 words: fewer have no two wrong orders, more have thousands."
        )
    if not suffix < min_words <= max_words:
        raise ValueError(
            f"min_words is {min_words}: it must be above suffix ({suffix}) and at most max_words ({max_words})."
        )
