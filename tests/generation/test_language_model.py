"""SDMLanguageModel: verdicts against the spec done slowly, every way to the same verdict, feedback, saving, bad input."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference as slow
import torch
from tiny_lm import tiny_lm, tiny_tokenizer
from tiny_sdm_lm import calibration_rows, marked_rows, train
from transformers import AutoModelForCausalLM

from sdmlm import SDMLanguageModel, SearchPolicy, Verification, calibrate_search
from sdmlm.estimator.explain import reason
from sdmlm.estimator.layer import ALPHA_GRID
from sdmlm.estimator.region import HighReliabilityRegion
from sdmlm.evaluation.lm_evaluation import Evaluation, evaluation_file, write_evaluation
from sdmlm.generation import feedback as feedback_module
from sdmlm.generation.prompts import read_completion
from sdmlm.language_model.encoding import Encoder, VerificationTags
from sdmlm.language_model.forward import inner_lm
from sdmlm.language_model.sdm_folder import layer_sha256
from sdmlm.storage.artifacts import read_metadata, write_metadata

PROMPTS = [row["prompt"] for row in marked_rows(40, 5)]
SUFFIXED = ["abc\n<verified>Yes</verified>", "abc\n<verified>No</ver", "good\n<verified>Yes</verified> bad", ""]
NUMBERS = ("probability", "probability_lower", "probability_upper", "d", "d_nearest", "q_prime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("chat"), chat=True)


@pytest.fixture(scope="module")
def lm(folder: Path) -> SDMLanguageModel:
    return SDMLanguageModel.from_pretrained(folder)


@pytest.fixture(scope="module")
def chat(chat_folder: Path) -> SDMLanguageModel:
    return SDMLanguageModel.from_pretrained(chat_folder)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


@pytest.fixture(scope="module")
def wild(lm: SDMLanguageModel) -> list[Verification]:
    """Answers of every sort: right, wrong, without a tag, with several, spelled in strange tokens, cut off."""
    found: list[Verification] = lm.generate(PROMPTS, temperature=2.0, max_new_tokens=14, progress=False)
    return found


def same(a: Verification, b: Verification) -> None:
    """The same decision; numbers up to the rounding of different passes."""
    assert (a.text, a.verdict, a.accepted, a.accepted_lower) == (b.text, b.verdict, b.accepted, b.accepted_lower)
    assert (a.q, a.out_of_distribution, a.highest_alpha) == (b.q, b.out_of_distribution, b.highest_alpha)
    assert [e.id for e in a.exemplars] == [e.id for e in b.exemplars]
    for name in NUMBERS:
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-4, abs=1e-5)


def all_same(first: list[Verification], second: list[Verification]) -> None:
    for a, b in zip(first, second, strict=True):
        same(a, b)


# Verdicts


def by_hand(lm: SDMLanguageModel, prompt: str, text: str, alpha: float) -> dict[str, Any]:
    """All that the estimator says of a document, from one forward pass and the formulas of the spec."""
    tokenizer = lm.tokenizer
    ids = [i for part in (prompt, text + "\n", "<verified>") for i in tokenizer(part)["input_ids"]]
    with torch.no_grad():
        states = lm.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].tolist()
    mean = [sum(column) / len(states) for column in zip(*states, strict=True)]
    layer = lm.estimator.layers_[0]
    a = layer.adaptor
    x = (np.array([*states[-1], *mean]) - a.mean.double().numpy()) / a.std.double().numpy()
    exemplar = a.weight.double().numpy() @ x + a.bias.double().numpy()
    z = a.out_weight.double().numpy() @ exemplar + a.out_bias.double().numpy()
    y_hat = int(z[1] > z[0])
    support = {name: t.tolist() for name, t in layer.support.state().items()}
    q, nearest = slow.similarity(support["vectors"], support["labels"], support["predictions"], exemplar, y_hat)
    points = []  # of the calibration half: (label, z', q, d_nearest)
    for vector, z_ca, label in zip(
        layer.calibration_vectors.tolist(), layer.calibration.z.tolist(), layer.calibration.labels.tolist(), strict=True
    ):
        guess = int(z_ca[1] > z_ca[0])
        found = slow.similarity(support["vectors"], support["labels"], support["predictions"], vector, guess)
        points.append((label, z_ca, *found))
    stored = [[d for label, _, n, d in points if label == c and n > 0] for c in (0, 1)]
    ca_p = np.array([slow.sdm(z_ca, n, slow.distance_quantile(d, stored)) for _, z_ca, n, d in points])
    ca_q_prime = [slow.q_prime(n, max(p)) for (_, _, n, _), p in zip(points, ca_p, strict=True)]
    labels = [label for label, *_ in points]
    d = slow.distance_quantile(nearest, stored)
    p = slow.sdm(z, q, d)
    q_prime = slow.q_prime(q, p[y_hat])
    sizes = slow.effective_sample_size(q_prime, ca_q_prime, labels, 2)
    eps = slow.dkw_epsilon(sizes, alpha)
    low, high = (slow.sdm(z, q, min(max(v, 0.0), 1.0)) for v in (d - eps, d + eps))

    def inside(p: list[float], at: float) -> bool:
        q_min, psi = slow.find_region(ca_q_prime, ca_p, labels, at)
        if psi is None:
            return False
        return bool(slow.contains(q_min, psi, [slow.q_prime(q, p[y_hat])], np.array([p]), [y_hat])[0])

    order = sorted(range(len(support["vectors"])), key=lambda i: slow.distances(support["vectors"], exemplar)[i])[:3]
    return {
        "verdict": "Yes" if y_hat else "No",
        "probability": p[y_hat],
        "probability_lower": low[y_hat],
        "probability_upper": high[y_hat],
        "q": q,
        "d": d,
        "d_nearest": nearest,
        "q_prime": q_prime,
        "accepted": inside(p, alpha),
        "accepted_lower": inside(low, alpha),
        "out_of_distribution": q == 0,
        "highest_alpha": max((at for at in ALPHA_GRID if inside(p, at)), default=None),
        "ids": [layer.support_ids[i] for i in order],
    }


def test_verdicts_are_those_of_the_spec(lm: SDMLanguageModel, wild: list[Verification]) -> None:
    # Not a document of the calibration half itself: rounding would decide whether its q' is below its own.
    known = {row["prompt"] for row in calibration_rows()}
    # Nor an answer with control strings, which by_hand would encode as control tokens.
    pairs = [(p, v.text) for p, v in zip(PROMPTS, wild, strict=True) if p not in known and "<s>" not in v.text][:10]
    assert len(pairs) == 10
    pairs += [("abc=", "abd."), ("abc=", "abc."), ("hgf=", "")]
    assert "abc=" not in known
    found = lm.verify(*map(list, zip(*pairs, strict=True)), alpha=0.75)
    for (prompt, text), v in zip(pairs, found, strict=True):
        expected = by_hand(lm, prompt, text, 0.75)
        assert [e.id for e in v.exemplars] == expected.pop("ids")
        for name, value in expected.items():
            got = getattr(v, name)
            assert got == (pytest.approx(value, rel=1e-3, abs=1e-4) if isinstance(value, float) else value), name
    assert {v.verdict for v in found} == {"Yes", "No"}
    assert {v.accepted for v in found} == {True, False}


def test_generation_equals_verification_of_its_text(lm: SDMLanguageModel, wild: list[Verification]) -> None:
    all_same(wild, lm.verify(PROMPTS, [v.text for v in wild], progress=False))
    all_same(wild, lm.verify(PROMPTS, [v.completion for v in wild], progress=False))
    greedy = lm.generate(PROMPTS)
    all_same(greedy, lm.verify(PROMPTS, [v.text for v in greedy]))
    assert sum(v.accepted for v in greedy) > 10
    # The tests would be empty if all were alike.
    assert {v.verdict for v in wild} == {"Yes", "No"}
    assert len({v.accepted for v in wild}) == 2
    assert any("<verified>" not in str(v.generated) for v in wild)
    assert {v.finish_reason for v in wild} == {"stop", "length"}


def test_states_of_the_generation_give_the_summary(lm: SDMLanguageModel) -> None:
    """h comes without a second pass for nearly all, with or without a tag, and it is that of a pass over the document."""
    sampling = lm.sampling(temperature=1.2)
    for prompts, how in ((PROMPTS, lm.sampling()), (PROMPTS, sampling), (PROMPTS, lm.sampling(2))):
        seeds = [[n] for n in range(len(prompts))]
        answers = lm.write(lm.read_prompts(prompts), how, seeds)
        read = [n for n, answer in enumerate(answers) if answer.h is not None]
        assert len(read) >= 0.8 * len(prompts)
        again = lm.summaries([dataclasses.replace(answers[n], h=None) for n in read])
        torch.testing.assert_close(torch.stack([answers[n].h for n in read]), again, rtol=1e-4, atol=1e-5)
    assert all("<verified>" not in str(answer.generated) for answer in answers)  # two tokens leave no room for one


def test_a_calibration_document_lies_on_its_own_side_of_the_threshold(lm: SDMLanguageModel) -> None:
    """Thresholds are outputs of calibration documents; read again, in another batch, these differ in the last digits."""
    layer, rows = lm.estimator.layers_[0], calibration_rows()
    points = layer.calibration
    own = [n for n, label in enumerate(points.labels.tolist()) if label == 1]  # the document is the row's positive
    asked = [rows[layer.calibration_ids[n]] for n in own]
    prompts, texts = [row["prompt"] for row in asked], [row["chosen"] for row in asked]
    on_it = 0
    for alpha in (0.6, 0.7, 0.8, 0.85):
        region = layer.region(alpha)
        inside = region.contains(points.q_prime, points.p, points.predictions)[own].tolist()
        assert [v.accepted for v in lm.verify(prompts, texts, alpha=alpha)] == inside
        assert [lm.verify(p, t, alpha=alpha).accepted for p, t in zip(prompts, texts, strict=True)] == inside
        on_it += sum(float(p) == region.psi[1] for p in points.p[own, 1])
    assert on_it


def test_a_reason_names_the_thresholds_as_they_were_found(lm: SDMLanguageModel) -> None:
    """Not those that give way to rounding."""
    region = lm.estimator.layers_[0].region(0.8)
    accepted = [v.reason for v in lm.generate(PROMPTS, alpha=0.8, progress=False) if v.accepted]
    assert accepted
    for text in accepted:
        assert f"at least {region.q_min:.4g})" in text


def test_a_reason_where_a_class_is_never_accepted(lm: SDMLanguageModel) -> None:
    """As of a calibrated search, whose region is about Yes alone."""
    region = HighReliabilityRegion(0.8, 0.5, (math.inf, 0.8))
    answers = lm.write(lm.read_prompts(PROMPTS), lm.sampling(), [[0]] * len(PROMPTS), progress=False)
    found = lm.score(lm.summaries(answers, progress=False), 0.8)
    judged = dataclasses.replace(
        found, accepted=np.zeros(len(PROMPTS), bool), prediction=np.zeros(len(PROMPTS), np.int64)
    )
    said = [reason(judged, n, region, ["No", "Yes"]) for n in range(len(PROMPTS)) if found.q[n] > 0]
    assert said
    assert not any("inf" in text for text in said)
    assert any('no verdict "No" is accepted' in text for text in said)


def test_after_mixed_precision_documents_are_read_in_mixed_precision(tmp_path: Path) -> None:
    """As those of the SDM layer were: otherwise every h would lie off its place."""
    lm = SDMLanguageModel.from_pretrained(train(tmp_path, bf16=True))
    assert lm.metadata["autocast"] == "bfloat16"
    layer, rows = lm.estimator.layers_[0], calibration_rows()
    asked = [rows[i] for i, y in zip(layer.calibration_ids, layer.calibration.labels.tolist(), strict=True) if y]
    known = layer.calibration_vectors[layer.calibration.labels == 1]

    def read() -> torch.Tensor:
        answers = [read_completion(lm.encoder, lm.encoder.prompt_ids(row["prompt"]), row["chosen"]) for row in asked]
        return lm.summaries(answers, progress=False)

    def moved(h: torch.Tensor) -> float:
        return float((layer.adaptor(h)[0] - known).norm(dim=1).mean())

    mixed = read()
    written = lm.generate([row["prompt"] for row in asked], neighbors=0, progress=False)
    lm.metadata["autocast"] = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(read(), mixed)
    # Not 0: which kernels a CPU takes for bfloat16 depends on the padding, and the SDM layer's batches had other padding.
    assert moved(mixed) < 0.6 * moved(read())
    again = lm.generate([row["prompt"] for row in asked], neighbors=0, progress=False)
    assert [v.d_nearest for v in written] != [v.d_nearest for v in again]


def test_every_document_that_was_not_read_exactly_is_read_again(
    lm: SDMLanguageModel, wild: list[Verification], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdmlm.language_model.summary import GenerationReader

    monkeypatch.setattr(GenerationReader, "rest", lambda self, row, generated: self._document(row, generated) and [])
    all_same(wild, lm.generate(PROMPTS, temperature=2.0, max_new_tokens=14))


def test_the_batch_does_not_matter(lm: SDMLanguageModel, wild: list[Verification]) -> None:
    greedy = lm.generate(PROMPTS[:10])
    for prompt, expected in zip(PROMPTS[:10], greedy, strict=True):
        same(lm.generate(prompt), expected)
    small = SDMLanguageModel(lm.model, lm.tokenizer, lm.encoder, lm.estimator, lm.metadata)
    small.tokens_per_batch = 60
    all_same(small.generate(PROMPTS, temperature=2.0, max_new_tokens=14), wild)
    assert lm.generate([]) == []


def test_another_alpha_changes_nothing_else(lm: SDMLanguageModel) -> None:
    before, digest = lm.generate(PROMPTS[:12]), lm.estimator.digest()
    strict = lm.generate(PROMPTS[:12], alpha=0.99)
    loose = lm.generate(PROMPTS[:12], alpha=0.6)
    assert [v.q for v in strict] == [v.q for v in loose] == [v.q for v in before]
    assert sum(v.accepted for v in strict) < sum(v.accepted for v in loose)
    for v in (*strict, *loose):
        if v.alpha != 0.99:  # which is not on the grid
            assert v.accepted == (v.highest_alpha is not None and v.alpha <= v.highest_alpha)
    assert lm.generate(PROMPTS[:12]) == before
    assert (lm.alpha, lm.estimator.alpha_, lm.estimator.digest()) == (0.8, 0.8, digest)


def test_the_verdict_is_the_estimators_not_the_lms(lm: SDMLanguageModel, wild: list[Verification]) -> None:
    contrary = copy.deepcopy(lm.estimator)
    adaptor = contrary.layers_[0].adaptor
    adaptor.out_bias, adaptor._direct = torch.tensor([100.0, -100.0]), None
    v = SDMLanguageModel(lm.model, lm.tokenizer, lm.encoder, contrary, lm.metadata).generate("abc=")
    assert (v.generated, v.lm_verdict) == ("abc\n<verified>Yes</verified>", True)
    assert (v.verdict, v.completion, v.verified) == ("No", "abc\n<verified>No</verified>", False)
    for v in wild:
        assert v.completion == f"{v.text}\n<verified>{v.verdict}</verified>"
        assert v.verified == (v.accepted and v.verdict == "Yes")
        assert v.probability_of_yes == (v.probability if v.verdict == "Yes" else 1 - v.probability)
    assert any(v.lm_verdict is None for v in wild)


def test_evidence_as_json(lm: SDMLanguageModel) -> None:
    v = lm.generate(PROMPTS[0], neighbors=2)
    plain = json.loads(json.dumps(v.to_dict(), allow_nan=False))
    assert plain["text"] == v.text
    assert plain["verified"] == v.verified
    assert [e["id"] for e in plain["exemplars"]] == [e.id for e in v.exemplars]
    assert plain["exemplars"][0]["text"].endswith("<verified>")
    assert len(v.exemplars) == 2
    assert lm.generate(PROMPTS[0], neighbors=0).exemplars == ()
    odd = dataclasses.replace(v, d_nearest=math.inf, highest_alpha=None)
    assert odd.to_dict()["d_nearest"] is None
    assert v.reason.startswith('Accepted as "Yes"' if v.accepted else "Rejected")


def test_accounting(lm: SDMLanguageModel) -> None:
    v = lm.generate("abc=", max_new_tokens=3)
    assert (v.prompt_tokens, v.completion_tokens, v.finish_reason) == (4, 3, "length")
    v = lm.generate("abc=")
    ids = lm.encoder.continuation(str(v.generated))
    assert (v.finish_reason, v.completion_tokens) == ("stop", len(ids))
    assert v.generated == "abc\n<verified>Yes</verified>"
    given = lm.verify("abc=", "abc")
    assert (given.finish_reason, given.generated, given.lm_verdict) == ("given", None, None)
    assert given.prompt_tokens + given.completion_tokens == len(lm.encoder.encode_for_judging("abc=", "abc"))


# Sampling, stop strings, streaming


def test_sampling_is_seeded(lm: SDMLanguageModel) -> None:
    def texts(**options: Any) -> list[str]:
        return [v.text for v in lm.generate(["abc="] * 8, **options)]

    assert texts(temperature=1.5, seed=3) == texts(temperature=1.5, seed=3)
    assert texts(temperature=1.5, seed=3) != texts(temperature=1.5, seed=4)
    assert len(set(texts(temperature=1.5))) > 1
    assert texts(temperature=1.5, top_p=1e-6) == texts()  # only the likeliest token is left
    for tiny in ({"temperature": 1e-38}, {"temperature": 5e-324}, {"temperature": 1.0, "top_p": 1e-300}):
        assert texts(**tiny) == texts()


def test_top_p_leaves_the_likeliest() -> None:
    from sdmlm.language_model.decoding import _pick

    p = torch.tensor([0.1, 0.5, 0.15, 0.25])
    chances = torch.linspace(0, 0.999, 400)
    picked = _pick(p.log().repeat(400, 1), 1.0, chances, top_p=0.7)
    # A uniform number just below 1 is 1 in float32: still no token without probability.
    assert _pick(p.log()[None], 1.0, torch.ones(1), top_p=0.7).item() in set(picked.tolist())
    share = torch.bincount(picked, minlength=4) / 400
    assert share.tolist() == pytest.approx([0, 0.5 / 0.75, 0, 0.25 / 0.75], abs=0.01)


def test_stop_strings_end_an_answer_and_are_no_part_of_it(lm: SDMLanguageModel) -> None:
    plain = lm.generate("abc=").text
    v = lm.generate("abc=", stop="c")
    assert v.text == plain[: plain.index("c")]
    assert (v.finish_reason, v.generated) == ("stop", "abc")
    same(v, lm.verify("abc=", v.text))
    assert lm.generate("abc=", stop=["xyz", "bc"]).text == "a"
    assert lm.generate("abc=", stop="<verified>").text == plain
    inside = lm.generate("abc=", stop="fied")  # a tag that is cut off is no part of an answer
    assert inside.text == plain
    assert (inside.verdict, inside.q) == (lm.generate("abc=").verdict, lm.generate("abc=").q)
    for wrong in ("", ["a", ""], [3]):
        with pytest.raises(ValueError, match="stop must be"):
            lm.generate("abc=", stop=wrong)


def test_pieces_are_the_text(lm: SDMLanguageModel, wild: list[Verification]) -> None:
    pieces: list[list[str]] = [[] for _ in PROMPTS]
    found = lm.generate(
        PROMPTS, temperature=2.0, max_new_tokens=14, on_text=lambda n, piece: pieces[n].append(piece) or None
    )
    assert ["".join(p) for p in pieces] == [v.text for v in found] == [v.text for v in wild]
    assert max(map(len, pieces)) > 3
    short = lm.generate(PROMPTS[:4], on_text=lambda n, piece: n != 2)
    assert short[2].text == lm.generate(PROMPTS[2]).text[:1]
    assert short[1].text == lm.generate(PROMPTS[1]).text


@pytest.mark.parametrize("text", SUFFIXED)
def test_only_a_suffix_is_taken_off(lm: SDMLanguageModel, text: str) -> None:
    v, expected = lm.verify("abc=", text), VerificationTags().bare(text)
    assert v.text == expected
    same(v, lm.verify("abc=", expected))


# Conversations


def test_conversations(chat: SDMLanguageModel) -> None:
    turn = [{"role": "user", "content": "abc="}]
    one = chat.generate(turn)
    assert isinstance(one, Verification)
    same(one, chat.generate("abc="))
    assert one.text == "abc"
    both = chat.generate([turn, [*turn, {"role": "assistant", "content": "abc"}, {"role": "user", "content": "bcd="}]])
    same(both[0], one)
    assert both[1].prompt_tokens > both[0].prompt_tokens
    same(chat.verify([turn], [[{"role": "assistant", "content": "abc"}]])[0], one)
    same(chat.verify(turn, [{"role": "assistant", "content": "abc"}]), one)


# Feedback


def test_feedback_is_kept_and_can_be_undone_after_a_reload(copied: Path) -> None:
    lm = SDMLanguageModel.from_pretrained(copied)
    before = lm.verify(PROMPTS, ["zz"] * len(PROMPTS))
    wanted = lm.verify("abc=", "abc")
    base = lm.estimator
    first = lm.feedback("abc=", "abc", False)
    assert len(base.layers_[0].support) == 48  # whoever holds the old one is not disturbed
    after = lm.verify("abc=", "abc")
    assert (after.d_nearest, after.exemplars[0].id) == (pytest.approx(0, abs=1e-3), first)
    assert after.exemplars[0].label == 0
    assert after.exemplars[0].text == "abc=abc\n<verified>"
    assert (after.q, after.out_of_distribution) == (0, True)  # the nearest is not one that is rightly predicted
    second = lm.feedback("abd=", [{"role": "assistant", "content": "abd\n<verified>No</verified>"}], "yes")
    assert lm.feedback_ids == [first, second]

    again = SDMLanguageModel.from_pretrained(copied)
    assert again.feedback_ids == [first, second]
    assert again.digest() == lm.digest()
    same(again.verify("abc=", "abc"), lm.verify("abc=", "abc"))
    assert again.undo_feedback(first) == first
    with pytest.raises(ValueError, match="no feedback 'feedback:1'"):
        again.undo_feedback(first)
    third = again.feedback("abe=", "abe", "No", save=False)
    assert third not in (first, second)  # an id is never used twice
    assert SDMLanguageModel.from_pretrained(copied).feedback_ids == [second]
    assert again.undo_feedback() == third
    assert again.undo_feedback() == second
    same(again.verify("abc=", "abc"), wanted)
    last = SDMLanguageModel.from_pretrained(copied)
    assert last.feedback_ids == []
    all_same(last.verify(PROMPTS, ["zz"] * len(PROMPTS)), before)
    assert last.estimator.digest() == base.digest()
    with pytest.raises(ValueError, match="no feedback to undo"):
        last.undo_feedback()


def test_two_processes_give_feedback_and_none_is_lost(copied: Path) -> None:
    one, two = SDMLanguageModel.from_pretrained(copied), SDMLanguageModel.from_pretrained(copied)
    assert one.feedback("abc=", "abc", True) == "feedback:1"
    assert two.feedback("abd=", "abd", True) == "feedback:2"  # with that of the other
    assert two.feedback_ids == ["feedback:1", "feedback:2"]
    assert one.undo_feedback("feedback:2") == "feedback:2"
    again = SDMLanguageModel.from_pretrained(copied)
    assert again.feedback_ids == one.feedback_ids == ["feedback:1"]
    assert again.digest() == one.digest()
    two.feedback("abe=", "abe", True, save=False)
    with pytest.raises(ValueError, match="changed by another process"):
        two.feedback("abf=", "abf", True)
    assert SDMLanguageModel.from_pretrained(copied).feedback_ids == ["feedback:1"]


def test_feedback_at_the_same_moment_is_not_lost(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock both would read the same log, and the second would write over the first."""
    models = [SDMLanguageModel.from_pretrained(copied) for _ in range(2)]
    both, load = threading.Barrier(2), feedback_module.load_feedback

    def slowly(*args: Any) -> Any:
        found = load(*args)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return found

    monkeypatch.setattr(feedback_module, "load_feedback", slowly)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: models[n].feedback(f"ab{'cd'[n]}=", "abc", True), range(2)))
    monkeypatch.undo()
    assert SDMLanguageModel.from_pretrained(copied).feedback_ids == ["feedback:1", "feedback:2"]


