"""Bad input to an SDM language model, and prompts near the bound."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from sdm_lm_checks import same
from tiny_sdm_lm import train

from sdmlm import SDMLanguageModel, Verification
from sdmlm.estimator.layer import ALPHA_GRID
from sdmlm.language_model.encoding import Encoder

# Bad input


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["abc=", " \n"], "Prompt 1 is empty"),
        ("", "Prompt 0 is empty"),
        (["abc=", 3], "Prompt 1 is int"),
        (["abc=", []], "Prompt 1 is list"),
        (["abc=", [{"role": "user"}]], "Prompt 1 is list"),
        ([{"role": "user", "content": ["a"]}], "Prompt 0 is list"),
        ([[{"role": "system", "content": "a"}, {"role": "user", "content": " "}]], "Prompt 0 is empty"),
        ([{"role": "assistant", "content": "a"}], "Prompt 0 ends with an assistant message"),
        (["abc=", "a" * 200], "Prompt 1 has 200 tokens, but the model's context leaves room for"),
        (["\ud800"], "Prompt 0 holds half of a surrogate pair"),
        (None, "prompts is NoneType"),
        ({"role": "user", "content": "a"}, "prompts is dict"),
    ],
)
def test_prompts_that_cannot_be_answered(lm: SDMLanguageModel, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lm.generate(prompts)
    with pytest.raises(ValueError, match=message):
        lm.verify(prompts, "a" if isinstance(prompts, str) else ["a"] * len(prompts or []))


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        (["a"], "one completion for each prompt"),
        ("ab", "one completion for each prompt"),
        (None, "one completion for each prompt"),
        (["a", None], "Completion 1 is NoneType"),
        (["a", [{"role": "assistant", "content": "a"}] * 2], "Completion 1 is list"),
        (["a", "\udfff"], "Completion 1 holds half"),
        (["a", "b" * 100], "Prompt 1 and its completion are longer together than the 96 tokens"),
    ],
)
def test_completions_that_cannot_be_judged(lm: SDMLanguageModel, completions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lm.verify(["abc=", "abd="], completions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"alpha": 0.4}, "alpha is 0.4"),
        ({"neighbors": -1}, "neighbors is -1"),
        ({"search": "guess"}, "not 'guess'"),
        ({"search": 3}, "search is int"),
        ({"search": "resample", "on_text": print}, "on_text does not go with search"),
    ],
)
def test_settings_that_make_no_sense(lm: SDMLanguageModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lm.generate("abc=", **options)


def test_a_single_prompt_takes_a_single_completion(lm: SDMLanguageModel) -> None:
    for completions in (3, None, ["a", "b"], []):
        with pytest.raises(ValueError, match="one completion for each prompt"):
            lm.verify("abc=", completions)


def test_a_bound_beyond_the_context_costs_nothing(lm: SDMLanguageModel) -> None:
    assert lm.generate("abc=", max_new_tokens=10**12, temperature=0.1).text == "abc"


def test_a_long_prompt_is_answered_in_the_room_that_is_left(lm: SDMLanguageModel) -> None:
    room = lm.encoder.max_length - lm.encoder.suffix_length - 1
    v = lm.generate("a" * room)
    assert (v.prompt_tokens, v.completion_tokens, v.finish_reason) == (room, 1, "length")


def test_an_answer_that_grows_when_it_is_encoded_again_is_judged_as_generated(
    lm: SDMLanguageModel, wild: list[Verification], monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy, short = lm.generate("abc="), lm.generate("abc=", max_new_tokens=3)

    def too_long(*args: Any) -> list[int]:
        raise ValueError("too long")

    monkeypatch.setattr(type(lm.encoder), "judged_document", too_long)
    same(lm.generate("abc="), greedy)  # its ids end with the tag
    again = lm.generate("abc=", max_new_tokens=3)  # the tag is appended, without a separator
    assert again.text == short.text
    assert again.d_nearest != short.d_nearest


def test_a_model_that_cuts_prompts_still_does(tmp_path: Path) -> None:
    folder = train(tmp_path, truncate_prompt=True, max_length=40, num_train_epochs=1)
    lm = SDMLanguageModel.from_pretrained(folder)
    long = "abcdefgh" * 12 + "="
    v = lm.generate(long, max_new_tokens=8)
    assert v.prompt_tokens == 40 - lm.encoder.suffix_length - 8
    same(v, lm.verify(long, v.text))


@pytest.mark.parametrize("bound", [None, 30, 10**6])
def test_a_bound_that_no_answer_reaches_does_not_cost_the_prompt(
    lm: SDMLanguageModel, monkeypatch: pytest.MonkeyPatch, bound: int | None
) -> None:
    """The LM reads the whole prompt where prompts may be cut and this one leaves room; of longer ones it reads half a context."""
    import sdmlm.language_model.decoding as decoding

    encoder = Encoder(lm.tokenizer, lm.tags, max_length=40, truncate_prompt=True)
    cut = SDMLanguageModel(lm.model, lm.tokenizer, encoder, lm.estimator, lm.metadata)
    seen: list[list[int]] = []
    original = decoding._generate_batch

    def spy(model: Any, encoder: Encoder, rows: list[int], prompts: list[list[int]], *rest: Any) -> None:
        seen.extend(prompts[n] for n in rows)
        original(model, encoder, rows, prompts, *rest)

    monkeypatch.setattr(decoding, "_generate_batch", spy)
    v = cut.generate("abcdefgh=", max_new_tokens=bound)
    assert [encoder.decode(ids) for ids in seen] == ["abcdefgh="]
    assert v.prompt_tokens == len(seen[0])
    long = cut.generate("abcdefgh" * 12 + "=", max_new_tokens=bound)
    assert long.prompt_tokens == len(seen[1]) >= (40 - encoder.suffix_length) // 2
    assert encoder.decode(seen[1]) == ("abcdefgh" * 12 + "=")[-len(seen[1]) :]


def test_memory_of_alphas_is_not_state(lm: SDMLanguageModel) -> None:
    layer = lm.estimator.layers_[0]
    lm.generate("abc=")
    regions = {alpha: layer.region(alpha) for alpha in ALPHA_GRID}
    lm.generate("abc=")
    assert all(layer.region(alpha) is region for alpha, region in regions.items())  # found once, then remembered
