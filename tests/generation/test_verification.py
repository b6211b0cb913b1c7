"""The text of an answer, while and after it is written."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import reference as slow
from hypothesis import given
from hypothesis import strategies as st
from tag_tokenizers import byte_level
from tiny_lm import tiny_tokenizer

from sdmlm.cli.commands.generate import _rule, colour, decision
from sdmlm.estimator.acceptance import CertifiedRule
from sdmlm.estimator.explain import Exemplar
from sdmlm.estimator.layer import ALPHA_GRID
from sdmlm.estimator.region import HighReliabilityRegion
from sdmlm.estimator.scores import Scores
from sdmlm.generation.answers import Answer, AnswerText, Sampling
from sdmlm.generation.judging import certificate_reason, decided, promise, widened
from sdmlm.generation.verification import Verification
from sdmlm.language_model.answer_rule import AnswerCertificate
from sdmlm.language_model.encoding import Encoder, VerificationTags

WRITTEN = [
    "abc",
    "abc\n",
    "abc\n\n<verified>Yes</verified>",
    "abc\n<verifa>e\nend of",
    "abc\n<verified>b\n<verified>No</verified>",
    "abc\n<verified>Yes<verified>No",
    "<verified>Yes</verified>",
    "ab</s>cd",
    "a\nb\nend",
    "abc\n<verif",
    "abc\n<",
    "abc<",
    "abc\n<verend",
    "abc\n<\n<verified>Yes</verified>",
    "abc\n<ver\n<verified>Yes</verified>",
    "abc\n<ver<verified>No",
    "abc<ver<ver",
    "",
]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(tiny_tokenizer())


def read_slowly(text: str, stop: str) -> str:
    """The answer in a text, from the description: end of turn, stop string, right-most tag, suffix, separator."""
    text = text.split("</s>")[0].split(stop)[0]
    if "<verified>" in text:
        text = text[: text.rindex("<verified>")]
    text = text.removesuffix("\n")
    for k in range(len("\n<verified"), 1, -1):  # a tag that was cut off, at least its first character
        if text.endswith("\n<verified"[:k]):
            text = text[:-k]
            break
    return VerificationTags().bare(text)


@pytest.mark.parametrize("written", WRITTEN)
def test_pieces_are_a_growing_part_of_the_answer(encoder: Encoder, written: str) -> None:
    text = AnswerText(encoder, ["end"])
    ids: list[int] = []
    heard = ""
    for i in encoder.tokenizer(written, add_special_tokens=False)["input_ids"]:  # as the LM writes: with control tokens
        ids.append(i)
        heard += text.piece(ids)
        if text.stopped(ids):
            break
    answer, _ = text.read(text.verbatim(ids))
    assert answer == read_slowly(written, "end")
    assert answer.startswith(heard)
    assert heard + text.last(answer) == answer
    assert text.stopped(ids) == ("end" in written)


@pytest.mark.parametrize("written", ["é🙂 x", "a🙂", "🙂\n<verified>Yes</verified>"])
def test_half_a_character_is_never_heard(written: str) -> None:
    """Tokens of a byte-level tokenizer may be parts of one."""
    encoder = Encoder(byte_level())
    text, ids, heard = AnswerText(encoder), [], ""
    halves = 0
    for i in encoder.continuation(written):
        ids.append(i)
        halves += "\ufffd" in encoder.decode(ids)
        heard += text.piece(ids)
        assert written.startswith(heard)
    assert halves
    answer, _ = text.read(text.verbatim(ids))
    assert heard + text.last(answer) == answer == written.split("\n")[0]


def test_decisions_by_other_regions_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    yes, lower = rng.random(200), rng.random(200)
    p, p_lower = (np.stack([1 - v, v], axis=1) for v in (yes, lower))
    q_prime, q_prime_lower = rng.integers(0, 12, (2, 200)).astype(float)
    blank = {f.name: np.zeros(200) for f in dataclasses.fields(Scores)}
    scores = Scores(
        **{
            **blank,
            "prediction": p.argmax(axis=1),
            "p": p,
            "p_lower": p_lower,
            "q_prime": q_prime,
            "q_prime_lower": q_prime_lower,
        }
    )
    regions = {a: HighReliabilityRegion(a, 4 * a, (a, 0.5 + a / 2)) for a in (*ALPHA_GRID, 0.613)}
    found = decided(scores, regions.__getitem__, 0.613)

    def inside(a: float, which: str) -> list[bool]:
        outputs, q = getattr(scores, f"p{which}"), getattr(scores, f"q_prime{which}")
        return slow.contains(regions[a].q_min, regions[a].psi, q, outputs, scores.prediction).tolist()

    assert found.accepted.tolist() == inside(0.613, "")
    assert found.accepted_lower.tolist() == inside(0.613, "_lower")
    at = {a: inside(a, "") for a in ALPHA_GRID}
    highest = [max((a for a in ALPHA_GRID if at[a][n]), default=math.nan) for n in range(200)]
    np.testing.assert_equal(found.highest_alpha, highest)
    for values in (found.accepted, found.accepted_lower, np.isnan(found.highest_alpha)):
        assert 0 < values.sum() < 200


def test_a_tag_is_never_heard(encoder: Encoder) -> None:
    text, ids = AnswerText(encoder), []
    for i in encoder.continuation("abc\n<verified>Yes</verified>"):
        ids.append(i)
        assert text.piece(ids) in ("", "a", "b", "c")
    assert text.read(text.verbatim(ids)) == ("abc", True)
    assert text.verbatim(ids) == "abc\n<verified>Yes</verified>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", "abc"),
        ("abc\n<verified>Yes</verified>", "abc"),
        ("abc\n<verified>No</verified>\n<verified>Yes</verified> \n", "abc"),
        ("abc\n<verified>", "abc"),
        ("abc\n<verified>No</ver", "abc"),
        ("abc\n<verif", "abc"),
        ("abc\n<verified>Yes</verified>\n<v", "abc"),
        ("abc<ver<ver", "abc"),
        ("abc\n<verified>Yes</verified>\n<ver<verified>No\n<v", "abc"),
        ("abc <", "abc <"),
        ("abc\n", "abc\n"),
        ("abc\n<verified>Maybe", "abc\n<verified>Maybe"),
        ("good\n<verified>Yes</verified> bad", "good\n<verified>Yes</verified> bad"),
        ("", ""),
    ],
)
def test_only_a_suffix_is_taken_off(text: str, expected: str) -> None:
    assert VerificationTags().bare(text) == expected
    assert VerificationTags().bare(expected) == expected


@given(st.lists(st.sampled_from([*"<ver\na", "<verified>", "Yes", "No", "</verified>", "</ver", " "]), max_size=12))
def test_what_is_left_is_left(parts: list[str]) -> None:
    """A text that was judged is judged as the same text again."""
    tags = VerificationTags()
    once = tags.bare("".join(parts))
    assert tags.bare(once) == once
    assert "".join(parts).startswith(once)


def verification(**changes: Any) -> Verification:
    settings: dict[str, Any] = {
        "text": "a",
        "accepted": True,
        "verdict": "Yes",
        "probability": 0.75,
        "probability_lower": 0.5,
        "probability_upper": 1.0,
        "q": 3,
        "d": 0.5,
        "d_nearest": 1.0,
        "q_prime": 2.5,
        "accepted_lower": False,
        "out_of_distribution": False,
        "highest_alpha": None,
        "exemplars": (Exemplar(7, 1, 1, 0.5, "text"),),
        "reason": "because.",
        "alpha": 0.9,
        "completion": "a\n<verified>Yes</verified>",
        "generated": None,
        "lm_verdict": None,
        "finish_reason": "given",
        "prompt_tokens": 1,
        "completion_tokens": 2,
    }
    return Verification(**settings | changes)


def test_verified_is_accepted_as_yes() -> None:
    assert verification().verified
    assert not verification(accepted=False).verified
    assert not verification(verdict="No").verified
    assert verification(verdict="Ja", yes="Ja").verified
    assert verification().probability_of_yes == 0.75
    assert verification(verdict="No").probability_of_yes == 0.25


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "verified"),
        ({"verdict": "No"}, "judged wrong"),
        ({"accepted": False}, "not verified"),
        ({"accepted": False, "out_of_distribution": True}, "out of distribution"),
        # Where a certificate applies, it decides about Yes, and the region only about No.
        ({"accepted": False, "certified": True}, "verified"),
        ({"accepted": False, "certified": True, "out_of_distribution": True}, "verified"),
        ({"certified": False}, "not verified"),
        ({"certified": False, "verdict": "No"}, "judged wrong"),
        ({"certified": False, "verdict": "No", "accepted": False}, "not verified"),
    ],
)
def test_the_outcome_in_words(changes: dict[str, Any], outcome: str) -> None:
    one = verification(**changes)
    assert one.outcome == one.to_dict()["outcome"] == outcome
    assert one.verified == (outcome == "verified")
    assert decision(one).lower().startswith(outcome.replace("out of distribution", "not verified"))
    assert colour(one) == {"verified": "green", "judged wrong": "red"}.get(outcome, "yellow")


def test_a_certificate_promises_nothing_about_the_text_of_others() -> None:
    rule = CertifiedRule(0.9, 0.05, "overall", 0.1, (math.inf, 0.0), 0.1, (1,), 40, 0, (), "digest")
    certificate = AnswerCertificate(rule, 40, 36, 30, 29, None)
    own, others = (Answer("4", [], 1, 1, finish_reason=how) for how in ("stop", "given"))
    sampled = dataclasses.replace(own, as_certified=False)
    held = "With probability 0.95, at least 90% of the answers that pass this rule are right, for prompts like those it was certified with."
    assert promise(certificate, own, None) == held
    assert certificate_reason(certificate, True, verification(), 0.5, 0.9, held).endswith(held)
    for search in (None, True, False):  # whatever the search
        assert promise(certificate, others, search).endswith("that the model did not write itself.")
    assert promise(certificate, sampled, None).endswith(
        "that are sampled or cut short: it was made with greedy, whole ones."
    )
    assert "of a search that it was not made for" in promise(certificate, own, False)
    for answer in (own, sampled):
        assert "of the answers of this search that pass" in promise(certificate, answer, True)


@pytest.mark.parametrize(
    ("changes", "usual", "certainty", "says"),
    [
        (
            {"verdict": "No"},
            0.5,
            0.1,
            "the answer is judged wrong (about 40 of the most similar known answers were judged wrong",
        ),
        (
            {},
            0.05,
            0.9,
            "the model seldom writes answers like this one (only 5.0% of its known answers are more unusual; at least 10% must be)",
        ),
        ({}, 0.0, 0.9, "all of its known answers are more usual"),
        ({"q": 1}, 0.5, 0.6, "not surely enough: hardly any similar known answer was judged right"),
        ({}, 0.5, 0.6, "(0.600, 0.731 is asked for)"),
    ],
)
def test_why_a_certificate_does_not_accept(changes: dict[str, Any], usual: float, certainty: float, says: str) -> None:
    rule = CertifiedRule(0.9, 0.05, "overall", 0.1, (math.inf, 1.0), 0.1, (1,), 40, 0, (), "digest")
    certificate = AnswerCertificate(rule, 40, 36, 30, 29, None)
    found = certificate_reason(certificate, False, verification(**{"q": 40, **changes}), usual, certainty, "")
    assert found.startswith("Not verified by the certificate, so a person should look: ")
    assert says in found


def test_plain_values() -> None:
    plain = verification(d_nearest=math.inf).to_dict()
    assert plain["d_nearest"] is None
    assert plain["exemplars"] == [{"id": 7, "label": 1, "prediction": 1, "distance": 0.5, "text": "text"}]
    assert plain["verified"] is True
    assert "yes" not in plain


@pytest.mark.parametrize("wrong", [{"max_new_tokens": True}, {"temperature": "1"}, {"top_p": None}, {"stop": ("",)}])
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**{"max_new_tokens": 1, **wrong})


@pytest.mark.parametrize(
    ("q_min", "lowered"), [(0.0, 0.0), (5.0, 4.9995), (1000.0, 999.9), (30_000.0, 29_999.9), (math.inf, math.inf)]
)
def test_thresholds_give_way_to_rounding_but_never_by_a_neighbour(q_min: float, lowered: float) -> None:
    region = widened(HighReliabilityRegion(0.9, q_min, (0.9, 0.99999)))
    assert region.q_min == pytest.approx(lowered, abs=1e-9)
    assert region.psi == pytest.approx((0.89999, 0.9999899), abs=1e-12)


def test_many_suffixes_take_no_longer_for_being_many() -> None:
    """One pass from the end: a body of a megabyte must not keep a server busy for seconds."""
    tags = VerificationTags()
    assert tags.bare("abc" + "\n<verified>" * 50_000) == "abc"
    assert tags.bare("abc" + "<verified>No</verified> \n" * 20_000) == "abc"
    assert tags.bare("abc" + "<ver" * 50_000) == "abc"
    assert tags.certain("abc" + "\n" * 200_000) == "abc"


@pytest.mark.parametrize(
    ("certified", "rule"),
    [
        ({True, False}, "under the model's certificate"),
        ({False}, "under the model's certificate"),
        ({None}, "in the high-reliability region"),
        ({None, False}, "in the high-reliability region, and not rejected by the certificate"),
    ],
)
def test_the_summary_names_the_rule_that_decided(certified: set[bool | None], rule: str) -> None:
    assert _rule(certified) == rule