def test_saving_where_others_save_too_loses_nothing_of_theirs(copied: Path) -> None:
    one, two = SDMLanguageModel.from_pretrained(copied), SDMLanguageModel.from_pretrained(copied)
    one.feedback("abc=", "abc", True)
    policy = SearchPolicy(budget=1)
    calibrate_search(one, calibration_rows(), policy, progress=False)
    two.save_pretrained(copied)
    again = SDMLanguageModel.from_pretrained(copied)
    assert again.feedback_ids == two.feedback_ids == ["feedback:1"]
    assert again.digest() == two.digest() == one.digest()
    assert [c.policy for c in again.search_calibrations] == [c.policy for c in two.search_calibrations] == [policy]
    again.save_pretrained(copied)
    assert len(SDMLanguageModel.from_pretrained(copied).search_calibrations) == 1
    one.feedback("abd=", "abd", True)
    two.feedback("abe=", "abe", True, save=False)
    with pytest.raises(ValueError, match="changed by another process"):
        two.save_pretrained(copied)


def test_a_card_says_what_the_model_did_on_test_sets(copied: Path, tmp_path: Path) -> None:
    y = np.array([1, 1, 0, 1, 0])
    says = np.array([1, 0, 0, 1, 1])
    accepted = np.array([True, True, True, False, True])
    blank = {f.name: np.zeros(5) for f in dataclasses.fields(Evaluation)}
    columns = {"y": y, "prediction": says, "accepted": accepted, "generated": [""] * 5}
    done = Evaluation(**{**blank, **columns, "alpha": 0.8, "calibration": {}, "regions": []})
    layer = layer_sha256(copied / "sdm")
    write_evaluation(evaluation_file(copied, "mine"), done, {"sdm_sha256": layer})
    write_evaluation(evaluation_file(copied, "older"), done, {"sdm_sha256": "another"})
    lm = SDMLanguageModel.from_pretrained(copied)
    lm.save_pretrained(tmp_path / "new")
    lines = (tmp_path / "new" / "README.md").read_text().split("\n")
    assert "| mine | 5 | 60.0% | 0.8 | 80.0% | 50.0% | 40.0% | 50.0% |" in lines
    assert not any("| older" in line for line in lines)
    evaluation_file(copied, "mine").write_text("{")  # a card can do without
    SDMLanguageModel.from_pretrained(copied).save_pretrained(tmp_path / "other")
    assert "## On test sets" not in (tmp_path / "other" / "README.md").read_text()


