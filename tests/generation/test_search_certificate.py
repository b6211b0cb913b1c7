"""The certificate of a search as a whole: what it was made with, where it applies, and where it does not."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_modules import ROOT, benchmark
from scipy.stats import binom
from search_checks import HOT, by_hand
from tiny_sdm_lm import OWN, calibration_rows, marked_rows, train

from sdmlm import SDMLanguageModel, SearchPolicy, calibrate_search, certify_search
from sdmlm.cli import main
from sdmlm.errors import BadSetting
from sdmlm.estimator.acceptance import CertifiedRule
from sdmlm.experiments.answer_comparison import judge_own
from sdmlm.generation.answers import Sampling
from sdmlm.generation.certification import certify_lm
from sdmlm.generation.search import _ranked, prepared_policies
from sdmlm.generation.search_certificate import (
    SearchCertificate,
    applying,
    load_search_certificates,
    save_search_certificates,
    with_certificate,
)
from sdmlm.language_model.answer_rule import AnswerCertificate, load_certificate, save_certificate
from sdmlm.rewards import exact_match
from sdmlm.server.work import Worker


@pytest.fixture(scope="module")
def certified_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("own"), **OWN)


@pytest.fixture
def lm(certified_folder: Path, tmp_path: Path) -> SDMLanguageModel:
    shutil.copytree(certified_folder, tmp_path / "model")
    return SDMLanguageModel.from_pretrained(tmp_path / "model", device="cpu")


def fresh_prompts(n: int = 40) -> list[str]:
    return [row["prompt"] for row in marked_rows(n, seed=9)]


def written(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_search_of_a_certified_model_is_not_calibrated_by_the_region(lm: SDMLanguageModel) -> None:
    with pytest.raises(ValueError, match="certify the search as well"):
        calibrate_search(lm, calibration_rows(), HOT, save=False, progress=False)


def test_a_certified_search_by_hand(lm: SDMLanguageModel) -> None:
    """Further answers until the model's certificate accepts one; otherwise the surest, unusual ones last."""
    single, prompts = lm.certificate(), fresh_prompts()
    assert single is not None
    lm.answer_certificate = single = dataclasses.replace(single, rule=stricter(single.rule))
    policy = SearchPolicy("resample", budget=3, temperature=1.5)
    searched = lm.generate(prompts, temperature=1.5, search=policy, progress=False)
    assert {v.tries for v in searched} >= {1, 1 + policy.budget}
    places = set()
    for n, v in enumerate(searched):
        tried = []
        for attempt in range(1 + policy.budget):
            sampling = lm.sampling(temperature=1.5)
            seeds = [[0, n, attempt] if attempt else [0, n]]
            answers = lm.write(lm.read_prompts([prompts[n]]), sampling, seeds, progress=False)
            tried += lm.judge(answers, lm.alpha, 0, progress=False)
            if tried[-1].verified:
                break
        assert v.tries == len(tried)
        key = [(one.usual or 0) >= single.rule.least_distance and (one.usual or 0) > 0 for one in tried]
        best = max(
            range(len(tried)),
            key=lambda i: (tried[i].verified, key[i], round(math.log(tried[i].certainty or 1e-300), 2), -i),
        )
        assert v.text == tried[best].text
        assert v.verified == tried[best].verified
        if not v.verified:
            places.add(best)
        assert not v.calibrated
        if v.verified:
            assert "promises nothing about answers of a search" in v.reason
    assert len(places) == 1 + policy.budget  # any of them may be the surest


def test_unusual_answers_come_after_all_others() -> None:
    rule = CertifiedRule(0.9, 0.05, "overall", 0.1, (math.inf, 4.0), 0.1, (1,), 40, 0, (), "digest")
    scores: Any = SimpleNamespace(
        confidence=np.array([9.0, -1.0, 5.0, 3.0, 9.0]),
        d=np.array([0.05, 0.5, 0.5, 0.5, 0.5]),
        prediction=np.array([1, 1, 1, 1, 0]),
    )
    done, sure = _ranked(AnswerCertificate(rule, 40, 36, 30, 29, None), None, scores, torch.empty(5, 1))
    assert done.tolist() == [False, False, True, False, False]
    assert np.argsort(-sure).tolist() == [2, 3, 1, 4, 0]


