"""The tasks: rows, rewards, reading an answer, and `sdmlm data`."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdmlm.cli import main
from sdmlm.cli.commands.data import read_sentences
from sdmlm.language_model.encoding import check_rows
from sdmlm.rewards import apply_reward
from sdmlm.tasks import arithmetic, warmup, word_ordering

PAPER_PROMPT = (  # Table 1 of the paper
    "Complete the sentence 'Neat plans' by reordering all of the following without adding new punctuation nor words: "
    "'{end}'. Only reply with the sentence in the XML <sentence> </sentence> followed by <verified>Yes</verified> if your "
    "answer correctly addressed the instructions, and <verified>No</verified> if it did not."
)
words = st.lists(st.sampled_from(["a", "b", "c", "the", "dog", "runs.", "Ünï"]), min_size=5, max_size=12)


def some_sentences(n: int) -> list[str]:
    return [f"Number {i} has {'very ' * (i % 7)}many small friends today." for i in range(n)]


# Word ordering


def test_the_papers_example() -> None:
    row = word_ordering.make_row("Neat plans fail without luck.")
    assert row is not None
    ends = {
        "fail luck. without",
        "luck. fail without",
        "luck. without fail",
        "without fail luck.",
        "without luck. fail",
    }
    shown = re.findall(r"'(.*?)'", row["prompt"])[1]
    assert shown in ends
    assert row["prompt"] == PAPER_PROMPT.format(end=shown)
    assert row["chosen"] == "<sentence>Neat plans fail without luck.</sentence>"
    assert row["sentence"] == "Neat plans fail without luck."


@given(words, st.integers(0, 5), st.integers(3, 4))
@settings(max_examples=200, deadline=None)
def test_every_row_keeps_its_promises(found: list[str], seed: int, suffix: int) -> None:
    sentence = " ".join(found)
    row = word_ordering.make_row(sentence, suffix, seed)
    orders = {tuple(p) for p in permutations(found[-suffix:]) if list(p) != found[-suffix:]}  # distinct wrong orders
    if len(orders) < 2:
        assert row is None
        return
    assert row is not None
    check_rows([row])
    start = " ".join(found[:-suffix])
    shown = row["prompt"].split("words: '")[1].split("'. Only")[0]
    negative = re.sub("</?sentence>", "", row["rejected"])
    assert negative.startswith(start + " ")
    for end in (shown, negative.removeprefix(start + " ")):
        assert tuple(end.split()) in orders
    assert negative != f"{start} {shown}"
    assert row == word_ordering.make_row(sentence, suffix, seed)


def test_another_prompt() -> None:
    sentence = "{end} comes before the {start} here."
    plain, brief = (word_ordering.make_row(sentence, **how) for how in ({}, {"prompt": "{start} | {end}"}))
    assert plain is not None
    assert brief is not None
    start, shown = brief["prompt"].split(" | ")
    assert start == "{end} comes before"  # text of the sentence is not filled in again
    assert f"'{shown}'" in plain["prompt"]
    assert {**plain, "prompt": ""} == {**brief, "prompt": ""}
    with pytest.raises(ValueError, match=r"must contain \{start\} and \{end\}"):
        word_ordering.make_splits(some_sentences(20), train=4, calibration=3, test=2, shifted=0, prompt="{start}")


# The warm-up


@given(st.integers(0, 2**32), st.sampled_from([*warmup.IN_ORDER, *warmup.REORDERED]))
@settings(max_examples=300, deadline=None)
def test_every_exercise_can_be_solved_from_its_prompt(seed: int, make: Any) -> None:
    prompt, answer = make(random.Random(seed), some_sentences(30))
    asked = Counter(re.findall(r"[\w.]+", prompt))
    assert not Counter(re.findall(r"[\w.]+", answer)) - asked  # no word more often than the prompt has it
    assert answer.strip() == answer != ""


def test_what_the_exercises_ask_for() -> None:
    def solved(make: Any, pattern: str, answer: Any) -> None:
        for seed in range(50):
            prompt, right = make(random.Random(seed), some_sentences(30))
            found = re.fullmatch(pattern, prompt)
            assert found is not None, prompt
            assert right.split() == answer(*(part.split() for part in found.groups()))

    solved(warmup.repeat_sentence, "Repeat the sentence '(.*)'.", lambda a: a)
    solved(warmup.repeat_words, "Repeat the words '(.*)'.", lambda a: a)
    solved(
        warmup.complete,
        "Complete the sentence '(.*)' by adding all of the following: '(.*)'.",
        lambda a, b: a + b,
    )
    solved(warmup.reverse_words, "Write the words '(.*)' in reverse order.", lambda a: a[::-1])
    solved(
        warmup.drop_word,
        r"Repeat the sentence '(.*)' without word number (\d+), '(.*)'.",
        lambda a, k, word: [w for i, w in enumerate(a) if i != int(k[0]) - 1],
    )
    solved(warmup.pick_word, r"Which is word number (\d+) of '(.*)'\?", lambda k, a: [a[int(k[0]) - 1]])
    solved(
        warmup.words_by_number,
        "Write the words by their numbers: '(.*)'.",
        lambda a: [w for _, w in sorted(zip(map(int, a[::2]), a[1::2], strict=True))],
    )


def test_the_share_of_exercises_in_order() -> None:
    rng = random.Random(0)
    rows = [warmup.example(rng, some_sentences(30), in_order=0.8) for _ in range(2000)]
    in_order = [row["prompt"].startswith(("Repeat", "Complete")) and "following " not in row["prompt"] for row in rows]
    assert sum(in_order) / len(rows) == pytest.approx(0.8, abs=0.04)
    assert all(re.fullmatch("<sentence>.+</sentence>", row["completion"]) for row in rows)


def test_one_negative_in_ten_lacks_tags_each_way_alike() -> None:
    kinds: Counter[tuple[bool, bool]] = Counter()
    n = 20_000
    for sentence in some_sentences(n):
        row = word_ordering.make_row(sentence)
        assert row is not None
        kinds[row["rejected"].startswith("<sentence>"), row["rejected"].endswith("</sentence>")] += 1
    assert kinds[True, True] / n == pytest.approx(0.9, abs=0.01)
    for kind in ((True, False), (False, True), (False, False)):
        assert kinds[kind] / n == pytest.approx(0.1 / 3, abs=0.006)


def test_splits_are_disjoint_sized_and_the_shifted_are_the_longest() -> None:
    sentences = some_sentences(100)
    sizes = {"train": 20, "calibration": 15, "test": 10, "shifted": 14}
    found = word_ordering.make_splits(sentences, ["The birch canoe slid on the smooth planks."], **sizes)
    assert {name: len(rows) for name, rows in found.rows.items()} == {**sizes, "harvard": 1}
    everything = [row["sentence"] for rows in found.rows.values() for row in rows]
    assert len(set(everything)) == len(everything)
    lengths = {name: [len(row["sentence"].split()) for row in rows] for name, rows in found.rows.items()}
    rest = lengths["train"] + lengths["calibration"] + lengths["test"]
    assert min(lengths["shifted"]) >= max(rest)
    again = word_ordering.make_splits(sentences, ["The birch canoe slid on the smooth planks."], **sizes)
    other = word_ordering.make_splits(sentences, **sizes, seed=1)
    assert again == found
    assert other.rows["train"] != found.rows["train"]


def test_what_is_left_out_is_counted() -> None:
    sentences = [*some_sentences(10), some_sentences(1)[0] + " ", "Too short.", "x " * 61, "We all said no no no", ""]
    sentences += ["A tag <sentence> may not stand here.", "Nor may </verified> stand in it."]
    harvard = [some_sentences(2)[1]]
    found = word_ordering.make_splits(sentences, harvard, train=4, calibration=3, test=2, shifted=0)
    counts = {"too short": 1, "too long": 1, "with a tag of ours": 2, "duplicate": 2, "too few wrong orders": 1}
    assert found.left_out == counts
    assert harvard[0] not in {row["sentence"] for name in ("train", "calibration", "test") for row in found.rows[name]}


def test_reading_and_rewarding_an_answer() -> None:
    row = word_ordering.make_row("Neat plans fail without luck.")
    assert row is not None
    right, bare = row["chosen"], row["sentence"]
    assert apply_reward(word_ordering.reward, [row] * 3, [right, bare, row["rejected"]]) == [1, 0, 0]
    assert word_ordering.answer(f"Here: {right} and <sentence>more</sentence>") == row["sentence"]
    assert word_ordering.answer(bare) is None
    assert word_ordering.answer("<sentence>cut off") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": 90}, "give more sentences or ask for fewer rows"),
        ({"train": -1}, "train is -1"),
        ({"suffix": 2}, "suffix is 2"),
        ({"min_words": 3}, "min_words is 3"),
        ({"min_words": 20, "max_words": 10}, "max_words"),
        ({"harvard": ["x"]}, "Harvard"),
    ],
)
def test_bad_sizes(options: dict[str, Any], message: str) -> None:
    sizes = {"train": 5, "calibration": 5, "test": 5, "shifted": 5}
    with pytest.raises(ValueError, match=message):
        word_ordering.make_splits(some_sentences(30), **{**sizes, **options})


# Arithmetic


@given(st.integers(0, 10**7 - 1), st.integers(0, 10**7 - 1), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_sums_are_right_and_negatives_wrong(a: int, b: int, seed: int) -> None:
    row = arithmetic.make_row(a, b, seed)
    check_rows([row])
    assert arithmetic.answer(row["chosen"]) == str(a + b) == row["sum"]
    for line in row["chosen"].split("\n")[:-1]:
        left, right = line.split(" = ")
        assert sum(map(int, left.split(" + "))) == int(right)
    assert apply_reward(arithmetic.reward, [row] * 2, [row["chosen"], row["rejected"]]) == [1, 0]


def test_a_right_sum_with_wrong_working_gets_no_reward() -> None:
    row = arithmetic.make_row(17, 5)
    bad = [
        "<sum>22</sum>",
        "7 + 5 = 12\n<sum>22</sum>",
        "7 + 5 = 12\n1 + 0 = 1\n<sum>22</sum>",
        "7 + 5 = 12\n1 + 1 = 2\n<sum>22</sum>",
        "\u0667 + 5 = 12\n1 + 0 + 1 = 2\n<sum>22</sum>",  # another script's 7
        f"7 + 5 = {'0' * 5000}12\n1 + 0 + 1 = 2\n<sum>22</sum>",  # more digits than int() reads
    ]
    assert apply_reward(arithmetic.reward, [row] * 6, bad) == [0] * 6


def test_arithmetic_splits() -> None:
    found = arithmetic.make_splits(30, 20, 10, 5)
    assert {name: len(rows) for name, rows in found.items()} == {
        "train": 30,
        "calibration": 20,
        "test": 10,
        "shifted": 5,
    }
    pairs = [tuple(sorted((row["a"], row["b"]))) for rows in found.values() for row in rows]
    assert len(set(pairs)) == len(pairs)
    assert min(len(str(row["a"])) for row in found["shifted"]) > max(len(str(row["a"])) for row in found["train"])
    assert found == arithmetic.make_splits(30, 20, 10, 5)


def test_arithmetic_splits_are_alike() -> None:
    """There are 45 pairs of single digits: those that are drawn do not all go to the first split."""
    found = arithmetic.make_splits(2000, 2000, 2000, 0)
    small = [sum(row["a"] < 100 and row["b"] < 100 for row in rows) / 2000 for rows in found.values()]
    assert max(small) - min(small) < 0.04  # about 3.5 standard deviations of a difference
    assert min(sum(row["a"] < 10 and row["b"] < 10 for row in rows) for rows in found.values()) > 0


# Sentences


def test_sentences_of_a_data_set_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, *config: str, split: str) -> datasets.Dataset:
        asked.append((name, *config, split))
        if name == "me/none":
            raise FileNotFoundError("Dataset 'me/none' doesn't exist on the Hub.\nLook elsewhere.")
        if name == "me/script":
            raise RuntimeError("Dataset scripts are no longer supported")
        if name == "me/holes":
            return datasets.Dataset.from_dict({"text": [None, "One two.\n\nThree.\n"]})
        if name == "me/numbers":
            return datasets.Dataset.from_dict({"sentence": [1, 2]})
        columns = {"me/sentences": "sentence", "me/texts": "text"}
        return datasets.Dataset.from_dict({"number": [1, 2], columns.get(name, "line"): ["One two.", "Three."]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_sentences("me/sentences") == read_sentences("me/texts:test") == ["One two.", "Three."]
    assert read_sentences("me/holes:en:test") == ["One two.", "Three."]
    assert asked == [("me/sentences", "train"), ("me/texts", "test"), ("me/holes", "en", "test")]
    asked.clear()
    read_sentences("me/texts:train[:1000]")
    read_sentences("me/texts:en:train[10%:20%]")
    assert asked == [("me/texts", "train[:1000]"), ("me/texts", "en", "train[10%:20%]")]
    with pytest.raises(ValueError, match="me/numbers has no text in its column sentence"):
        read_sentences("me/numbers")
    with pytest.raises(ValueError, match=r"me/script is no file here.*no longer supported"):
        read_sentences("me/script")
    with pytest.raises(ValueError, match=r"me/lines has no column `sentence` or `text` \(found: number, line\)"):
        read_sentences("me/lines")
    with pytest.raises(
        ValueError, match=r"me/none is no file here, and the Hub gave .*: Dataset 'me/none' doesn't exist"
    ):
        read_sentences("me/none")
    with pytest.raises(ValueError, match=r"nothing\.txt is no file: give a text file"):
        read_sentences("nothing.txt")


# sdmlm data


def test_data_writes_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "sentences.txt"
    source.write_text("\n".join(some_sentences(60)), encoding="utf-8")
    sizes = ["--train", "20", "--calibration", "10", "--test", "5", "--shifted", "5"]
    folder = tmp_path / "rows"
    command = ["data", "word-ordering", "--sentences", str(source), "--harvard", str(source), "--output", str(folder)]
    assert main([*command, *sizes, "--json"]) == 2  # every sentence is a Harvard sentence, so none is left to train on
    assert "duplicate" in capsys.readouterr().err
    assert not folder.exists()
    assert main([*command[:4], "--output", str(folder), *sizes, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows"] == {"train": 20, "calibration": 10, "test": 5, "shifted": 5}
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert set(rows[0]) == {"prompt", "chosen", "rejected", "sentence"}
    before = (folder / "train.jsonl").read_bytes()
    assert main([*command[:4], "--output", str(folder), *sizes, "--seed", "1"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert (folder / "train.jsonl").read_bytes() == before
    assert main([*command[:4], "--output", str(source), *sizes]) == 2
    assert "sentences.txt is a file" in capsys.readouterr().err
    brief = ["--output", str(tmp_path / "brief"), *sizes, "--prompt"]
    assert main([*command[:4], *brief, "{start} only"]) == 2
    assert "must contain {start} and {end}" in capsys.readouterr().err
    assert main([*command[:4], *brief, "{start} | {end}", "--json"]) == 0
    short = [json.loads(line) for line in (tmp_path / "brief" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(row["prompt"].count(" | ") == 1 and len(row["prompt"]) < 120 for row in short)
    assert [row["chosen"] for row in short] == [row["chosen"] for row in rows]
    capsys.readouterr()
    none = ["--train", "0", "--calibration", "0", "--test", "0", "--shifted"]
    assert main([*command[:4], "--output", str(tmp_path / "new"), *none, "0"]) == 2
    assert "All sizes are 0" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert main([*command[:4], "--output", str(tmp_path / "new"), *none, "5"]) == 0
    assert "Next" not in capsys.readouterr().out  # there is nothing to train on


def test_data_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--train", "6", "--calibration", "6", "--test", "4", "--shifted", "4"]
    assert main(["data", "arithmetic", "--output", str(tmp_path / "rows"), *sizes]) == 0
    assert "train.jsonl" in capsys.readouterr().out
    assert len((tmp_path / "rows" / "shifted.jsonl").read_text(encoding="utf-8").splitlines()) == 4


@pytest.mark.parametrize(
    ("content", "message"), [(b"caf\xe9 au lait\n", "not UTF-8"), (b"\n\n", "is empty"), (None, "is no file")]
)
def test_data_refuses_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    source = tmp_path / "sentences.txt"
    if content is not None:
        source.write_bytes(content)
    assert main(["data", "word-ordering", "--sentences", str(source), "--output", str(tmp_path / "rows")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "sentences.txt" in error
    assert not (tmp_path / "rows").exists()