def test_a_card_that_is_not_ours_stays(copied: Path) -> None:
    lm = SDMLanguageModel.from_pretrained(copied)
    (copied / "README.md").write_text("My own words.")
    lm.save_pretrained(copied)
    assert (copied / "README.md").read_text() == "My own words."
    (copied / "README.md").unlink()
    lm.save_pretrained(copied)
    lm.feedback("abc=", "abc", True)
    lm.save_pretrained(copied)
    assert "1 of them are feedback" in (copied / "README.md").read_text()


def test_feedback_that_cannot_be_kept_changes_nothing(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = SDMLanguageModel.from_pretrained(copied)
    digest = lm.digest()

    def full(*args: Any) -> None:
        raise ValueError("Could not save: No space left on device.")

    monkeypatch.setattr("sdmlm.generation.feedback.write_artifact", full)
    with pytest.raises(ValueError, match="No space"):
        lm.feedback("abc=", "abc", True)
    assert (lm.feedback_ids, lm.digest()) == ([], digest)
    for label in ("maybe", 1, None):
        with pytest.raises(ValueError, match="label is"):
            lm.feedback("abc=", "abc", label)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="The prompt is empty"):
        lm.feedback(" ", "abc", True)
    alone = SDMLanguageModel(lm.model, lm.tokenizer, lm.encoder, lm.estimator, lm.metadata)
    with pytest.raises(ValueError, match="no folder of its own"):
        alone.feedback("abc=", "abc", True)
    assert alone.feedback("abc=", "abc", True, save=False) == "feedback:1"


