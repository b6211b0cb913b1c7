"""The final SDM layer over own answers, with its certificate, from training to answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_lm import tiny_config
from tiny_sdm_lm import CALIBRATION, OWN, calibration_rows, marked_rows, train

from sdmlm import SDMLanguageModel
from sdmlm.estimator.acceptance import Evidence
from sdmlm.finetuning.config import SDMConfig
from sdmlm.finetuning.held_out import part_rows
from sdmlm.finetuning.own_answers import OwnLayer, _too_little
from sdmlm.finetuning.own_documents import OwnDocument, greedy_answers
from sdmlm.language_model.answer_rule import certify_answers, load_certificate
from sdmlm.rewards import exact_match


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("own"), **OWN)


@pytest.fixture
def lm(folder: Path, tmp_path: Path) -> SDMLanguageModel:
    shutil.copytree(folder, tmp_path / "model")
    return SDMLanguageModel.from_pretrained(tmp_path / "model", device="cpu")


def fresh_prompts(n: int = 40) -> list[str]:
    return [row["prompt"] for row in marked_rows(n, seed=9)]


def test_training_saves_a_certificate_over_held_out_rows(folder: Path) -> None:
    certificate = load_certificate(folder / "sdm")
    assert certificate is not None
    metadata = json.loads((folder / "sdm" / "lm.json").read_text())
    assert metadata["summary"] == "states+likelihood"
    distinct = {row["prompt"] for row in calibration_rows()}
    assert len(metadata["held_out"]) == certificate.prompts == round(len(distinct) / 2)
    assert metadata["calibration_rows"] == CALIBRATION
    fitted = {int(name.split()[0]) for name in SDMLanguageModel.from_pretrained(folder).estimator.documents_}
    assert fitted.isdisjoint(metadata["held_out"])


def test_documents_of_one_prompt_are_on_one_side(lm: SDMLanguageModel) -> None:
    def rows(ids: list[Any]) -> set[int]:
        return {int(str(name).split()[0]) for name in ids}

    assert len(lm.estimator.layers_) > 1
    for layer in lm.estimator.layers_:
        assert rows(layer.support_ids).isdisjoint(rows(layer.calibration_ids))
    sources = {str(name).split()[1] for name in lm.estimator.documents_}
    assert {"greedy", "sampled", "other"} <= sources


def test_no_greedy_answer_is_left_out(lm: SDMLanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded again, an answer may be too long: it is read as it was generated, as in use."""

    def greedy() -> list[OwnDocument]:
        args = SDMConfig(None, report_to="none")
        return greedy_answers(lm.model, lm.encoder, rows, range(len(rows)), args, exact_match, 8, progress=False)

    def too_long(*args: Any) -> list[int]:
        raise ValueError("too long")

    rows = marked_rows(20, seed=9)
    before = greedy()
    monkeypatch.setattr(type(lm.encoder), "judged_document", too_long)
    again = greedy()
    assert [(a.row, a.body, a.right) for a in again] == [(a.row, a.body, a.right) for a in before]
    for document in again:
        assert tuple(document.ids[-len(lm.encoder.open_ids) :]) == tuple(lm.encoder.open_ids)
        assert list(document.ids[: document.start]) == lm.encoder.encode_prompt(rows[document.row]["prompt"])
    assert [a.ids for a in again] == [b.ids for b in before]  # each of these answers ends with the tag


def test_verified_follows_the_certificate(lm: SDMLanguageModel) -> None:
    certificate = lm.certificate()
    assert certificate is not None
    assert certificate.certified
    answers = lm.generate(fresh_prompts(), progress=False)
    verified = [answer for answer in answers if answer.verified]
    assert len(verified) > len(answers) / 2
    for answer in answers:
        assert answer.verified == (answer.certified and answer.verdict == "Yes")
        assert "certificate" in answer.reason
        assert answer.usual is not None
        if answer.verified:
            assert answer.usual >= certificate.rule.least_distance


def test_the_same_verdict_from_generation_and_from_one_pass(lm: SDMLanguageModel) -> None:
    prompts = fresh_prompts()
    written = lm.generate(prompts, progress=False)
    given = lm.verify(prompts, [answer.text for answer in written], progress=False)
    assert [a.verified for a in written] == [a.verified for a in given]
    assert [a.verdict for a in written] == [a.verdict for a in given]
    np.testing.assert_allclose(
        [a.probability_of_yes for a in written], [a.probability_of_yes for a in given], atol=1e-4
    )


