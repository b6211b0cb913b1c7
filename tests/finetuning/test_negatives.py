"""Hard negatives: the policy, and which generations become negatives."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from decoding_checks import ALWAYS, ROWS, Script, fox_encoder, fox_model
from tiny_lm import copy_rows, tiny_tokenizer
from transformers import LlamaForCausalLM

from sdmlm.finetuning.negatives import HardNegatives, NegativePolicy
from sdmlm.language_model.encoding import Encoder
from sdmlm.rewards import exact_match


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return fox_encoder()


@pytest.fixture(scope="module")
def model(encoder: Encoder) -> LlamaForCausalLM:
    return fox_model(encoder)


def test_policy_frequencies() -> None:
    policy = NegativePolicy(gamma_plus=0.3, gamma_gen=0.6, gamma_diversity=0.4, seed=5)
    n = 4000
    for epoch, generated in ((1, 0.0), (2, 0.7 * 0.6 * 0.4), (3, 0.7 * 0.6 * 0.4)):
        draws = [policy.draw(row, epoch) for row in range(n)]
        assert not any(d.positive and d.generate for d in draws)
        assert np.mean([d.positive for d in draws]) == pytest.approx(0.3, abs=0.03)
        assert np.mean([d.generate for d in draws]) == pytest.approx(generated, abs=0.03)


def test_policy_is_a_function_of_seed_epoch_and_row() -> None:
    policy = NegativePolicy(seed=1)

    def drawn(policy: NegativePolicy, epoch: int) -> list[tuple[bool, bool]]:
        return [tuple(policy.draw(row, epoch)) for row in range(200)]

    assert drawn(policy, 2) == drawn(NegativePolicy(seed=1), 2)
    assert drawn(policy, 2) != drawn(policy, 3)
    assert drawn(policy, 2) != drawn(NegativePolicy(seed=2), 2)
    assert {d[0] for d in drawn(NegativePolicy(gamma_plus=0, gamma_gen=1, gamma_diversity=1), 2)} == {False}
    assert {d[1] for d in drawn(NegativePolicy(gamma_plus=0, gamma_gen=1, gamma_diversity=1), 2)} == {True}
    assert {d[1] for d in drawn(NegativePolicy(gamma_plus=0, gamma_gen=0), 2)} == {False}
    early = NegativePolicy(gamma_plus=0, gamma_gen=1, gamma_diversity=1, first_epoch=1)
    assert {d[1] for d in drawn(early, 1)} == {True}
    with pytest.raises(ValueError, match=r"gamma_gen is 1\.5"):
        NegativePolicy(gamma_gen=1.5)


ANSWERS = {
    "p0": " the fox\n<verified>Yes</verified>",  # wrong, though it says Yes: a hard negative
    "p1": "fox\n<verified>No</verified>",  # right, though it says No: never a negative
    "p2": "fox ",  # right, without a tag
    "p3": "",  # wrong: nothing at all
}


def test_which_generations_become_negatives(encoder: Encoder) -> None:
    negatives = HardNegatives(ALWAYS, exact_match, max_new_tokens=40)
    attempts = negatives.prepare(Script(encoder, ANSWERS), encoder, ROWS, [0, 1, 2, 3], epoch=2, step=7)
    assert [(a.epoch, a.step, a.row, a.body) for a in attempts] == [
        (2, 7, 0, " the fox"),
        (2, 7, 1, None),
        (2, 7, 2, None),
        (2, 7, 3, ""),
    ]
    documents = negatives.documents(ROWS, [3, 2, 1, 0], epoch=2)
    assert [(d.row, d.completion, d.positive, d.source) for d in documents] == [
        (3, "", False, "generated"),
        (2, "dog", False, "static"),
        (1, "dog", False, "static"),
        (0, " the fox", False, "generated"),
    ]
    # Re-encoded as a static row would be: the model's own ids, but for the verdict, which is ours.
    again = encoder.encode("p0", documents[3].completion, documents[3].positive)
    emitted = encoder.encode_prompt("p0") + encoder.continuation(ANSWERS["p0"])
    assert again.input_ids[: again.verified_at + 1] == emitted[: again.verified_at + 1]
    assert encoder.decode(again.input_ids).endswith(" the fox\n<verified>No</verified><|end|>")


def test_a_generation_that_the_reward_accepts_is_no_negative(encoder: Encoder) -> None:
    def lenient(prompts: list[str], completions: list[str], **_: Any) -> list[int]:
        return [int("fox" in completion) for completion in completions]

    negatives = HardNegatives(ALWAYS, lenient, max_new_tokens=40)
    attempts = negatives.prepare(Script(encoder, ANSWERS), encoder, ROWS, range(4), epoch=2, step=0)
    assert [a.body for a in attempts] == [None, None, None, ""]


def test_a_reward_gets_the_columns_of_all_rows(encoder: Encoder) -> None:
    seen: list[Any] = []

    def reward(prompts: list[str], completions: list[str], level: list[Any], **_: Any) -> list[int]:
        seen.extend(level)
        return [0] * len(prompts)

    rows = [*ROWS[:3], {**ROWS[3], "level": 5}]
    negatives = HardNegatives(ALWAYS, reward, max_new_tokens=40)
    script = Script(encoder, ANSWERS)
    for ids in ([0, 1], [2, 3]):
        negatives.prepare(script, encoder, rows, ids, epoch=2, step=0)
    assert seen == [None, None, None, 5]


def test_the_reference_is_no_negative_even_if_the_reward_says_so(encoder: Encoder) -> None:
    negatives = HardNegatives(ALWAYS, lambda prompts, **_: [0] * len(prompts), max_new_tokens=40)
    attempts = negatives.prepare(Script(encoder, ANSWERS), encoder, ROWS, range(4), epoch=2, step=0)
    assert [a.body for a in attempts] == [" the fox", None, None, ""]


def test_a_generation_that_does_not_fit_is_no_negative(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = max(len(encoder.encode(r["prompt"], r["chosen"], True).input_ids) for r in ROWS)
    bounded = Encoder(encoder.tokenizer, max_length=longest)
    monkeypatch.setattr(Encoder, "read", lambda self, ids: ("a very long text that came out of few tokens", None))
    negatives = HardNegatives(ALWAYS, exact_match, max_new_tokens=40)
    assert [a.body for a in negatives.prepare(Script(bounded, ANSWERS), bounded, ROWS, [0], 2, 0)] == [None]


def test_documents_follow_the_draws_and_nothing_is_made_twice(encoder: Encoder) -> None:
    rows = [{"prompt": f"p{i}", "chosen": "fox", "rejected": "dog"} for i in range(60)]
    script = Script(encoder, {f"p{i}": "cat" if i % 2 else "fox" for i in range(60)})
    policy = NegativePolicy(gamma_gen=0.8, gamma_diversity=0.8, seed=3)
    negatives = HardNegatives(policy, exact_match, max_new_tokens=9)
    assert negatives.prepare(script, encoder, rows, range(60), epoch=1, step=0) == []
    assert script.calls == 0
    with pytest.raises(ValueError, match=r"needs a generation in epoch 2: call prepare"):
        negatives.documents(rows, range(60), epoch=2)
    made = negatives.prepare(script, encoder, rows, [*range(30), *range(5)], epoch=2, step=4)
    made += negatives.prepare(script, encoder, rows, range(20, 60), epoch=2, step=8)
    assert [a.row for a in made] == [i for i in range(60) if policy.draw(i, 2).generate]
    assert {a.step for a in made if a.row < 30} == {4}
    for document, row in zip(negatives.documents(rows, range(60), epoch=2), range(60), strict=True):
        draw = policy.draw(row, 2)
        source = "positive" if draw.positive else "generated" if draw.generate and row % 2 else "static"
        assert document.source == source
        assert document.completion == {"positive": "fox", "generated": "cat", "static": "dog"}[source]
        assert document.positive == (source == "positive")
    assert {d.source for d in negatives.documents(rows, range(60), 2)} == {"positive", "generated", "static"}


def test_the_store_survives_json(encoder: Encoder) -> None:
    negatives = HardNegatives(ALWAYS, exact_match, max_new_tokens=40)
    negatives.prepare(Script(encoder, ANSWERS), encoder, ROWS, range(4), epoch=2, step=1)
    other = HardNegatives(ALWAYS, exact_match, max_new_tokens=40)
    other.load_state_dict(json.loads(json.dumps(negatives.state_dict())))
    assert other.attempts == negatives.attempts
    unused = Script(encoder, {})
    assert other.prepare(unused, encoder, ROWS, range(4), epoch=2, step=5) == []  # also the rows that gave no negative
    assert unused.calls == 0
    assert other.documents(ROWS, range(4), 2) == negatives.documents(ROWS, range(4), 2)


def test_several_generations_take_the_first_wrong_one(
    model: LlamaForCausalLM, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def scripted(
        model: Any, encoder: Encoder, prompts: Any, limit: int, temperature: float, seeds: Any, *_: Any
    ) -> Any:
        asked.extend(zip(prompts, map(tuple, seeds), strict=True))
        return [encoder.continuation(text) for text in ["fox", "cat", "cow", "fox", "fox", "fox"]]

    monkeypatch.setattr("sdmlm.finetuning.negatives.generate", scripted)
    policy = NegativePolicy(gamma_plus=0, gamma_gen=1, gamma_diversity=1, seed=9)
    negatives = HardNegatives(policy, exact_match, 5, temperature=0.7, num_generations=3)
    assert [a.body for a in negatives.prepare(model, encoder, ROWS, [2, 0], epoch=4, step=0)] == ["cat", None]
    assert asked == [(p, (9, 4, row, k)) for p, row in (("p2", 2), ("p0", 0)) for k in (1, 2, 3)]


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"temperature": -1}, {"num_generations": 0}, {"num_generations": 2}]
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} is {wrong[name]}"):
        HardNegatives(ALWAYS, exact_match, **{"max_new_tokens": 5, **wrong})


def test_generation_sees_the_prompt_that_training_sees(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut prompt leaves room for the row's own completions, not for the longest that might be generated."""
    import sdmlm.language_model.decoding as decoding

    cutting = Encoder(encoder.tokenizer, max_length=60, truncate_prompt=True)
    rows = [
        {"prompt": "the fox and the dog " * 9, "chosen": "the fox", "rejected": "the dog and"},
        {"prompt": "the dog " * 20, "chosen": "the fox and the dog", "rejected": "fox"},
    ]
    seen: dict[int, list[int]] = {}

    def pretend(model: Any, enc: Encoder, batch: list[int], prompts: list[list[int]], *rest: Any) -> None:
        seen.update({n: prompts[n] for n in batch})
        for n in batch:
            rest[-1][n].extend(enc.continuation("dog"))

    monkeypatch.setattr(decoding, "_generate_batch", pretend)
    store = HardNegatives(NegativePolicy(0.0, 1.0, 1.0, first_epoch=0), exact_match, max_new_tokens=50)
    store.prepare(torch.nn.Identity(), cutting, rows, range(2), epoch=0, step=0, progress=False)
    for n, row in enumerate(rows):
        whole = cutting.encode(row["prompt"], max(row["chosen"], row["rejected"], key=len), True)
        assert seen[n] == whole.input_ids[: whole.labels.index(next(x for x in whole.labels if x != -100))]


def test_some_negatives_are_right_answers_to_other_prompts() -> None:
    rows = copy_rows(60, 0)
    encoder = Encoder(tiny_tokenizer(), max_length=64)
    plain = HardNegatives(NegativePolicy(0.5, 0.0, 0.0), exact_match, max_new_tokens=9)
    some = HardNegatives(NegativePolicy(0.5, 0.0, 0.0, gamma_other=0.5), exact_match, max_new_tokens=9)
    before = plain.documents(rows, range(60), 1, encoder)
    after = some.documents(rows, range(60), 1, encoder)
    assert before == plain.documents(rows, range(60), 1)
    others = [d for d in after if d.source == "other"]
    assert 5 < len(others) < 25
    for document in others:
        assert not document.positive
        assert document.completion != rows[document.row]["chosen"]
        assert document.completion in {row["chosen"] for row in rows}
    assert all(b == a for b, a in zip(before, after, strict=True) if a.source != "other")
    lenient = HardNegatives(some.policy, lambda prompts, **_: [1] * len(prompts), max_new_tokens=9)
    assert all(d.source != "other" for d in lenient.documents(rows, range(60), 1, encoder))
    with pytest.raises(ValueError, match="gamma_other is 2"):
        NegativePolicy(gamma_other=2)