# On disk


def test_saved_and_opened_again(copied: Path, tmp_path: Path) -> None:
    lm = SDMLanguageModel.from_pretrained(copied)
    lm.feedback("abc=", "abc", False)
    data = {"train": {"source": "x.jsonl", "rows": 7, "sha256": "ab"}}
    record = {"status": "finished", "settings": {}, "data": data, "config": {}, "log_history": []}
    (copied / "training.json").write_text(json.dumps(record))
    lm.save_pretrained(tmp_path / "new")
    again = SDMLanguageModel.from_pretrained(tmp_path / "new")
    all_same(again.generate(PROMPTS), lm.generate(PROMPTS))
    assert again.feedback_ids == ["feedback:1"]
    assert again.undo_feedback() == "feedback:1"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.hidden_size == 32
    assert not [p for p in (tmp_path / "new").rglob("*") if p.suffix in (".bin", ".pt", ".pkl")]

    card = (tmp_path / "new" / "README.md").read_text()
    layer, region = lm.estimator.layers_[0], lm.estimator.region_
    assert f"alpha 0.8, q'min {region.q_min:.4g}; {len(layer.support)} support documents, 48 calibration" in card
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in card.split("\n") if line.startswith("|")]
    points = layer.calibration
    triples = list(zip(points.labels.tolist(), points.predictions.tolist(), range(48), strict=True))
    inside = {a: layer.region(a).contains(points.q_prime, points.p, points.predictions).tolist() for a in (0.6, 0.8)}

    def share(hits: list[bool]) -> str:
        return f"{sum(hits) / len(hits):.1%}" if hits else "-"

    for c, name in enumerate(("No", "Yes")):
        own = [(y == c_hat, inside[0.8][n]) for y, c_hat, n in triples if y == c]
        (row,) = (r for r in rows if r[0] == name)
        assert row[1] == str(len(own))
        assert row[3] == share([right for right, _ in own])
        assert row[5:] == [share([a for _, a in own]), share([right for right, a in own if a])]
    admitted = [y == c_hat for y, c_hat, n in triples if inside[0.8][n]]
    assert next(r for r in rows if r[0] == "0.8")[-2:] == [f"{len(admitted) / 48:.1%}", share(admitted)]
    assert not all(y == c_hat for y, c_hat, _ in triples)
    assert all(f"{psi:.4g}" in card for psi in region.psi)
    assert 'from_pretrained("new")' in card
    assert "1 of them are feedback" in card
    assert "train rows: 7 of x.jsonl (SHA-256 ab)" in card
    assert "- learning_rate: 0.01" in card

    # Into its own folder: the weights stay as they are.
    weights = (tmp_path / "new" / "model.safetensors").stat()
    again.save_pretrained(tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").stat().st_mtime_ns == weights.st_mtime_ns
    same(SDMLanguageModel.from_pretrained(tmp_path / "new").generate("abc="), again.generate("abc="))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        lm.save_pretrained(tmp_path / "file")


def test_other_weights_are_refused(copied: Path) -> None:
    tiny_lm(1, max_position_embeddings=96).save_pretrained(copied)
    with pytest.raises(ValueError, match="fitted over other weights"):
        SDMLanguageModel.from_pretrained(copied)
    lm = SDMLanguageModel.from_pretrained(copied, allow_other_weights=True)
    assert isinstance(lm.generate("abc="), Verification)
    tiny_lm(1, hidden_size=16).save_pretrained(copied)
    with pytest.raises(ValueError, match="64 wide but this model gives 32"):
        SDMLanguageModel.from_pretrained(copied, allow_other_weights=True)


def test_in_another_type_it_is_still_the_same_model(folder: Path) -> None:
    lm = SDMLanguageModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert lm.model.dtype == torch.bfloat16
    v = lm.generate("abc=")
    assert v.verdict in ("Yes", "No")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda sdm: shutil.rmtree(sdm), "has no sdm/ folder"),
        (lambda sdm: (sdm / "lm.json").unlink(), "no whole SDM layer"),
        (lambda sdm: (sdm / "lm.json").write_text("{"), "no whole SDM layer"),
        (lambda sdm: (sdm / "config.json").write_text("{}"), "another SDM layer"),
        (lambda sdm: next(sdm.glob("tensors-*")).write_bytes(b"x"), "checksum differs"),
        (lambda sdm: next(sdm.glob("texts-*")).unlink(), "is missing"),
        (lambda sdm: change(sdm, tags={"open": ""}), "lm.json is damaged"),
        (lambda sdm: change(sdm, autocast="int4"), "lm.json is damaged"),
        (lambda sdm: change(sdm, dtype="int4"), "lm.json is damaged"),
        (lambda sdm: change(sdm, format_version=9), "newer sdmlm"),
        (lambda sdm: change(sdm, training=...), r"lm.json is damaged \(training is missing"),
        (lambda sdm: edited(sdm / "lm.json", '"Yes"', '"Yds"'), r"lm.json is damaged \(its checksum differs"),
        (lambda sdm: (sdm / "lm.json").write_text("[]"), "lm.json is damaged"),
        (
            lambda sdm: edited(sdm.parent / "config.json", '"hidden_size": ', '"hidden_size": "x", "was": '),
            "could not be loaded: Validation error for field 'hidden_size'",
        ),
        (lambda sdm: (sdm / "search.json").write_text("[]"), "search.json is damaged"),
        (lambda sdm: (sdm.parent / "model.safetensors").write_bytes(b"x"), "model of .* could not be loaded"),
        (lambda sdm: (sdm.parent / "tokenizer.json").write_text("x"), "tokenizer of .* could not be loaded"),
    ],
)
def test_a_damaged_folder_is_refused(copied: Path, damage: Any, message: str) -> None:
    damage(copied / "sdm")
    with pytest.raises(ValueError, match=message) as error:
        SDMLanguageModel.from_pretrained(copied)
    assert "\n" not in str(error.value)