def test_answers_that_belong_to_other_prompts_are_not_verified(lm: SDMLanguageModel) -> None:
    rows = marked_rows(40, seed=9)
    others = [row["chosen"] for row in rows[1:] + rows[:1]]
    judged = lm.verify([row["prompt"] for row in rows], others, progress=False)
    assert sum(answer.verified for answer in judged) <= 2


def test_a_higher_alpha_than_certified_is_decided_by_the_region(lm: SDMLanguageModel) -> None:
    answer = lm.generate(fresh_prompts(1), alpha=0.99, progress=False)[0]
    assert answer.certified is None
    assert answer.verified == (answer.accepted and answer.verdict == "Yes")


def test_feedback_ends_the_certificate_until_it_is_undone(lm: SDMLanguageModel) -> None:
    lm.feedback("abcd=", "dcba", False)
    assert lm.certificate() is None
    lm.undo_feedback()
    assert lm.certificate() is not None


def test_the_certificate_is_saved_with_the_model(lm: SDMLanguageModel, tmp_path: Path) -> None:
    lm.save_pretrained(tmp_path / "copy")
    card = (tmp_path / "copy" / "README.md").read_text()
    assert "## What is promised" in card
    assert "not for text by others" in card
    assert SDMLanguageModel.from_pretrained(tmp_path / "copy", device="cpu").certificate() == lm.certificate()


def test_sampled_answers_are_not_promised_anything(lm: SDMLanguageModel) -> None:
    prompts = fresh_prompts()
    sampled = lm.generate(prompts, temperature=0.01, progress=False)
    assert any(v.verified for v in sampled)
    for v in sampled:
        assert not v.verified or "promises nothing about answers that are sampled or cut short" in v.reason
    greedy = lm.generate(prompts, progress=False)
    assert any("With probability 0.95, at least" in v.reason for v in greedy)
    longer = lm.generate(prompts, max_new_tokens=50, progress=False)  # the same answers, which end by themselves
    assert [v.reason for v in longer] == [v.reason for v in greedy]
    for how in ({"max_new_tokens": 4}, {"stop": "<verified>"}):
        cut = lm.generate(prompts, **how, progress=False)
        assert not any("With probability" in v.reason for v in cut)
        assert not any(v.finish_reason == "length" for v in cut) or "max_new_tokens" in how


def test_the_certificate_at_another_alpha() -> None:
    rng = np.random.default_rng(0)

    def evidence(n: int) -> Evidence:
        sure = rng.normal(2.0, 2.0, n)
        right = rng.random(n) < 1 / (1 + np.exp(-sure))
        return Evidence(sure, rng.random(n), np.ones(n, dtype=int), right.astype(int))

    known, fresh = evidence(400), evidence(600)
    at = {
        alpha: certify_answers(known, fresh, alpha=alpha, delta=0.1, epsilon=0.02, estimator="x")
        for alpha in (0.8, 0.9, 0.95)
    }
    rest: dict[str, Any] = {"reduction": None, "prompts": 1000, "right": 800, "held_out": (), "warning": None}
    estimator: Any = None
    own = OwnLayer(estimator=estimator, certificate=at[0.9], known=known, fresh=fresh, **rest)
    assert {alpha: own.certificate_at(alpha) for alpha in at} == at
    assert at[0.8].accepted > at[0.9].accepted > at[0.95].accepted > 0


def test_the_parts_are_disjoint_and_the_same_for_a_seed() -> None:
    def args(seed: int) -> SDMConfig:
        return SDMConfig(None, certificate_share=0.4, seed=seed, report_to="none")

    fitted, held_out = part_rows("abcdefghij", args(3))
    assert sorted(fitted + held_out) == list(range(10))
    assert len(held_out) == 4
    assert part_rows("abcdefghij", args(3)) == (fitted, held_out)
    assert part_rows("abcdefghij", args(4)) != (fitted, held_out)


def test_an_lm_that_is_always_right_or_wrong_is_told() -> None:
    right = [OwnDocument(i, "greedy", "a", True) for i in range(40)]
    wrong = [OwnDocument(i, "greedy", "a", False) for i in range(40)]
    assert "too few to learn its errors from" in str(_too_little(right, 40, 40))
    assert "0 of 40 calibration prompts correctly: improve the language model first" in str(_too_little(wrong, 0, 40))
    assert _too_little([*right, *wrong], 20, 40) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": "mine"}, "documents is 'mine'"),
        ({"summary": "all"}, "summary is 'all'"),
        ({"summary": "states+likelihood", "documents": "paper"}, 'needs documents="own"'),
        ({"certificate_share": 1.0}, "certificate_share is 1.0"),
        ({"certificate_epsilon": -0.1}, "certificate_epsilon is -0.1"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, **changes)
