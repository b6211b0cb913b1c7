"""Documents in which a refused answer is followed by the right one: ids and mask, which rows get one, training with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tag_tokenizers import byte_level, sentencepiece
from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer

from sdmlm import SDMConfig, SDMTrainer
from sdmlm.finetuning.negatives import Attempt, HardNegatives, NegativePolicy
from sdmlm.finetuning.training_rows import encode_document, encode_rows
from sdmlm.language_model.encoding import IGNORED, Encoder
from sdmlm.rewards import exact_match

# A template that puts a space before an answer, and so before the refused one only
CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|stop|>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def chat() -> Encoder:
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT
    return Encoder(tokenizer)


ENCODERS = {
    "byte-level": Encoder(byte_level()),
    "byte-level, hungry": Encoder(byte_level(hungry=True)),
    "sentencepiece": Encoder(sentencepiece()),
    "sentencepiece, hungry": Encoder(sentencepiece(hungry=True)),
    "chat": chat(),
}
ANSWERS = [("a fox", "the dog"), ("", "fox"), ("fox", "<verified>No</verified>\nfox"), ("a\n", " dog.")]


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(("wrong", "right"), ANSWERS)
def test_text_mask_and_position_are_exact(name: str, wrong: str, right: str) -> None:
    encoder = ENCODERS[name]
    document, negative = encoder.encode_revision("abc=", wrong, right), encoder.encode("abc=", wrong, False)
    assert document is not None
    end = encoder.decode(encoder.closing_ids)
    prompt = encoder.prompt_ids("abc=")
    written = encoder.decode(document.input_ids[len(prompt) :])
    lead = " " * (name == "chat")
    assert written == f"{lead}{wrong}\n<verified>No</verified>\n{right}\n<verified>Yes</verified>{end}"
    # The loss counts the first verdict and all that follows; the first tag is the one that the SDM layer reads.
    first = len(negative.input_ids) - sum(label != IGNORED for label in negative.labels)
    assert document.labels == [IGNORED] * first + document.input_ids[first:]
    assert encoder.decode(document.input_ids[first:]).startswith("<verified>No</verified>")
    assert document.verified_at == negative.verified_at
    kept = document.verified_at + 1
    assert document.input_ids[:kept] == encoder.encode_for_judging("abc=", wrong)
    # What follows the refused answer is the positive document itself, but for the template's space.
    positive = encoder.encode("abc=", right, True).input_ids[len(prompt) :]
    if not lead:
        assert document.input_ids[-len(positive) :] == positive


@pytest.mark.parametrize("name", ENCODERS)
def test_a_search_that_goes_on_begins_with_the_same_ids(name: str) -> None:
    encoder = ENCODERS[name]
    for wrong, right in ANSWERS:
        document = encoder.encode_revision("abc=", wrong, right)
        assert document is not None
        start = [*encoder.prompt_ids("abc="), *encoder.refused([wrong])]
        assert document.input_ids[: len(start)] == start
        assert encoder.decode(document.input_ids[len(start) :]).startswith(right + "\n<verified>Yes")
    assert encoder.refused([]) == []
    twice = encoder.refused(["fox", "dog"])
    assert (
        encoder.decode(twice).removeprefix(" " * (name == "chat"))
        == "fox\n<verified>No</verified>\ndog\n<verified>No</verified>\n"
    )
    assert twice[: len(encoder.refused(["fox"]))] == encoder.refused(["fox"])


def test_a_document_that_is_too_long_has_no_correction() -> None:
    rows = copy_rows(4, 0)
    whole = Encoder(tiny_tokenizer()).encode_revision(rows[0]["prompt"], rows[0]["rejected"], rows[0]["chosen"])
    assert whole is not None
    fitting, short = (Encoder(tiny_tokenizer(), max_length=len(whole.input_ids) - n) for n in (0, 1))
    assert fitting.encode_revision(rows[0]["prompt"], rows[0]["rejected"], rows[0]["chosen"]) == whole
    assert short.encode_revision(rows[0]["prompt"], rows[0]["rejected"], rows[0]["chosen"]) is None
    policy = NegativePolicy(0.0, 0.0, 0.0, gamma_revise=1.0)
    document = HardNegatives(policy, exact_match, 9).documents(rows, [0], epoch=2)[0]
    row = encode_rows(rows, short, "the rows")[0]
    assert encode_document(short, row, document) == row.negative
    assert encode_document(fitting, row, document) == whole


def test_some_negatives_are_corrected_from_the_second_epoch_on() -> None:
    rows = copy_rows(400, 0)
    plain = HardNegatives(NegativePolicy(0.5, 0.5, 1.0, seed=3), exact_match, max_new_tokens=9)
    some = HardNegatives(NegativePolicy(0.5, 0.5, 1.0, seed=3, gamma_revise=0.25), exact_match, max_new_tokens=9)
    assert all(d.correction is None for d in some.documents(rows, range(400), 1))
    for store in (plain, some):
        store.attempts = {(2, i): Attempt(2, 1, i, f"own {i}") for i in range(400)}
    before, after = (store.documents(rows, range(400), 2) for store in (plain, some))
    assert all(d.correction is None for d in before)
    assert [(d.completion, d.source) for d in before] == [(d.completion, d.source) for d in after]
    corrected = [d for d in after if d.correction is not None]
    assert {d.source for d in corrected} == {"static", "generated"}
    assert all(d.correction == rows[d.row]["chosen"] for d in corrected)
    negatives = sum(not d.positive for d in after)
    assert abs(len(corrected) / negatives - 0.25) < 4 * (0.25 * 0.75 / negatives) ** 0.5
    assert after == some.documents(rows, range(400), 2)
    by_epoch = [[i for i in range(400) if some.policy.revise(i, epoch)] for epoch in (1, 2, 3)]
    assert by_epoch[0] == []
    assert by_epoch[1] == [d.row for d in corrected]
    assert by_epoch[2] not in (by_epoch[1], [])


def test_an_answer_to_another_prompt_is_not_corrected() -> None:
    rows, encoder = copy_rows(60, 0), Encoder(tiny_tokenizer(), max_length=64)
    policy = NegativePolicy(0.5, 0.0, 0.0, gamma_other=0.5, gamma_revise=1.0)
    documents = HardNegatives(policy, exact_match, max_new_tokens=9).documents(rows, range(60), 2, encoder)
    assert {d.correction is None for d in documents if d.source == "other"} == {True}
    assert {d.correction is None for d in documents if d.source == "static"} == {False}


def test_what_is_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match="gamma_revise is 2"):
        SDMConfig("runs/x", gamma_revise=2, report_to="none")


def trainer(folder: Path, **changes: Any) -> SDMTrainer:
    config = tiny_config(folder, gamma_revise=0.5, hard_negatives=False, **changes)
    return SDMTrainer(tiny_lm(), config, copy_rows(64, 0), copy_rows(48, 1), tiny_tokenizer())


def test_the_sdm_layer_and_the_base_are_those_of_the_negative(tmp_path: Path) -> None:
    """A corrected document is, for the SDM layer, the negative that it begins with."""
    made, plain = trainer(tmp_path / "a"), trainer(tmp_path / "b")
    plain.negatives.policy = NegativePolicy(0.5, 0.0, 0.0, plain.args.seed)
    for each in (made, plain):
        each.begin_epoch(1)
    longer = [
        len(a.input_ids) > len(b.input_ids)
        for a, b in zip(made._encoded_documents, plain._encoded_documents, strict=True)
    ]
    assert 5 < sum(longer) < 32
    assert not any(d.positive for d, more in zip(made._documents, longer, strict=True) if more)
    assert made.training_layer is not None
    assert plain.training_layer is not None
    h = [each._read(each._encoded_documents)[0] for each in (made, plain)]
    torch.testing.assert_close(h[0], h[1], rtol=0, atol=1e-5)


def test_training_resumes_with_the_same_documents(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", num_train_epochs=3)
    whole.train()
    part = trainer(tmp_path / "part", num_train_epochs=3)
    part.train()
    again = trainer(tmp_path / "part", num_train_epochs=3)
    checkpoints = sorted((tmp_path / "part").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    again.train(resume_from_checkpoint=str(checkpoints[0]))
    assert any(d.correction is not None for d in again._documents)
    assert again._documents == whole._documents
    for name, tensor in whole.model.state_dict().items():
        assert np.array_equal(tensor.numpy(), again.model.state_dict()[name].numpy()), name
