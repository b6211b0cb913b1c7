"""Search under a budget: its policies, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from search_checks import HOT, PROMPTS, by_hand

from sdmlm import SDMLanguageModel
from sdmlm.estimator.region import HighReliabilityRegion
from sdmlm.generation.answers import Sampling
from sdmlm.generation.search import AGAIN, KINDS, SearchPolicy, reprompted
from sdmlm.generation.search_calibration import SearchCalibration
from sdmlm.generation.verification import Verification
from sdmlm.language_model.encoding import Encoder


@pytest.fixture
def lm(folder: Path) -> SDMLanguageModel:
    """A model of its own for each test, which may change it."""
    return SDMLanguageModel.from_pretrained(folder)


@pytest.fixture
def chat(chat_folder: Path) -> SDMLanguageModel:
    return SDMLanguageModel.from_pretrained(chat_folder)


def key(v: Verification) -> tuple[Any, ...]:
    return v.text, v.verdict, v.accepted, v.q, round(v.probability, 5), v.generated


def test_an_alpha_that_a_search_was_not_calibrated_for_is_refused() -> None:
    region = HighReliabilityRegion(0.9, 1.0, (0.9, 0.9))
    rows: dict[str, Any] = {"ids": (0,), "labels": (1,), "predictions": (1,), "q_prime": (3.0,), "p": ((0.1, 0.9),)}
    found = SearchCalibration(HOT, 0.9, Sampling(5), "x", **rows, tries=(1,), regions=(region,))
    assert found.region().alpha == 0.9
    with pytest.raises(ValueError, match=r"calibrated for alpha 0\.9, not 0\.947"):
        found.region(0.947)


# Policies


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chatty", [False, True], ids=["plain", "chat"])
def test_a_search_is_its_tries_one_by_one(
    lm: SDMLanguageModel, chat: SDMLanguageModel, kind: str, chatty: bool
) -> None:
    lm = chat if chatty else lm
    policy = SearchPolicy(kind, budget=3, temperature=1.2)
    alpha = 0.8 if chatty else 0.85
    found = lm.generate(PROMPTS[:12], search=policy, alpha=alpha, seed=7)
    for n, v in enumerate(found):
        expected, tries = by_hand(lm, PROMPTS[n], n, policy, alpha, 7)
        assert key(v) == key(expected)
        assert v.tries == tries
        assert v.completion_tokens == expected.completion_tokens
        assert not v.calibrated
        assert v.reason == expected.reason + " " + v.reason.removeprefix(expected.reason).strip()
        assert "not calibrated" in v.reason
    assert len({v.tries for v in found}) > 1
    # However it came about, it is judged as an answer to the prompt that was asked.
    for prompt, v in zip(PROMPTS, found, strict=False):
        given = lm.verify(prompt, v.text, alpha=alpha)
        assert (given.verdict, given.accepted, given.q) == (v.verdict, v.accepted, v.q)


def test_the_budget_bounds_the_tries_and_no_verified_answer_is_tried_again(
    lm: SDMLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[str]] = []
    plain = lm.write

    def write(asked: Any, *a: Any, **k: Any) -> Any:
        written.append([lm.encoder.decode(ids) for ids in asked])
        return plain(asked, *a, **k)

    monkeypatch.setattr(lm, "write", write)
    policy = SearchPolicy("resample", budget=3, temperature=0.5)
    found = lm.generate(PROMPTS, temperature=1.8, search=policy)
    first = lm.generate(PROMPTS, temperature=1.8)
    assert len(written) == 1 + 3 + 1
    assert written[0] == written[-1] == PROMPTS
    assert written[1] == [p for p, v in zip(PROMPTS, first, strict=True) if not v.verified]
    for n, (v, plainly) in enumerate(zip(found, first, strict=True)):
        assert 1 <= v.tries <= 4
        assert v.tries == sum(PROMPTS[n] in asked for asked in written[:-1])
        if plainly.verified:
            assert key(v) == key(plainly)
        assert v.verified or v.probability_of_yes >= plainly.probability_of_yes - 1e-6
    assert sum(v.verified for v in found) > sum(v.verified for v in first)
    assert any(v.verified and v.tries > 1 for v in found)


def test_no_further_tries_are_plain_generation(lm: SDMLanguageModel) -> None:
    nothing = lm.generate(PROMPTS[:10], search=SearchPolicy(budget=0))
    assert nothing == lm.generate(PROMPTS[:10])
    assert lm.generate([], search="resample") == []
    single = lm.generate(PROMPTS[0], search="resample")
    assert key(single) == key(lm.generate([PROMPTS[0]], search=SearchPolicy())[0])


def test_a_conversation_that_outgrows_the_context_is_not_tried_again(lm: SDMLanguageModel) -> None:
    for kind in ("reprompt", "continue"):
        v = lm.generate("ab" * 33, search=SearchPolicy(kind, budget=5), alpha=0.99)
        assert not v.verified
        assert v.tries < 6
        assert v.tries >= 1


def test_the_refused_answer_is_in_the_prompt(lm: SDMLanguageModel, chat: SDMLanguageModel) -> None:
    assert reprompted(lm, "abc=", "abd") == f"abc=abd\n<verified>No</verified>\n\n{AGAIN}\n\nabc="
    turns = [{"role": "user", "content": "abc="}]
    refused = {"role": "assistant", "content": "abd\n<verified>No</verified>"}
    expected = [*turns, refused, {"role": "user", "content": AGAIN}]
    assert reprompted(chat, "abc=", "abd") == reprompted(chat, turns, "abd") == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "guess"}, "one of resample, reprompt, continue"),
        ({"budget": -1}, "budget is -1"),
        ({"budget": 1.5}, "budget is 1.5"),
        ({"temperature": 0}, "needs a temperature above 0"),
        ({"temperature": -1}, "temperature is -1"),
    ],
)
def test_policies_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchPolicy(**settings)
    assert SearchPolicy("continue", temperature=0).temperature == 0


def test_a_conversation_that_fits_only_with_its_prompt_cut(lm: SDMLanguageModel) -> None:
    """What `_fits` lets through, `generate` can put to the LM, prompts that may be cut included."""
    encoder = Encoder(lm.tokenizer, lm.tags, lm.encoder.max_length, truncate_prompt=True)
    cut = SDMLanguageModel(lm.model, lm.tokenizer, encoder, lm.estimator, lm.metadata)
    policy = SearchPolicy("continue", budget=6, temperature=1.5)
    found = cut.generate(["abcdefgh" * 5 + "=", "abc="], search=policy, alpha=1.0, max_new_tokens=20, progress=False)
    assert max(v.tries for v in found) > 2


@pytest.mark.parametrize("kind", ["reprompt", "continue"])
def test_a_prompt_that_outgrows_the_context_leaves_the_others_alone(lm: SDMLanguageModel, kind: str) -> None:
    prompts = ["ab" * 20 + "=", *PROMPTS[:6]]
    policy = SearchPolicy(kind, budget=3, temperature=1.5)
    found = lm.generate(prompts, search=policy, alpha=1.0, seed=4, progress=False)
    for n, v in enumerate(found):
        expected, tries = by_hand(lm, prompts[n], n, policy, 1.0, 4)
        assert key(v) == key(expected)
        assert v.tries == tries
    assert found[0].tries < max(v.tries for v in found)
