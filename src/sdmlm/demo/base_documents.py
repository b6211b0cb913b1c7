"""The training documents of the demo's base LM: sentences of the grammar, and a few generic instructions with answers.

The model learns to copy exactly, and to follow instructions: repeat a sentence or a list of random words, leave out a word,
say which words are missing, continue a sentence, append given words in the given order, say whether a sentence is good and
whether an answer was right. It never sees words that must be re-ordered, nor a sentence with words in the wrong order: that
is what fine-tuning teaches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from sdmlm.demo import sentences as grammar
from sdmlm.demo.sentences import LEXICON, sentence

WORDS = tuple(sorted(LEXICON))
YES_OR_NO = "Reply with Yes or No."
IN_XML = "Only reply with the sentence in the XML <sentence> </sentence>."


@dataclass(frozen=True)
class BaseDocument:
    """A plain text, or an instruction with its answer. `count_prompt`: whether the loss counts the prompt too.

    `right`: if not None, a second turn asks whether the answer was right, and gives this as the answer. The loss does not
    count a wrong answer. `wrong`: the words of the answer that are wrong; each is followed by a mark. The loss counts the
    mark, not the word.
    """

    answer: str
    prompt: str | None = None
    count_prompt: bool = True
    right: bool | None = None
    wrong: frozenset[int] = frozenset()


def plain(rng: random.Random) -> BaseDocument:
    return BaseDocument(sentence(rng))


def repeat_sentence(rng: random.Random) -> BaseDocument:
    text = sentence(rng)
    return rng.choice(
        (
            BaseDocument(text, f"Repeat the sentence '{text}'."),
            BaseDocument(f"<sentence>{text}</sentence>", f"Repeat the sentence '{text}'. {IN_XML}"),
            BaseDocument(f"<sentence>{text}</sentence>", f"Write down '{text}' again. {IN_XML}"),
        )
    )


def repeat_words(rng: random.Random) -> BaseDocument:
    """Random words cannot be guessed, so they teach exact copying; more repetitions teach it sooner."""
    words = " ".join(random_words(rng, rng.choice((1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 15))))
    times = rng.randint(1, 4) if len(words) < 60 else 1
    answer = " ".join([words] * times)
    if times > 1:
        return BaseDocument(answer, f"Repeat the words '{words}' {grammar.NUMBERS[times - 2]} times.", False)
    if rng.random() < 0.5:
        return BaseDocument(answer, f"Repeat the words '{words}'.", False)
    return BaseDocument(f"<sentence>{answer}</sentence>", f"Repeat the words '{words}'. {IN_XML}", False)


def complete_sentence(rng: random.Random) -> BaseDocument:
    """Complete a sentence with its missing words, which are given in their order."""
    return complete(sentence(rng).split(), rng, True)


def complete_words(rng: random.Random) -> BaseDocument:
    return complete(random_words(rng, rng.randint(5, 20)), rng, False)


def complete(words: list[str], rng: random.Random, count_prompt: bool) -> BaseDocument:
    cut = len(words) - rng.randint(1, min(6, len(words) - 1))
    start, end, text = " ".join(words[:cut]), " ".join(words[cut:]), " ".join(words)
    return BaseDocument(
        f"<sentence>{text}</sentence>",
        rng.choice(
            (
                f"Complete the sentence '{start}' with the following words: '{end}'. {IN_XML}",
                f"Complete the sentence '{start}' with all of the words '{end}'. {IN_XML}",
                f"Write '{start}' and then '{end}'. {IN_XML}",
            )
        ),
        count_prompt,
    )


def continue_sentence(rng: random.Random) -> BaseDocument:
    words = sentence(rng).split()
    cut = rng.randint(2, len(words) - 1)
    return BaseDocument(" ".join(words[cut:]), f"Continue the sentence '{' '.join(words[:cut])}'.")


def choose_word(rng: random.Random) -> BaseDocument:
    """Which of three words continues a sentence? The other two are random."""
    words = sentence(rng).split()
    cut = rng.randint(1, len(words) - 1)
    start, choices = " ".join(words[:cut]), [words[cut], *random_words(rng, 2)]
    rng.shuffle(choices)
    return BaseDocument(
        f"<sentence>{start} {words[cut]}</sentence>",
        f"Continue the sentence '{start}' with one of the words '{' '.join(choices)}'. {IN_XML}",
    )


def leave_out(rng: random.Random) -> BaseDocument:
    """Write all words except one: teaches to keep track of what has been written."""
    words = rng.sample(WORDS, rng.randint(3, 8))
    at = rng.randrange(len(words))
    rest = " ".join(words[:at] + words[at + 1 :])
    return BaseDocument(
        f"<sentence>{rest}</sentence>", f"Write '{' '.join(words)}' without '{words[at]}'. {IN_XML}", False
    )


def say_missing(rng: random.Random) -> BaseDocument:
    """Say which words are missing in a text: teaches to find what has not been written yet."""
    words = rng.sample(WORDS, rng.randint(2, 12))
    given = words[: rng.randint(2, min(5, len(words)))]
    said = rng.sample(range(len(given)), rng.randint(1, len(given) - 1))
    text = " ".join([*words[len(given) :], *(given[i] for i in said)])
    missing = " ".join(word for i, word in enumerate(given) if i not in said)
    asked = f"Which of the words '{' '.join(given)}' are missing in '{text}'? {IN_XML}"
    return BaseDocument(f"<sentence>{missing}</sentence>", asked, False)


def mark_wrong(rng: random.Random) -> BaseDocument:
    """A mark after every wrong word: a judgement at each word gives the most signal per document."""
    words = sentence(rng).split()
    wrong = [False] * len(words)
    for _ in range(rng.choice((0, 1, 1, 2))):
        bad, at = spoilt(words, rng)
        wrong[at : at + (len(bad) == len(words))] = [True]
        words = bad
    return BaseDocument(" ".join(words), "Mark the wrong words.", wrong=frozenset(i for i, w in enumerate(wrong) if w))


def judge_sentence(rng: random.Random) -> BaseDocument:
    text = sentence(rng)
    good = rng.random() < 0.5
    asked = text if good else " ".join(spoilt(text.split(), rng)[0])
    return BaseDocument("Yes" if good else "No", f"Is '{asked}' a good sentence? {YES_OR_NO}", good)


def spoilt(words: list[str], rng: random.Random) -> tuple[list[str], int]:
    """The words with one of them replaced, inserted or doubled, and its position (half of the time near the end)."""
    at = rng.randrange(max(0, len(words) - 4), len(words)) if rng.random() < 0.5 else rng.randrange(len(words))
    bare, tail = words[at].rstrip(".,"), words[at][len(words[at].rstrip(".,")) :]
    other = rng.choice(WORDS if rng.random() < 0.5 else words).rstrip(".,")
    if rng.random() < 0.6:
        if other == bare:
            other = rng.choice([word for word in WORDS if word != bare])
        return [*words[:at], other + tail, *words[at + 1 :]], at
    return [*words[:at], other, *words[at:]], at


def checked(d: BaseDocument, rng: random.Random) -> BaseDocument:
    """The document with the question whether the answer was right; in half of the cases the answer is made wrong first."""
    if rng.random() < 0.5:
        return replace(d, right=True)
    tags = [tag for tag in ("<sentence>", "</sentence>") if tag in d.answer]
    words = d.answer.removeprefix("<sentence>").removesuffix("</sentence>").split()
    if len(words) > 1 and rng.random() < 0.4:  # only here, where the prompt tells what is not there
        near_end = rng.randrange(max(0, len(words) - 4), len(words))
        del words[near_end if rng.random() < 0.7 else rng.randrange(len(words))]
    else:
        words, _ = spoilt(words, rng)
    body = " ".join(words)
    return replace(d, answer=body.join(tags) if tags else body, right=False)


def random_words(rng: random.Random, n: int) -> list[str]:
    """Random words, some with a comma or full stop. Half of the lists repeat a few words, so that the position in the list,
    not the previous word, determines the next word."""
    pool = rng.choices(WORDS, k=1 + n // 2) if rng.random() < 0.5 else WORDS
    return [word + rng.choice(("", "", "", "", "", ",", ".")) for word in rng.choices(pool, k=n)]


MIX = {
    plain: 3,
    repeat_sentence: 2,
    repeat_words: 3,
    complete_sentence: 8,
    complete_words: 6,
    continue_sentence: 1,
    choose_word: 4,
    leave_out: 3,
    say_missing: 3,
    mark_wrong: 6,
    judge_sentence: 10,
}
CHECKED = (repeat_sentence, repeat_words, complete_sentence, complete_words, leave_out, say_missing)
# At first mostly random words, which give much signal per document: copying is learned sooner.
FIRST_MIX = {plain: 2, repeat_words: 8, complete_words: 1, mark_wrong: 2, judge_sentence: 5}


def document(rng: random.Random, first: bool = False) -> BaseDocument:
    mix = FIRST_MIX if first else MIX
    (make,) = rng.choices(list(mix), list(mix.values()))
    made = make(rng)
    return checked(made, rng) if make in CHECKED and not first and rng.random() < 0.5 else made
