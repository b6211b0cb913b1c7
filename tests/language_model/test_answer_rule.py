"""The rule of acceptance for own answers: its promise over many draws, its words, its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sdmlm.language_model.answer_rule import (
    AnswerCertificate,
    JudgedAnswers,
    UsualLikelihood,
    certify_answers,
    load_certificate,
    save_certificate,
)


def answers(rng: np.random.Generator, n: int) -> JudgedAnswers:
    """The surer the SDM layer, the likelier an answer is right: 0.85 to 1 for outputs of 0.5 to 1."""
    output = rng.uniform(0.5, 1, n)
    return JudgedAnswers(output > 0, output, rng.random(n), rng.random(n) < 0.7 + 0.3 * output)


def true_accuracy(threshold: float) -> float:
    return 0.7 + 0.3 * (1 + max(threshold, 0.5)) / 2


@pytest.mark.parametrize("alpha", [0.93, 0.95])
def test_the_promise_holds_in_all_but_a_share_delta_of_draws(alpha: float) -> None:
    rng = np.random.default_rng(0)
    broken = certified = 0
    draws = 400
    for _ in range(draws):
        rule = certify_answers(answers(rng, 400), answers(rng, 600), alpha=alpha, estimator="x", delta=0.1, epsilon=0.1)
        certified += rule.certified
        broken += rule.certified and true_accuracy(rule.threshold) < alpha - 1e-4
    assert certified > 0.5 * draws  # not vacuous
    assert broken <= 0.1 * draws + 2 * np.sqrt(draws * 0.1 * 0.9)


def test_the_loosest_threshold_that_passes_is_taken() -> None:
    rng = np.random.default_rng(1)
    easy = certify_answers(answers(rng, 2000), answers(rng, 5000), alpha=0.9, estimator="x", epsilon=0.0)
    hard = certify_answers(answers(rng, 2000), answers(rng, 5000), alpha=0.96, estimator="x", epsilon=0.0)
    assert easy.threshold < 0.55 < 0.7 < hard.threshold < 0.9  # 0.733 is where 0.96 is reached


def test_all_three_parts_of_the_rule_must_hold() -> None:
    rule = AnswerCertificate(0.95, 0.05, 0.1, 0.8, 100, 97, 80, 79, 0, None, "x")
    yes = np.array([True, True, True, False])
    output = np.array([0.9, 0.7, 0.9, 0.9])
    distance = np.array([0.5, 0.5, 0.05, 0.5])
    assert rule.accepts(yes, output, distance).tolist() == [True, False, False, False]


def test_usual_likelihood_gives_up_a_share_and_rejects_what_is_far() -> None:
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(5, 5)) * [1, 2, 30, 1, 10]
    h = np.concatenate([rng.normal(size=(3000, 3)), rng.normal(size=(3000, 5)) @ mixing], axis=1)
    usual = UsualLikelihood.fit(h[:2000])
    assert np.mean(usual.d(h[2000:]) < 0.1) == pytest.approx(0.1, abs=0.03)
    far = h[2000:].copy()
    far[:, -1] += 200
    assert np.mean(usual.d(far) >= 0.1) < 0.02
    other_states = h[2000:].copy()
    other_states[:, :3] += 100  # the states play no part
    np.testing.assert_array_equal(usual.d(other_states), usual.d(h[2000:]))


def certificate(**changes: object) -> AnswerCertificate:
    values = {
        **{"alpha": 0.95, "delta": 0.05, "epsilon": 0.1, "threshold": 0.8, "prompts": 200, "right": 190},
        **{"accepted": 180, "accepted_right": 178, "needed": 0, "usual": None, "estimator": "x"},
    }
    return AnswerCertificate(**values | changes)  # type: ignore[arg-type]


def test_the_sentence_tells_right_answers_share_and_promise() -> None:
    says = certificate().sentence()
    assert "answered 190 of 200 held-out prompts rightly" in says
    assert "about 90 will be verified" in says
    assert "at least 95% of those are right" in says
    assert "not for text by others" in says


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"right": 0}, "the language model itself is the problem"),
        ({"prompts": 20, "right": 19}, "even without an error 59 held-out prompts are needed"),
        ({"needed": 900}, "about 900 held-out prompts would be needed"),
        ({"alpha": 1.0}, "no number of prompts can show"),
        ({}, "too often wrong"),
    ],
)
def test_why_nothing_is_certified(changes: dict[str, object], message: str) -> None:
    says = certificate(threshold=float("inf"), accepted=0, **changes).sentence()
    assert "Nothing could be certified" in says
    assert message in says


def test_a_certificate_is_kept_in_a_file(tmp_path: Path) -> None:
    assert load_certificate(tmp_path) is None
    usual = UsualLikelihood.fit(np.random.default_rng(0).normal(size=(50, 6)))
    for one in (certificate(), certificate(usual=usual), certificate(threshold=float("inf"))):
        save_certificate(tmp_path, one)
        assert load_certificate(tmp_path) == one
    (tmp_path / "certificate.json").write_text('{"kind": "sdmlm answer certificate", "format_version": 99}')
    with pytest.raises(ValueError, match="newer sdmlm"):
        load_certificate(tmp_path)
    (tmp_path / "certificate.json").write_text("{")
    with pytest.raises(ValueError, match=r"certificate.json is damaged .* run sdmlm certify"):
        load_certificate(tmp_path)
    save_certificate(tmp_path, None)
    assert load_certificate(tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"delta": 1.0}, "delta is 1.0"), ({"alpha": 0.0}, "alpha is 0.0"), ({"epsilon": 1.0}, "epsilon is 1.0")],
)
def test_bad_settings_are_refused(changes: dict[str, float], message: str) -> None:
    some = answers(np.random.default_rng(0), 10)
    with pytest.raises(ValueError, match=message):
        certify_answers(some, some, **{"alpha": 0.9, **changes}, estimator="x")  # type: ignore[arg-type]