def stricter(rule: CertifiedRule) -> CertifiedRule:
    """The rule with a threshold that some of the model's answers fail."""
    return dataclasses.replace(rule, thresholds=(rule.thresholds[0], rule.thresholds[1] + 3.0))


def test_saving_keeps_what_another_process_certified_meanwhile(lm: SDMLanguageModel) -> None:
    assert lm.folder is not None
    sdm, of_another = lm.folder / "sdm", known(lm, SearchPolicy(budget=1))
    save_search_certificates(sdm, [of_another])
    lm.search_certificates = (known(lm),)
    lm.save_pretrained(lm.folder)
    assert lm.search_certificates == load_search_certificates(sdm) == (of_another, known(lm))


def without_repeated(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Without prompts of the calibration rows, and each prompt once, as a certificate uses them."""
    known = {row["prompt"] for row in calibration_rows()}
    return [row for row in {row["prompt"]: row for row in reversed(rows)}.values() if row["prompt"] not in known]


def test_a_search_is_certified_as_a_whole(lm: SDMLanguageModel) -> None:
    single = lm.certificate()
    assert single is not None
    assert lm.folder is not None
    lm.answer_certificate = single = dataclasses.replace(single, rule=stricter(single.rule))
    save_certificate(lm.folder / "sdm", single)
    rows = without_repeated(marked_rows(300, seed=11))
    found = certify_search(lm, rows, HOT, alpha=0.7, progress=False)
    rule = found.certificate.rule
    searched = lm.generate([row["prompt"] for row in rows], search=HOT, alpha=0.7, progress=False)
    assert found.tries == sum(v.tries for v in searched) / len(rows)
    # By hand: a fifth of the rows fixes the candidates, the others test them.
    tested = np.random.default_rng(0).random(len(rows)) >= 0.2
    kept = [(v, row) for v, row, t in zip(searched, rows, tested, strict=True) if t]
    assert found.certificate.prompts == len(kept)
    rest = [v for v, t in zip(searched, tested, strict=True) if not t]
    assert rule.least_distance == np.quantile([v.usual or 0 for v in rest], rule.epsilon, method="lower")
    candidates = [math.log((v.certainty or 0) / (1 - (v.certainty or 0))) for v in rest if v.verdict == "Yes"]
    assert all(min(abs(c - test.threshold) for c in candidates) < 1e-5 for test in rule.tests)
    assert found.certificate.right == sum(v.text == row["chosen"] for v, row in kept)
    accepted = [(v, row) for v, row in kept if v.verified]
    assert found.certificate.accepted == len(accepted) > 59
    assert found.certificate.accepted_right == sum(v.text == row["chosen"] for v, row in accepted)
    errors = found.certificate.accepted - found.certificate.accepted_right
    assert binom.cdf(errors, len(accepted), 0.3) <= rule.delta
    for v in searched:
        assert v.calibrated
        passes = (v.usual or 0) >= rule.least_distance and (v.certainty or 0) >= (
            found.certificate.least_certainty or 2
        )
        assert v.verified == (passes and v.verdict == "Yes")
        if v.verified:
            assert "at least 70% of the answers of this search that pass this rule are right" in v.reason

    # Other settings are not covered; nor is the search after the model's own certificate was renewed.
    prompt = rows[0]["prompt"]
    assert not lm.generate(prompt, search=dataclasses.replace(HOT, budget=2), alpha=0.7, progress=False).calibrated
    assert not lm.generate(prompt, search=HOT, alpha=0.7, temperature=0.5, progress=False).calibrated
    assert prepared_policies(lm, 0.7, lm.sampling()) == [HOT]
    assert prepared_policies(lm, 0.75, lm.sampling()) == []
    reopened = SDMLanguageModel.from_pretrained(lm.folder, device="cpu")
    assert reopened.search_certificates == (found,)
    assert prepared_policies(reopened, 0.7, lm.sampling()) == [HOT]
    reopened.save_pretrained(lm.folder.parent / "copy")
    assert "## Certified searches" in (lm.folder.parent / "copy" / "README.md").read_text()
    assert load_search_certificates(lm.folder.parent / "copy" / "sdm") == (found,)
    lm.answer_certificate = dataclasses.replace(single, rule=stricter(single.rule))
    assert prepared_policies(lm, 0.7, lm.sampling()) == []


def test_certified_searches_are_replaced_one_by_one(lm: SDMLanguageModel) -> None:
    rows = marked_rows(60, seed=11)
    one, two = (certify_search(lm, rows, SearchPolicy(budget=n), alpha=0.6, progress=False) for n in (1, 2))
    again = certify_search(lm, rows, SearchPolicy(budget=1), alpha=0.55, progress=False)
    assert lm.search_certificates == (two, again)
    assert lm.folder is not None
    assert load_search_certificates(lm.folder / "sdm") == (two, again)
    assert one not in lm.search_certificates
    cut = known(lm, again.policy, sampling=lm.sampling(5))  # with other settings of generation it is another search
    assert with_certificate([two, again], cut) == (two, again, cut)
    path = lm.folder / "sdm" / "search_certificates.json"
    path.write_text(path.read_text().replace('"budget": 2', '"budget": 3'))
    with pytest.raises(ValueError, match="is damaged"):
        load_search_certificates(lm.folder / "sdm")


def test_a_search_needs_the_certificate_of_single_answers(lm: SDMLanguageModel) -> None:
    with pytest.raises(BadSetting, match=r"needs a certificate of single answers at alpha 0\.99"):
        certify_search(lm, marked_rows(20, seed=11), HOT, alpha=0.99, progress=False)
    lm.folder = None
    with pytest.raises(ValueError, match="no folder of its own"):
        certify_search(lm, marked_rows(20, seed=11), HOT, progress=False)


def known(lm: SDMLanguageModel, policy: SearchPolicy = HOT, **changes: Any) -> SearchCertificate:
    """A made-up certificate of a search that applies to this model."""
    single = lm.answer_certificate
    assert single is not None
    stops_at = single.threshold, single.rule.least_distance
    made = SearchCertificate(policy, lm.sampling(), stops_at, 1.5, single)
    return dataclasses.replace(made, **changes)


def nothing(certificate: AnswerCertificate) -> AnswerCertificate:
    """A certificate under which nothing is accepted."""
    rule = dataclasses.replace(certificate.rule, thresholds=(math.inf, math.inf))
    return dataclasses.replace(certificate, rule=rule, accepted=0, accepted_right=0)


def test_a_certificate_of_a_search_is_only_shown_where_it_applies(lm: SDMLanguageModel, tmp_path: Path) -> None:
    folder = lm.folder
    assert folder is not None

    def shown() -> bool:
        lm.save_pretrained(folder)
        assert main(["report", str(folder), "--output", str(tmp_path / "r.html")]) == 0
        texts = (folder / "README.md").read_text(), (tmp_path / "r.html").read_text()
        found = ["Search resample with a budget of 3" in text for text in texts]
        assert found[0] == found[1] == bool(applying(lm))
        return found[0]

    single = lm.answer_certificate
    assert single is not None
    lm.search_certificates = (known(lm),)
    assert shown()
    lm.feedback("abcd=", "dcba", False)
    assert not shown()
    lm.undo_feedback()
    assert shown()
    lm.answer_certificate = dataclasses.replace(single, rule=stricter(single.rule))
    assert not shown()
    lower = dataclasses.replace(single.rule, alpha=single.alpha - 0.1)  # by chance with the same threshold
    lm.answer_certificate = dataclasses.replace(single, rule=lower)
    assert not shown()
    lm.answer_certificate = None
    assert not shown()
    assert lm.search_certificates  # it is kept: the certificate of before may come back
    lm.answer_certificate = single
    assert shown()


def test_calibrations_are_not_shown_where_the_certificate_decides(lm: SDMLanguageModel, tmp_path: Path) -> None:
    assert lm.folder is not None
    single, lm.answer_certificate = lm.answer_certificate, None
    save_certificate(lm.folder / "sdm", None)
    calibrate_search(lm, calibration_rows(), HOT, progress=False)
    for certificate, shows in ((None, True), (single, False)):
        lm.answer_certificate = certificate
        lm.save_pretrained(lm.folder)
        assert main(["report", str(lm.folder), "--output", str(tmp_path / "r.html")]) == 0
        assert ("calibrated as a whole" in (tmp_path / "r.html").read_text()) == shows
        assert ("## Calibrated searches" in (lm.folder / "README.md").read_text()) == shows


def test_where_a_certificate_matches(lm: SDMLanguageModel) -> None:
    single = lm.answer_certificate
    assert single is not None
    assert single.usual is not None
    one, alpha = known(lm), single.alpha
    assert one.matches(HOT, alpha, lm.sampling(), single)
    assert one.matches(HOT, alpha - 0.1, lm.sampling(), single)
    assert not one.matches(HOT, alpha + 0.01, lm.sampling(), single)
    for policy in (
        SearchPolicy("resample", 3, 1.4),
        SearchPolicy("resample", 2, 1.5),
        SearchPolicy("continue", 3, 1.5),
    ):
        assert not one.matches(policy, alpha, lm.sampling(), single)
    for sampling in (lm.sampling(5), lm.sampling(temperature=0.1), lm.sampling(top_p=0.9), lm.sampling(stop="a")):
        assert not one.matches(HOT, alpha, sampling, single)
    bound = dataclasses.replace(single.rule, least_distance=0.2)
    layer = dataclasses.replace(single.rule, estimator="another")
    for rule in (stricter(single.rule), bound, layer):
        assert not one.matches(HOT, alpha, lm.sampling(), dataclasses.replace(single, rule=rule))
    other = dataclasses.replace(single.usual, mean=tuple(x + 1 for x in single.usual.mean))
    assert not one.matches(HOT, alpha, lm.sampling(), dataclasses.replace(single, usual=other))


def test_a_search_for_which_nothing_could_be_certified_verifies_nothing(lm: SDMLanguageModel) -> None:
    single = lm.answer_certificate
    assert single is not None
    failed = known(lm, certificate=nothing(single))
    lm.search_certificates = (failed,)
    found = lm.generate(fresh_prompts(), search=HOT, progress=False)
    assert not any(v.verified for v in found)
    assert all(v.calibrated for v in found)
    assert all("nothing could be certified" in v.reason for v in found)


def test_the_server_searches_as_certified(lm: SDMLanguageModel) -> None:
    single = lm.answer_certificate
    assert single is not None
    two = SearchPolicy("resample", 2, 1.5)
    lm.search_certificates = (known(lm, certificate=nothing(single)), known(lm, two))
    assert prepared_policies(lm, lm.alpha, lm.sampling()) == [two, HOT]  # the newest first
    prompts, worker = fresh_prompts(), Worker(lm)

    def searched(budget: int | None, sampling: Sampling | None = None) -> list[Any]:
        how = (sampling or lm.sampling(), budget, 0, lm.alpha, 0)
        return [judged.verification for judged in worker.search(list(prompts), *how)]

    def key(found: list[Any]) -> list[Any]:
        return [(v.text, v.tries, v.verified, v.calibrated) for v in found]

    assert key(searched(None)) == key(lm.generate(prompts, search=two, progress=False))
    assert all(v.calibrated for v in searched(None))
    assert key(searched(3)) == key(lm.generate(prompts, search=HOT, progress=False))
    assert not any(v.verified for v in searched(3))
    for other in (searched(1), searched(None, lm.sampling(temperature=0.5))):
        assert not any(v.calibrated for v in other)
    # A calibration of the same search, from before the certificate, decides nothing any more.
    lm.answer_certificate = None
    calibrate_search(lm, calibration_rows(), HOT, save=False, progress=False)
    lm.answer_certificate = single
    judged = worker.search(list(prompts), lm.sampling(), 3, 0, lm.alpha, 0)
    assert all(one.region == lm.estimator.region(lm.alpha).to_dict() for one in judged)


def test_a_search_without_further_tries_is_plain_generation(lm: SDMLanguageModel) -> None:
    none = SearchPolicy(budget=0)
    plain = lm.generate(fresh_prompts(), progress=False)
    searched = lm.generate(fresh_prompts(), search=none, progress=False)
    assert [(v.text, v.verified, v.reason, v.calibrated) for v in searched] == [
        (v.text, v.verified, v.reason, True) for v in plain
    ]
    sampled = lm.generate(fresh_prompts(), search=none, temperature=0.01, progress=False)
    assert not any("With probability" in v.reason for v in sampled)


def test_rows_that_the_layer_was_fitted_over_are_refused(lm: SDMLanguageModel) -> None:
    certify: list[Callable[[Any], Any]] = [
        lambda rows: certify_lm(lm, rows, progress=False),
        lambda rows: certify_search(lm, rows, HOT, progress=False),
    ]
    for one in certify:
        with pytest.raises(
            ValueError, match=r"fitted over the prompts of \d+ of these 83 rows: a certificate needs new rows"
        ):
            one(calibration_rows())
        with pytest.raises(ValueError, match="No rows are given"):
            one([])
    assert lm.search_certificates == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: None, "this model has none: run sdmlm certify without --search first"),
        (
            lambda own: dataclasses.replace(own, rule=dataclasses.replace(own.rule, estimator="x")),
            "for another SDM layer",
        ),
        (
            lambda own: dataclasses.replace(own, rule=dataclasses.replace(own.rule, alpha=0.6)),
            "is for alpha 0.6: choose",
        ),
        (nothing, "verifies nothing: certify the model again"),
    ],
)
def test_why_a_search_cannot_be_certified(lm: SDMLanguageModel, change: Any, message: str) -> None:
    lm.answer_certificate = change(lm.answer_certificate)
    with pytest.raises(BadSetting, match=message):
        certify_search(lm, marked_rows(20, seed=11), HOT, progress=False)


def test_the_sentence_names_the_settings(lm: SDMLanguageModel) -> None:
    says = known(lm).sentence()
    assert says.startswith(
        "Search resample with a budget of 3 (first answer greedy, further ones at temperature 1.5, up to 20 tokens): 1.50 "
        "answers per prompt. "
    )
    assert "This holds for the final answers of this search" in says
    sampling = Sampling(7, 0.5, 0.9, (".", "!"))
    assert (
        "(first answer at temperature 0.5, top-p 0.9, further ones at temperature 1.5, up to 7 tokens, stopped by '.' or '!')"
        in known(lm, sampling=sampling).sentence()
    )


def test_a_damaged_file_says_how_to_go_on(lm: SDMLanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert lm.folder is not None
    path = lm.folder / "sdm" / "search_certificates.json"
    path.write_text("{")
    assert main(["report", str(lm.folder)]) == 2
    assert "is damaged" in (error := capsys.readouterr().err)
    assert "delete it, then certify the search again" in error  # in this order: the model cannot be opened before
    path.write_text('{"format_version": 99}')
    with pytest.raises(ValueError, match="newer sdmlm"):
        SDMLanguageModel.from_pretrained(lm.folder, device="cpu")
    path.unlink()
    assert SDMLanguageModel.from_pretrained(lm.folder, device="cpu").search_certificates == ()


# On the command line


def test_a_search_is_certified_on_the_command_line(
    lm: SDMLanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "rows.jsonl", marked_rows(60, seed=11))
    asked = ["certify", str(lm.folder), "--data", data, "--search", "resample", "--budget", "1", "--alpha", "0.6"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "Search resample with a budget of 1 (" in out
    assert "Without the search, about" in out
    assert "answers are verified at alpha 0.8, with one answer per prompt" in out
    assert "sdm/search_certificates.json. sdmlm generate --search" in out
    assert "with these settings and alpha 0.6 or lower" in out
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"] == {"kind": "resample", "budget": 1, "temperature": 0.7}
    assert found["sampling"] == {"max_new_tokens": 20, "temperature": 0.0, "top_p": 1.0, "stop": []}
    assert found["says"].startswith("Search resample")
    assert 0 < found["verified_without"] <= 1
    assert lm.folder is not None
    assert main(["report", str(lm.folder), "--output", str(tmp_path / "report.html"), "--alpha", "0.6"]) == 0
    assert "Search resample with a budget of 1" in (tmp_path / "report.html").read_text()
    for wrong, message in (
        (["--budget", "1"], "--budget goes only with --search"),
        (["--max-new-tokens", "9"], "--max-new-tokens goes only with --search"),
        (["--temperature", "0"], "--temperature goes only with --search"),
        (["--search", "resample"], "goes only with"),
    ):
        assert main(["certify", str(lm.folder), data, *wrong]) == 2
        assert message in capsys.readouterr().err
    for wrong, message in ((["--budget", "-1"], "budget is -1"), (["--top-p", "2"], "top_p is 2.0")):
        assert main(["certify", "no folder", "--data", data, "--search", "resample", *wrong]) == 2
        assert message in capsys.readouterr().err


def test_the_settings_of_generate_can_be_certified(
    lm: SDMLanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "rows.jsonl", marked_rows(60, seed=11))
    how = ["--search", "resample", "--max-new-tokens", "12", "--temperature", "0.2", "--top-p", "0.9", "--stop", "!"]
    how += ["--alpha", "0.6"]
    assert main(["certify", str(lm.folder), "--data", data, *how]) == 0
    generate = ["generate", str(lm.folder), "--prompts", data, "--neighbors", "0"]
    capsys.readouterr()
    for settings, calibrated in ((how, True), ([*how, "--budget", "3"], False), (how[:2], False)):
        assert main([*generate, *settings, "--json"]) == 0
        shown = capsys.readouterr()
        assert all(json.loads(line)["calibrated"] == calibrated for line in shown.out.splitlines())
        assert ("neither certified nor calibrated" in shown.err) != calibrated


def test_a_search_that_fails_its_test_is_reported(
    lm: SDMLanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "rows.jsonl", marked_rows(8, seed=11))
    assert main(["certify", str(lm.folder), "--data", data, "--search", "resample"]) == 0
    shown = capsys.readouterr()
    assert "Nothing could be certified" in shown.out
    assert "no answer of this search will be verified" in shown.err


def test_renewing_the_certificate_ends_those_of_searches(
    lm: SDMLanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh, more = (written(tmp_path / f"{seed}.jsonl", marked_rows(150, seed)) for seed in (11, 12))
    certify, search = ["certify", str(lm.folder), "--data"], ["--search", "resample", "--budget", "1"]
    assert main([*certify, fresh, *search, "--alpha", "0.7"]) == 0
    capsys.readouterr()
    assert main([*certify, fresh]) == 0
    assert "The certificates of searches no longer apply (1)" in capsys.readouterr().err
    renewed = SDMLanguageModel.from_pretrained(lm.folder or "", device="cpu")
    assert len(renewed.search_certificates) == 1
    assert applying(renewed) == []
    # The rows of the certificate that decides when to stop are not new to the search.
    assert main([*certify, fresh, *search]) == 2
    assert "a search needs other rows" in capsys.readouterr().err
    assert main([*certify, more, *search, "--alpha", "0.7"]) == 0
    assert "no longer apply" not in capsys.readouterr().err


def test_files_that_the_model_was_made_with_are_refused(
    lm: SDMLanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lm.folder is not None
    data = written(tmp_path / "trained.jsonl", marked_rows(60, seed=11))
    from sdmlm.language_model.rows import read_preferences

    used = {"source": "x", "rows": 60, "used": 60, "sha256": read_preferences(data).sha256}
    record = {"status": "finished", "settings": {}, "data": {"train": used}, "config": {}, "log_history": []}
    certify = ["certify", str(lm.folder), "--data", data]
    (lm.folder / "training.json").write_text(json.dumps(record))
    for more in ([], ["--search", "resample"]):
        assert main([*certify, *more]) == 2
        assert "was trained or calibrated with" in capsys.readouterr().err
    (lm.folder / "training.json").unlink()
    lm.metadata["calibrated"] = used
    lm.save_pretrained(lm.folder)
    assert main(certify) == 2
    assert "was trained or calibrated with" in capsys.readouterr().err
    assert load_certificate(lm.folder / "sdm") == lm.answer_certificate


# benchmarks/certified_search.py


def test_the_benchmark_searches_as_the_model_does(lm: SDMLanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # it imports another benchmark
    module = benchmark("certified_search")
    rows = marked_rows(60, seed=11)
    single = lm.answer_certificate
    assert single is not None
    lm.answer_certificate = dataclasses.replace(single, rule=stricter(single.rule))
    finals = module.policies(lm, rows, exact_match)
    for kind, budget in (("resample", 1), ("resample", 4), ("continue", 2)):
        policy = SearchPolicy(kind, budget, module.TEMPERATURE)
        found = lm.generate([row["prompt"] for row in rows], search=policy, progress=False)
        one = finals[f"{kind}, budget {budget}"]
        assert one.tokens.tolist() == [v.completion_tokens for v in found]
        assert one.evidence.labels.tolist() == [v.text == row["chosen"] for v, row in zip(found, rows, strict=True)]
    assert finals["resample, budget 4"].tokens.sum() > finals["plain"].tokens.sum()
    assert (finals["best of 5 by the SDM layer"].tokens >= finals["resample, budget 4"].tokens).all()
    assert module.certified(finals["plain"], 0.99, splits=2)["verified_right"] is None  # too few rows for anything


def test_saving_keeps_a_certificate_that_another_process_renewed(lm: SDMLanguageModel) -> None:
    assert lm.folder is not None
    assert lm.answer_certificate is not None
    renewed = dataclasses.replace(lm.answer_certificate, source="renewed elsewhere")
    save_certificate(lm.folder / "sdm", renewed)
    lm.save_pretrained(lm.folder)
    assert lm.answer_certificate == load_certificate(lm.folder / "sdm") == renewed
    lm.answer_certificate = dataclasses.replace(renewed, source="renewed here")
    save_certificate(lm.folder / "sdm", renewed)
    lm.save_pretrained(lm.folder)
    certificate = load_certificate(lm.folder / "sdm")
    assert certificate is not None
    assert certificate.source == "renewed here"
    other = dataclasses.replace(certificate.rule, estimator="another layer")  # calibrated anew by another process
    save_certificate(lm.folder / "sdm", dataclasses.replace(certificate, rule=other))
    lm.save_pretrained(lm.folder)
    assert load_certificate(lm.folder / "sdm") == certificate


def test_saving_keeps_a_certificate_of_a_search_that_another_process_renewed(lm: SDMLanguageModel) -> None:
    assert lm.folder is not None
    save_search_certificates(lm.folder / "sdm", [known(lm)])
    mine = SDMLanguageModel.from_pretrained(lm.folder, device="cpu")
    newer = dataclasses.replace(known(lm), tries=1.25)
    save_search_certificates(lm.folder / "sdm", [newer])
    mine.save_pretrained(lm.folder)
    assert mine.search_certificates == load_search_certificates(lm.folder / "sdm") == (newer,)


@pytest.mark.parametrize("why", ["higher alpha", "feedback"])
def test_what_the_certificate_rejects_stays_rejected_where_it_promises_nothing(lm: SDMLanguageModel, why: str) -> None:
    prompts, single = fresh_prompts(), lm.answer_certificate
    assert single is not None
    rule = stricter(single.rule)
    if why == "feedback":
        lm.feedback("abcd=", "dcba", False, save=False)
    else:
        rule = dataclasses.replace(rule, alpha=lm.alpha - 0.05)
    sampling, seeds = lm.sampling(temperature=1.5), [[0, n] for n in range(len(prompts))]
    answers = lm.write(lm.read_prompts(prompts), sampling, seeds, progress=False)
    lm.answer_certificate = None
    region = lm.judge(answers, lm.alpha, 0, progress=False)
    lm.answer_certificate = guard = dataclasses.replace(single, rule=rule)
    assert lm.certificate() is None
    both = lm.judge(answers, lm.alpha, 0, progress=False)
    h = lm.summaries(answers)
    passes = rule.accepts(guard.evidence(lm.score(h, lm.alpha), h.numpy()))
    assert [v.verified for v in both] == [v.verified and p for v, p in zip(region, passes, strict=True)]
    assert [v.certified for v in both] == [None if p else False for p in passes]
    rows = marked_rows(len(prompts), seed=9)
    greedy = lm.generate(prompts, progress=False)
    assert judge_own(lm, rows, exact_match, 0, 0, progress=False).verified.tolist() == [v.verified for v in greedy]
    with pytest.raises(ValueError, match="certify the search as well"):
        calibrate_search(lm, calibration_rows(), HOT, save=False, progress=False)
    refused = [v for v, alone in zip(both, region, strict=True) if alone.verified and not v.verified]
    assert refused
    assert all(v.accepted and v.reason.startswith("Not verified by the certificate") for v in refused)
    searched = lm.generate(prompts, search=HOT, progress=False)
    for n, (prompt, found) in enumerate(zip(prompts, searched, strict=True)):
        expected, tries = by_hand(lm, prompt, n, HOT, lm.alpha)
        assert (found.text, found.verified, found.tries) == (expected.text, expected.verified, tries)