def change(sdm: Path, **facts: Any) -> None:
    path = sdm / "lm.json"
    known = {**read_metadata(path), **facts}
    write_metadata(path, {name: value for name, value in known.items() if value is not ...})


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_feedback_of_other_weights_or_damaged_is_refused(copied: Path) -> None:
    SDMLanguageModel.from_pretrained(copied).feedback("abc=", "abc", True)
    path = copied / "sdm" / "feedback" / "config.json"
    good = path.read_text()
    path.write_text(json.dumps({**json.loads(good), "fingerprint": "0"}))
    with pytest.raises(ValueError, match="given over other weights"):
        SDMLanguageModel.from_pretrained(copied)
    path.write_text(json.dumps({k: v for k, v in json.loads(good).items() if k != "next"}))
    with pytest.raises(ValueError, match="is damaged"):
        SDMLanguageModel.from_pretrained(copied)


def test_an_adapter_folder(tmp_path: Path) -> None:
    from peft import LoraConfig

    tiny_lm(max_position_embeddings=96).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    folder = train(tmp_path, peft_config=lora, model=base, num_train_epochs=1)
    assert (folder / "adapter_config.json").exists()
    lm = SDMLanguageModel.from_pretrained(folder)
    found = lm.generate(PROMPTS[:5])
    all_same(found, lm.verify(PROMPTS[:5], [v.text for v in found]))
    lm.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "again" / "model.safetensors").exists()
    all_same(SDMLanguageModel.from_pretrained(tmp_path / "again").generate(PROMPTS[:5]), found)


