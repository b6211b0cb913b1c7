"""The base LM of the demo: its data, its tokenizer, its training, and the model that is shipped."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdmlm.demo import base_documents, base_model
from sdmlm.demo.base_documents import MIX, WORDS, document
from sdmlm.demo.base_model import FOLDER, LOG, Settings, batch_of, learning_rate, source_sha256, train
from sdmlm.demo.sentences import sentences
from sdmlm.language_model.encoding import Encoder
from sdmlm.tasks.word_ordering import make_splits

TINY = Settings(
    steps=6, first_steps=3, first_length=32, batch=2, length=64, warmup=2, width=16, layers=1, heads=2, inner=32
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return base_model.train_tokenizer(TINY)


def bodies(d: base_documents.BaseDocument) -> tuple[list[str], list[str]]:
    """(words between quotation marks in the prompt, words of the answer without tags)."""
    parts = (d.prompt or "").replace("'s ", "\0 ").replace("'s.", "\0.").replace("'s,", "\0,").replace("'s'", "\0'")
    given = " ".join(parts.split("'")[1::2]).replace("\0", "'s").split()
    return given, d.answer.replace("<sentence>", "").replace("</sentence>", "").split()


def test_no_instruction_reorders_words() -> None:
    """Whatever is given comes back in its order: an answer repeats it, goes on where it stops, or says Yes or No."""
    rng = random.Random(0)
    for make in MIX:
        for _ in range(300):
            d = make(rng)
            quoted, answered = bodies(d)
            if make is base_documents.plain:
                assert d.prompt is None
            elif make is base_documents.judge_sentence:
                assert answered in (["Yes"], ["No"])
                assert d.count_prompt == (answered == ["Yes"])
            elif make is base_documents.continue_sentence:
                assert quoted
                assert answered
            elif make is base_documents.mark_wrong:
                assert quoted == []
                assert d.wrong <= set(range(len(answered)))
            elif make is base_documents.leave_out:
                *words, gone = quoted
                assert words.count(gone) == 1
                assert answered == [word for word in words if word != gone]
            elif make is base_documents.say_missing:
                text = (d.prompt or "").replace("'s ", "\0 ").replace("'s'", "\0'")
                words, said = (part.replace("\0", "'s").split() for part in text.split("'")[1::2])
                assert 0 < len(answered) < len(words)
                assert answered == [word for word in words if word not in said]
            elif make is base_documents.choose_word:
                assert quoted[:-3] == answered[:-1]
                assert answered[-1] in quoted[-3:]
            else:
                assert len(answered) % len(quoted) == 0
                assert answered == quoted * (len(answered) // len(quoted))
            assert "order" not in (d.prompt or "")
            assert "verified" not in f"{d.prompt}{d.answer}"


@given(st.integers(0, 2**32))
def test_spoilt_words_never_just_change_places(seed: int) -> None:
    rng = random.Random(seed)
    words = (
        base_documents.sentence(rng).split()
        if rng.random() < 0.5
        else base_documents.random_words(rng, rng.randint(1, 9))
    )
    before = list(words)
    bad, at = base_documents.spoilt(words, rng)
    assert words == before
    replaced = len(bad) == len(words)
    assert replaced or len(bad) == len(words) + 1
    assert bad[:at] + bad[at + 1 :] == (words[:at] + words[at + 1 :] if replaced else words)  # the rest as it was
    assert Counter(word.rstrip(".,") for word in bad) != Counter(word.rstrip(".,") for word in words)
    assert bad[-1].endswith(".") >= words[-1].endswith(".")


def test_every_wrong_word_is_marked_and_only_the_marks_are_learnt() -> None:
    d = base_documents.BaseDocument("The dog slept cup there.", "Mark the wrong words.", wrong=frozenset({0, 3}))
    (_, counts), *rest = base_model.pieces(d)
    assert "".join(text for text, _ in rest) == "The* dog slept cup* there.<|end|>"
    assert [text for text, weight in rest if not weight and text] == ["The", " cup"]
    assert {weight for text, weight in rest if "*" in text or "dog" in text} == {1.0}
    assert counts
    rng = random.Random(3)
    marked = [base_documents.mark_wrong(rng) for _ in range(400)]
    assert {len(d.wrong) for d in marked} == {0, 1, 2}


def test_a_wrong_answer_is_called_wrong_and_not_learnt() -> None:
    rng = random.Random(0)
    rights = dropped = 0
    for _ in range(200):
        d = base_documents.complete_sentence(rng)
        asked = base_documents.checked(d, rng)
        (_, _), (answer, counts), (question, question_counts), (verdict, verdict_counts) = base_model.pieces(asked)
        same = asked.answer == d.answer
        assert (asked.right, counts, verdict) == (same, same, "Yes<|end|>" if same else "No<|end|>")
        assert answer.startswith("<sentence>")
        assert answer.endswith("</sentence><|end|>")
        assert "right?" in question
        assert (question_counts, verdict_counts) == (0.0, base_model.VERDICT)
        rights += same
        dropped += len(asked.answer.split()) < len(d.answer.split())
    assert 70 < rights < 130
    assert 20 < dropped < 60


def test_the_mix_is_as_stated() -> None:
    rng = random.Random(0)
    n = 3000
    plain = sum(document(rng).prompt is None for _ in range(n)) / n
    assert plain == pytest.approx(MIX[base_documents.plain] / sum(MIX.values()), abs=0.05)


def test_training_sentences_are_not_those_of_the_demo() -> None:
    seen = {base_documents.plain(base_model._rng(Settings(), step)).answer for step in range(2000)}
    assert len(seen & set(sentences(2000, seed=0))) < 100  # short ones may coincide


def test_tokenizer_spells_everything_and_words_in_one_token(tokenizer: Any) -> None:
    for text in ("The dog slept.", "<sentence>An  odd\n\ntext — with ünïcode 123's 'quotes'</sentence>", "\n", "a < b"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    lengths = Counter(len(tokenizer(f" {word}")["input_ids"]) for word in WORDS)
    assert lengths == {1: len(WORDS)}


def test_chat_template_has_atomic_marks(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == "<|user|>Hi<|end|><|assistant|>Yo<|end|>"
    assert tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True) == text[:-9]
    for mark in ("<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"):
        assert len(tokenizer(mark)["input_ids"]) == 1
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token == "<|pad|>"
    encoder = Encoder(tokenizer)
    assert encoder.closing_ids == [tokenizer.eos_token_id]
    assert len(encoder.open_ids) == 1


def test_a_batch_counts_answers_and_prompts_that_can_be_foreseen(tokenizer: Any) -> None:
    ids, weights = batch_of(tokenizer, replace(TINY, batch=8, length=128), 7)
    assert ids.shape == weights.shape == (8, 128)
    counted = weights > 0
    assert set(weights.unique().tolist()) == {0.0, 1.0, base_model.VERDICT}
    assert 0.5 < counted.float().mean() < 0.95
    again = batch_of(tokenizer, replace(TINY, batch=8, length=128), 7)
    assert torch.equal(ids, again[0])
    assert not torch.equal(ids, batch_of(tokenizer, replace(TINY, batch=8, length=128), 8)[0])
    assert "Repeat the words" in tokenizer.decode(ids[~counted])


def test_learning_rate_warms_up_and_falls() -> None:
    settings = Settings(steps=100, warmup=10, learning_rate=1.0)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.05 + 0.95 / 2)
    assert 0.05 < rates[-1] < 0.06


def weights(folder: Path) -> dict[str, Any]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


def test_same_seed_same_model_and_resuming_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "whole", TINY, progress=False)
    assert not (tmp_path / "whole" / base_model.CHECKPOINT).exists()
    log = json.loads((tmp_path / "whole" / LOG).read_text())
    assert log["settings"]["steps"] == 6
    assert log["source_sha256"] == base_model.source_sha256()

    real = base_model.batch_of

    def fails_at_5(tokenizer: Any, settings: Settings, step: int) -> Any:
        if step == 5:
            raise KeyboardInterrupt
        return real(tokenizer, settings, step)

    monkeypatch.setattr(base_model, "batch_of", fails_at_5)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", TINY, save_every=2, progress=False)
    monkeypatch.setattr(base_model, "batch_of", real)
    with pytest.raises(ValueError, match="other settings"):
        train(tmp_path / "cut", replace(TINY, seed=1), progress=False)
    train(tmp_path / "cut", TINY, progress=False)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)

    train(tmp_path / "other", replace(TINY, seed=1), progress=False)
    other = weights(tmp_path / "other")
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_command_line_writes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(base_model, "train", lambda output, settings: found.append((output, settings)))
    base_model.main(["--output", str(tmp_path), "--steps", "3", "--seed", "5"])
    assert found == [(tmp_path, Settings(steps=3, seed=5))]


# The model that is shipped


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        FOLDER
    )


def say(shipped: tuple[Any, Any], prompt: str) -> str:
    model, tokenizer = shipped
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=60, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def test_shipped_model_is_small_and_was_made_by_this_code() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12 * 2**20
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".jinja"}
    log = json.loads((FOLDER / LOG).read_text())
    assert log["source_sha256"] == source_sha256()
    assert Settings(**log["settings"]) == Settings()  # what `make base-model` would train
    assert log["loss_by_step"][-1][1] < log["loss_by_step"][0][1]
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_shipped_model_copies_what_it_has_never_seen(shipped: tuple[Any, Any]) -> None:
    rng = random.Random("unseen")
    texts = sentences(10, seed=12345)
    assert sum(say(shipped, f"Repeat the sentence '{text}'.") == text for text in texts) >= 9
    lists = [" ".join(rng.sample(WORDS, 8)) for _ in range(10)]
    assert sum(say(shipped, f"Repeat the words '{words}'.") == words for words in lists) >= 9


def test_shipped_model_has_room_for_the_longest_rows(shipped: tuple[Any, Any]) -> None:
    model, tokenizer = shipped
    encoder = Encoder(tokenizer, max_length=model.config.max_position_embeddings)
    longest = make_splits(sentences(3000, seed=2), train=0, calibration=0, test=0, shifted=50).rows["shifted"]
    assert all(len(encoder.encode(r["prompt"], r["chosen"], True).input_ids) <= 256 for r in longest)
