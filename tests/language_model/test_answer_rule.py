"""The rule of acceptance for own answers: its promise over many draws, its words, its file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdmlm.estimator.acceptance import CertifiedRule, Evidence
from sdmlm.generation.answers import Answer
from sdmlm.generation.judging import promise
from sdmlm.language_model.answer_rule import AnswerCertificate, certify_answers, load_certificate, save_certificate
from sdmlm.language_model.usual import UsualLikelihood


def answers(rng: np.random.Generator, n: int) -> Evidence:
    """The surer the SDM layer, the likelier an answer is right: 0.85 to 1 for confidences of 0.5 to 1; a tenth is judged wrong."""
    confidence = rng.uniform(0.5, 1, n)
    right = rng.random(n) < 0.7 + 0.3 * confidence
    yes = rng.random(n) < 0.9
    return Evidence(confidence, rng.random(n), yes.astype(np.int64), right.astype(np.int64))


def true_accuracy(threshold: float) -> float:
    return 0.7 + 0.3 * (1 + max(threshold, 0.5)) / 2


@pytest.mark.parametrize("alpha", [0.93, 0.95])
def test_the_promise_holds_in_all_but_a_share_delta_of_draws(alpha: float) -> None:
    rng = np.random.default_rng(0)
    broken = certified = 0
    draws = 400
    for _ in range(draws):
        rule = certify_answers(answers(rng, 400), answers(rng, 700), alpha=alpha, estimator="x", delta=0.1, epsilon=0.1)
        certified += rule.certified
        broken += rule.certified and true_accuracy(rule.threshold) < alpha - 1e-4
    assert certified > 0.5 * draws  # not vacuous
    assert broken <= 0.1 * draws + 2 * np.sqrt(draws * 0.1 * 0.9)


def test_the_loosest_threshold_that_passes_is_taken() -> None:
    rng = np.random.default_rng(1)
    easy = certify_answers(answers(rng, 2000), answers(rng, 5000), alpha=0.9, estimator="x", epsilon=0.0)
    hard = certify_answers(answers(rng, 2000), answers(rng, 5000), alpha=0.96, estimator="x", epsilon=0.0)
    assert easy.threshold < 0.55 < 0.7 < hard.threshold < 0.9  # 0.733 is where 0.96 is reached


def test_only_answers_judged_right_are_accepted() -> None:
    rng = np.random.default_rng(2)
    certificate = certify_answers(answers(rng, 2000), answers(rng, 3000), alpha=0.9, estimator="x", epsilon=0.1)
    fresh = answers(rng, 1000)
    accepted = certificate.rule.accepts(fresh)
    assert 0.6 < accepted.mean() < 0.9
    assert (fresh.predictions[accepted] == 1).all()
    assert (fresh.d[accepted] >= certificate.rule.least_distance).all()
    assert certificate.accepted == pytest.approx(3000 * accepted.mean(), rel=0.1)
    assert certificate.accepted_right / certificate.accepted > 0.9


def certificate(threshold: float = 0.8, **changes: Any) -> AnswerCertificate:
    rule = CertifiedRule(0.95, 0.05, "overall", 0.1, (float("inf"), threshold), 0.1, (1,), 200, 0, (), "x")
    rule = replace(rule, **{name: changes.pop(name) for name in ("alpha", "needed") if name in changes})
    values = {"prompts": 200, "right": 190, "accepted": 180, "accepted_right": 178, "usual": None}
    return AnswerCertificate(rule, **values | changes)


def test_the_sentence_tells_right_answers_share_and_promise() -> None:
    says = certificate().sentence()
    assert "answered 190 of 200 held-out prompts correctly" in says
    assert "about 90 will be verified" in says
    assert "at least 95% of those are right" in says
    assert "This holds for the model's own answers to prompts of the same kind, not for text by others" in says
    assert "This holds for what it was made with to prompts" in certificate().sentence("what it was made with")


def test_a_promise_is_not_rounded_up() -> None:
    one = certificate(alpha=0.975)
    assert "at least 97.5% of those are right" in one.sentence()
    assert "at least 97.5% of all accepted" in one.rule.sentence()
    answer = Answer("4", [], 1, 1, finish_reason="stop")
    assert "at least 97.5% of the answers that pass" in promise(one, answer, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"right": 0}, "none of the language model's answers is right"),
        (
            {"prompts": 20, "right": 20},
            "about 79 held-out prompts are needed even if all answers are right; give more rows",
        ),
        ({"prompts": 20, "right": 19}, "even if all answers are right, and more if some are wrong; give more rows"),
        ({"needed": 900}, "about 900 held-out prompts would be needed; give more rows or choose a lower alpha"),
        ({"needed": 900, "reachable": 0.9}, "give more rows or choose alpha 0.9, which these may suffice for"),
        ({"right": 200}, "no answer was wrong, but too few answers are usual and judged right"),
        ({"alpha": 1.0}, "no number of prompts can show"),
        ({}, "too often wrong"),
    ],
)
def test_why_nothing_is_certified(changes: dict[str, Any], message: str) -> None:
    says = certificate(float("inf"), accepted=0, **changes).sentence()
    assert "Nothing could be certified" in says
    assert message in says


def test_a_lower_alpha_is_named_only_if_it_may_be_reached() -> None:
    rng = np.random.default_rng(4)
    known = answers(rng, 400)  # 85 to 100% right, by confidence
    found = certify_answers(known, answers(rng, 120), alpha=0.98, estimator="x", epsilon=0.0)
    assert not found.certified
    assert found.reachable is not None
    assert f"choose alpha {found.reachable:g}" in found.sentence()
    lower = [
        certify_answers(answers(rng, 400), answers(rng, 120), alpha=found.reachable, estimator="x") for _ in range(40)
    ]
    assert np.mean([one.certified for one in lower]) > 0.3  # "may suffice"
    assert certify_answers(known, answers(rng, 2), alpha=0.98, estimator="x").reachable is None


def test_a_certificate_is_kept_in_a_file(tmp_path: Path) -> None:
    assert load_certificate(tmp_path) is None
    usual = UsualLikelihood.fit(np.random.default_rng(0).normal(size=(50, 6)))
    rng = np.random.default_rng(3)
    tested = certify_answers(answers(rng, 400), answers(rng, 600), alpha=0.9, estimator="x")
    for one in (certificate(), certificate(usual=usual), certificate(float("inf"), reachable=0.9), tested):
        save_certificate(tmp_path, one)
        assert load_certificate(tmp_path) == one
    (tmp_path / "certificate.json").write_text('{"kind": "sdmlm answer certificate", "format_version": 99}')
    with pytest.raises(ValueError, match="newer sdmlm"):
        load_certificate(tmp_path)
    (tmp_path / "certificate.json").write_text("{")
    with pytest.raises(ValueError, match=r"certificate.json is damaged .* delete it, then run sdmlm certify"):
        load_certificate(tmp_path)
    save_certificate(tmp_path, None)
    assert load_certificate(tmp_path) is None


@pytest.mark.parametrize("threshold", [0.8, None])
def test_a_certificate_of_format_1_still_decides_by_the_sdm_output(tmp_path: Path, threshold: float | None) -> None:
    values = {
        **{"kind": "sdmlm answer certificate", "format_version": 1, "alpha": 0.95, "delta": 0.05, "epsilon": 0.1},
        **{"threshold": threshold, "prompts": 100, "right": 97, "accepted": 80, "accepted_right": 79, "needed": 0},
        **{"usual": None, "estimator": "x", "source": "held-out calibration prompts"},
    }
    (tmp_path / "certificate.json").write_text(json.dumps(values))
    old = load_certificate(tmp_path)
    assert old is not None
    assert (old.alpha, old.rule.estimator, old.certified) == (0.95, "x", threshold is not None)

    class OldScores:
        p = np.array([[0.1, 0.9], [0.3, 0.7], [0.1, 0.9], [0.1, 0.9], [0.1, 0.9]])
        prediction = np.array([1, 1, 1, 0, 1])
        d = np.array([0.5, 0.5, 0.05, 0.5, 0.1])
        confidence = np.array([9.0, 9.0, 9.0, 9.0, -9.0])  # plays no part

    accepted = old.rule.accepts(old.evidence(OldScores(), np.empty((5, 0))))  # type: ignore[arg-type]
    assert accepted.tolist() == [threshold is not None, False, False, False, threshold is not None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"delta": 1.0}, "delta is 1.0"), ({"alpha": 0.0}, "alpha is 0.0"), ({"epsilon": 1.0}, "epsilon is 1.0")],
)
def test_bad_settings_are_refused(changes: dict[str, float], message: str) -> None:
    some = answers(np.random.default_rng(0), 10)
    with pytest.raises(ValueError, match=message):
        certify_answers(some, some, **{"alpha": 0.9, **changes}, estimator="x")  # type: ignore[arg-type]
