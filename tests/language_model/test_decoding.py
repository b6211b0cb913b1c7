"""Batched generation equals generation of one row at a time."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from decoding_checks import ALWAYS, ROWS, Script, fox_encoder, fox_model
from transformers import LlamaForCausalLM, MambaConfig, MambaForCausalLM

from sdmlm.finetuning.negatives import HardNegatives
from sdmlm.language_model.decoding import generate
from sdmlm.language_model.encoding import Encoder
from sdmlm.rewards import exact_match


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return fox_encoder()


@pytest.fixture(scope="module")
def model(encoder: Encoder) -> LlamaForCausalLM:
    return fox_model(encoder)


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