def test_an_adapter_is_opened_in_the_type_it_was_trained_in(tmp_path: Path) -> None:
    """Not in that of its base on disk: h would be rounded where the layer's was not."""
    from peft import LoraConfig

    path = tmp_path / "base"
    tiny_lm(max_position_embeddings=96).bfloat16().save_pretrained(path)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    folder = train(tmp_path, peft_config=lora, model=str(path), num_train_epochs=1)
    lm = SDMLanguageModel.from_pretrained(folder)
    assert {p.dtype for p in lm.model.parameters()} == {torch.float32}
    change(folder / "sdm", dtype=...)  # as written by sdmlm before this fact
    assert SDMLanguageModel.from_pretrained(folder).model.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["dora", "vera"])
def test_adapters_that_transformers_does_not_open_whole(tmp_path: Path, kind: str) -> None:
    """It leaves out the magnitudes of DoRA, and does not know VeRA; here the weights are those that were trained."""
    from peft import LoraConfig, VeraConfig

    tiny_lm(max_position_embeddings=96).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    config = LoraConfig(**plain, use_dora=True, lora_dropout=0.0) if kind == "dora" else VeraConfig(**plain)
    folder = train(tmp_path, peft_config=config, model=base, num_train_epochs=1, learning_rate=3e-2)
    lm = SDMLanguageModel.from_pretrained(folder)  # which compares the fingerprint of the weights
    trained = {name: p for name, p in base.named_parameters() if kind in name or "magnitude" in name}
    opened = dict(inner_lm(lm.model).named_parameters())
    assert trained
    assert all(torch.equal(p, opened[name]) for name, p in trained.items())
    assert lm.generate(PROMPTS[0]).text


