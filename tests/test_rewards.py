"""The reward r: built in, loaded by name, and checked."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sdmlm.language_model.encoding import VerificationTags
from sdmlm.rewards import apply_reward, exact_match, load_reward, reward_name
from sdmlm.tasks import arithmetic, word_ordering

ROWS = [
    {"prompt": "a?", "chosen": "a\n<verified>Yes</verified>", "rejected": "b", "topic": "x"},
    {"prompt": "c?", "chosen": " c", "rejected": "d\n<verified>No</verified>", "topic": "y"},
]


def test_exact_match_strips_outer_white_space_only() -> None:
    completions = [" a b\n", "a  b", "A b", "", "a b"]
    assert exact_match(["?"] * 5, completions, chosen=["a b"] * 5, other=[1] * 5) == [1, 0, 0, 0, 1]
    message = [{"role": "assistant", "content": "a b "}]
    assert exact_match(["?"], [message], chosen=[message]) == [1]


def test_apply_reward_compares_bodies_without_tags() -> None:
    assert apply_reward(exact_match, ROWS, ["a", "c\n"]) == [1, 1]
    assert apply_reward(exact_match, ROWS, ["b", "c"]) == [0, 1]
    assert apply_reward(exact_match, [], []) == []
    tags = VerificationTags("[", "]", "ja", "nein", " ")
    assert apply_reward(exact_match, [{**ROWS[0], "chosen": "a [ja]"}], ["a"], tags) == [1]


@pytest.mark.parametrize("chat", [False, True])
def test_a_reward_gets_what_trl_would_give_it(chat: bool) -> None:
    def form(text: str) -> object:
        return [{"role": "assistant", "content": text}] if chat else text

    rows = [{**row, "chosen": form(str(row["chosen"])), "rejected": form(str(row["rejected"]))} for row in ROWS]
    seen: dict[str, object] = {}

    def reward(prompts: list[str], completions: list[object], **columns: list[object]) -> list[int]:
        seen.update(prompts=prompts, completions=completions, **columns)
        return [0, 1]

    assert apply_reward(reward, rows, ["e", "f"]) == [0, 1]
    assert seen == {
        "prompts": ["a?", "c?"],
        "completions": [form("e"), form("f")],
        "chosen": [form("a"), form(" c")],
        "rejected": [form("b"), form("d")],
        "topic": ["x", "y"],
    }


def test_a_column_that_some_rows_lack_is_none_there() -> None:
    rows = [{k: v for k, v in ROWS[0].items() if k != "topic"}, {**ROWS[1], "level": 3}, ROWS[0]]
    seen: dict[str, object] = {}

    def reward(prompts: list[str], completions: list[object], **columns: list[object]) -> list[int]:
        seen.update(columns)
        return [0] * len(prompts)

    apply_reward(reward, rows, ["e", "f", "g"])
    assert {k: seen[k] for k in seen if k not in ("chosen", "rejected")} == {
        "topic": [None, "y", "x"],
        "level": [None, 3, None],
    }
    seen.clear()
    apply_reward(reward, rows[:1], ["e"], columns_of_all=["prompt", "chosen", "topic"])
    assert set(seen) == {"chosen", "rejected", "topic"}
    assert seen["topic"] == [None]


@pytest.mark.parametrize(
    "answers", [[0, 1], (False, True), [0.0, 1.0], np.array([0, 1]), torch.tensor([0.0, 1.0]), [np.int64(0), np.True_]]
)
def test_all_kinds_of_0_and_1(answers: object) -> None:
    result = apply_reward(lambda **_: answers, ROWS, ["e", "f"])
    assert result == [0, 1]
    assert [type(r) for r in result] == [int, int]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([1], "Reward bad returned 1 values for 2 completions"),
        ([0, 1, 1], "Reward bad returned 3 values for 2 completions"),
        ([0, 0.5], "Reward bad returned 0.5 for completion 1"),
        ([None, 1], "Reward bad returned None for completion 0"),
        ([float("nan"), 1], "Reward bad returned nan for completion 0"),
        (["1", "0"], "Reward bad returned '1' for completion 0"),
        (2, "Reward bad returned int"),
    ],
)
def test_wrong_answers_are_refused(answers: object, message: str) -> None:
    def bad(**_: object) -> object:
        return answers

    with pytest.raises(ValueError, match=message):
        apply_reward(bad, ROWS, ["e", "f"])  # type: ignore[arg-type]


def test_names_of_rewards() -> None:
    assert reward_name(exact_match) == "sdmlm.rewards:exact_match"
    assert reward_name(word_ordering.reward) == "sdmlm.rewards:exact_match"
    assert reward_name(arithmetic.reward) == "sdmlm.tasks.arithmetic:reward"
    assert reward_name(lambda prompts, completions, **columns: []) is None
    assert reward_name(functools.partial(exact_match)) is None


def test_load_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards_for_sdmlm.py").write_text(
        "def always(prompts, completions, **_): return [1] * len(prompts)\n"
    )
    (tmp_path / "my_broken_rewards.py").write_text("import no_such_thing_at_all\n")
    assert load_reward(None) is exact_match
    assert load_reward(exact_match) is exact_match
    assert load_reward("sdmlm.rewards:exact_match") is exact_match
    assert apply_reward(load_reward("my_rewards_for_sdmlm:always"), ROWS, ["", ""]) == [1, 1]
    for wrong, message in [
        ("exact_match", "not of the form 'module:function'"),
        (":f", "not of the form 'module:function'"),
        ("no_such_module_at_all:f", "no module 'no_such_module_at_all'"),
        ("my_broken_rewards:f", "no module 'no_such_thing_at_all'"),
        ("my_rewards_for_sdmlm:never", "has no function 'never'"),
        ("sdmlm.rewards:Reward.x", "has no function 'Reward.x'"),
        (3, "not int"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_reward(wrong)  # type: ignore[arg-type]
