"""SDMLanguageModel: verdicts against the method done slowly, and every way to the same verdict."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference as slow
import torch
from sdm_lm_checks import PROMPTS, SUFFIXED, all_same, same
from tiny_sdm_lm import calibration_rows, train

from sdmlm import SDMLanguageModel, Verification
from sdmlm.estimator.explain import reason
from sdmlm.estimator.layer import ALPHA_GRID
from sdmlm.estimator.region import HighReliabilityRegion
from sdmlm.generation.prompts import read_completion
from sdmlm.language_model.encoding import VerificationTags

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