def test_the_hub(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Api:
        def __init__(self, token: Any = None) -> None:
            asked.append(token)

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            class Repo(str):
                repo_id = "me/model"

            asked.append((repo_id, options))
            return Repo("https://hub/me/model")

        def upload_folder(self, repo_id: str, folder_path: str, **options: Any) -> None:
            shutil.copytree(folder_path, tmp_path / repo_id)

    def download(name: str, **options: Any) -> str:
        asked.append(options["revision"])
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(copied)
    lm = SDMLanguageModel.from_pretrained(copied)
    assert lm.push_to_hub("me/model", private=True, token="t") == "https://hub/me/model"
    assert asked[:2] == ["t", ("me/model", {"private": True, "exist_ok": True})]
    assert 'from_pretrained("me/model")' in (tmp_path / "me/model/README.md").read_text()
    assert lm.folder == copied
    theirs = SDMLanguageModel.from_pretrained("me/model", revision="v1")
    assert asked[-1] == "v1"
    all_same(theirs.generate(PROMPTS[:5]), lm.generate(PROMPTS[:5]))
    with pytest.raises(ValueError, match="no folder of its own"):  # a cache is not the user's
        theirs.feedback("abc=", "abc", True)
    with pytest.raises(ValueError, match="revision goes only with a model of the Hub"):
        SDMLanguageModel.from_pretrained(copied, revision="v1")


def test_what_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nowhere", "./no/where", "/no/where"):
        with pytest.raises(ValueError, match="is no folder here: name"):
            SDMLanguageModel.from_pretrained(name)

    def offline(name: str, **options: Any) -> str:
        raise OSError("Connection refused.\nlong story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"the Hub did not give it: Connection refused\.$"):
        SDMLanguageModel.from_pretrained("org/name")


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

    monkeypatch.setattr(type(lm.encoder), "encode_for_judging", too_long)
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
