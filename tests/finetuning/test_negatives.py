"""Hard negatives: the policy's frequencies, batched generation against one row at a time, and the store."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from tiny_lm import copy_rows, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from sdmlm.finetuning.negatives import HardNegatives, NegativePolicy
from sdmlm.language_model.decoding import generate
from sdmlm.language_model.encoding import Encoder
from sdmlm.rewards import exact_match


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the fox <verified>No</verified>", "the dog"], trainer)
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>"))


@pytest.fixture(scope="module")
def model(encoder: Encoder) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(encoder.tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.4,  # wide, so that greedy generations differ between prompts
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


class Script(torch.nn.Module):
    """A stand-in for an LM that emits given texts: the answer to each prompt, one token a step."""

    def __init__(self, encoder: Encoder, answers: dict[str, str]) -> None:
        super().__init__()
        self.device, self.calls, self.rows_in = torch.device("cpu"), 0, 0
        self.size = len(encoder.tokenizer)
        end = encoder.tokenizer.eos_token_id
        self.answers = {tuple(encoder.encode_prompt(p)): [*encoder.continuation(a), end] for p, a in answers.items()}

    def forward(self, input_ids: Any, attention_mask: Any, past_key_values: Any, position_ids: Any, **_: Any) -> Any:
        assert not self.training
        self.calls, self.rows_in = self.calls + 1, self.rows_in + len(input_ids)
        if past_key_values is None:
            keys = [tuple(i[m.bool()].tolist()) for i, m in zip(input_ids, attention_mask, strict=True)]
            past_key_values = Cache([(key, 0) for key in keys])
        for (key, n), positions in zip(past_key_values.rows, position_ids, strict=True):
            assert positions[-1] == len(key) - 1 + n
        logits = torch.zeros(len(input_ids), 1, self.size)
        for row, (key, n) in enumerate(past_key_values.rows):
            logits[row, 0, self.answers[key][n]] = 1
        past_key_values.rows = [(key, n + 1) for key, n in past_key_values.rows]
        return type("Out", (), {"logits": logits, "past_key_values": past_key_values})


class Cache:
    def __init__(self, rows: list[tuple[tuple[int, ...], int]]) -> None:
        self.rows = rows

    def reorder_cache(self, keep: torch.Tensor) -> None:
        self.rows = [self.rows[i] for i in keep.tolist()]


def one_at_a_time(model: Any, encoder: Encoder, prompt: str, limit: int) -> list[int]:
    """Greedy, without cache, batch or padding, looking at the whole text after every token."""
    ids, out = encoder.encode_prompt(prompt), []
    for _ in range(limit):
        with torch.no_grad():
            out.append(int(model(torch.tensor([ids + out]), use_cache=False).logits[0, -1].argmax()))
        if out[-1] == encoder.tokenizer.eos_token_id or "</verified>" in encoder.decode(out):
            break
    return out


PROMPTS = ["the fox", "a", "the dog and the fox and the dog", "<verified>No</verified>", "x y z", "dog " * 20]


def test_batched_generation_equals_one_at_a_time(model: LlamaForCausalLM, encoder: Encoder) -> None:
    model.eval()
    expected = [one_at_a_time(model, encoder, prompt, 20) for prompt in PROMPTS]
    assert len({tuple(e) for e in expected}) == len(PROMPTS)
    for tokens_per_batch in (1, 100, 8192):
        assert generate(model, encoder, PROMPTS, 20, tokens_per_batch=tokens_per_batch) == expected


def test_generation_stops_at_the_end_of_turn_too(model: LlamaForCausalLM, encoder: Encoder) -> None:
    """Any token may be the end: rows leave the batch one by one and the others do not notice."""
    model.eval()
    free = [one_at_a_time(model, encoder, prompt, 20) for prompt in PROMPTS]
    stop = {free[0][3], free[1][0], free[2][10]}
    stopping = Encoder(encoder.tokenizer)
    stopping.stop_ids = stop
    cut = [f[: next((n + 1 for n, i in enumerate(f) if i in stop), 20)] for f in free]
    assert len({len(c) for c in cut}) >= 3
    assert generate(model, stopping, PROMPTS, 20) == cut


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(model: LlamaForCausalLM, encoder: Encoder, training: bool) -> None:
    model.train(training)
    generate(model, encoder, PROMPTS[:2], 2)
    assert model.training == training
    script = Script(encoder, {}).train(training)
    with pytest.raises(KeyError):
        generate(script, encoder, PROMPTS[:2], 2)
    assert script.training == training


def test_rows_that_have_ended_cost_nothing_more(encoder: Encoder) -> None:
    answers = {"the fox": "no\n<verified>No</verified> and much that is never written", "a": "x" * 30, "x y": ""}
    script = Script(encoder, answers)
    out = generate(script, encoder, list(answers), 40)
    assert encoder.decode(out[0]) == "no\n<verified>No</verified>"
    assert encoder.decode(out[1]) == "x" * 30 + "<|end|>"
    assert encoder.decode(out[2]) == "<|end|>"
    assert script.rows_in == sum(map(len, out))
    assert script.calls == max(map(len, out))
    assert [encoder.read(o) for o in out] == [("no", False), ("x" * 30, None), ("", None)]


def test_generation_leaves_room_for_the_suffix(model: LlamaForCausalLM, encoder: Encoder) -> None:
    prompt_length = max(len(encoder.encode_prompt(p)) for p in PROMPTS)
    bounded = Encoder(encoder.tokenizer, max_length=prompt_length + encoder.suffix_length + 3)
    for prompt, out in zip(PROMPTS, generate(model, bounded, PROMPTS, 1000), strict=True):
        assert len(out) <= bounded.max_length - len(bounded.encode_prompt(prompt)) - encoder.suffix_length
    with pytest.raises(ValueError, match="Row 0 needs"):
        generate(model, Encoder(encoder.tokenizer, max_length=encoder.suffix_length + 1), PROMPTS, 5)
    cutting = Encoder(encoder.tokenizer, max_length=encoder.suffix_length + 10, truncate_prompt=True)
    assert max(map(len, generate(model, cutting, PROMPTS, 5))) == 5


@pytest.mark.parametrize("bos", [False, True])
def test_a_cut_prompt_keeps_a_token_however_long_the_generation(
    model: LlamaForCausalLM, encoder: Encoder, bos: bool
) -> None:
    tokenizer = copy.deepcopy(encoder.tokenizer)
    prompts = PROMPTS
    if bos:
        tokenizer.bos_token = "<|end|>"
        prompts = [f"<|end|>{prompt}" for prompt in PROMPTS]
    for length in (encoder.suffix_length + 3, encoder.suffix_length + 9):
        cutting = Encoder(tokenizer, max_length=length, truncate_prompt=True)
        for prompt, out in zip(prompts, generate(model, cutting, prompts, 1000), strict=True):
            kept = min(len(cutting.encode_prompt(prompt)), 2)
            assert 1 <= len(out) <= length - encoder.suffix_length - kept


def test_a_prompt_that_cannot_be_generated_from_is_named_by_its_row(model: LlamaForCausalLM, encoder: Encoder) -> None:
    rows = {3: {**ROWS[0], "prompt": "a"}, 7: {**ROWS[0], "prompt": "x" * 50}}
    bounded = Encoder(encoder.tokenizer, max_length=encoder.suffix_length + 9)
    negatives = HardNegatives(ALWAYS, exact_match, max_new_tokens=5)
    with pytest.raises(ValueError, match="Row 7 needs"):
        negatives.prepare(model, bounded, rows, [3, 7], epoch=2, step=0)


def test_sampling_is_each_rows_own_and_follows_the_distribution(model: LlamaForCausalLM, encoder: Encoder) -> None:
    seeds = [[n] for n in range(len(PROMPTS))]
    together = generate(model, encoder, PROMPTS, 10, temperature=1.0, seeds=seeds)
    alone = [generate(model, encoder, [p], 10, 1.0, [s])[0] for p, s in zip(PROMPTS, seeds, strict=True)]
    assert together == alone
    assert together != generate(model, encoder, PROMPTS, 10, 1.0, [[n + 1] for n in range(len(PROMPTS))])
    cold = generate(model, encoder, PROMPTS, 10, temperature=1e-4, seeds=seeds)
    assert cold == generate(model, encoder, PROMPTS, 10)
    n = 2000
    first = [o[0] for o in generate(model, encoder, ["the fox"] * n, 1, 2.0, [[i] for i in range(n)])]
    with torch.no_grad():
        logits = model(torch.tensor([encoder.encode_prompt("the fox")])).logits[0, -1]
    expected = torch.softmax(logits / 2.0, dim=0).numpy()
    frequencies = np.bincount(first, minlength=len(expected)) / n
    assert np.abs(frequencies - expected).max() < 5 * np.sqrt(expected.max() / n)
    assert expected.max() < 0.9
    with pytest.raises(ValueError, match="seed"):
        generate(model, encoder, PROMPTS, 10, temperature=1.0)


def test_a_model_without_cache_is_refused(encoder: Encoder) -> None:
    mamba = MambaForCausalLM(
        MambaConfig(vocab_size=len(encoder.tokenizer), hidden_size=8, num_hidden_layers=1, state_size=2)
    )
    with pytest.raises(ValueError, match="MambaForCausalLM keeps no key-value cache"):
        generate(mamba, encoder, ["a"], 2)


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


ALWAYS = NegativePolicy(gamma_plus=0, gamma_gen=1, gamma_diversity=1)
ROWS = [
    {"prompt": "p0", "chosen": "fox", "rejected": "dog"},
    {"prompt": "p1", "chosen": "fox\n<verified>Yes</verified>", "rejected": "dog"},
    {"prompt": "p2", "chosen": "fox", "rejected": "dog"},
    {"prompt": "p3", "chosen": "fox", "rejected": "dog"},
]
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


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_reward_gets_the_columns_of_all_rows(encoder: Encoder, as_mapping: bool) -> None:
    seen: list[Any] = []

    def reward(prompts: list[str], completions: list[str], level: list[Any], **_: Any) -> list[int]:
        seen.extend(level)
        return [0] * len(prompts)

    rows = [*ROWS[:3], {**ROWS[3], "level": 5}]
    negatives = HardNegatives(ALWAYS, reward, max_new_tokens=40)
    script = Script(encoder, ANSWERS)
    for ids in ([0, 1], [2, 3]):
        negatives.prepare(script, encoder, dict(enumerate(rows)) if as_mapping else rows, ids, epoch=2, step=0)
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
    made += negatives.prepare(script, encoder, dict(enumerate(rows)), range(20, 60), epoch=2, step=8)
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
