"""Encoding: exact segments, masks and positions for every kind of tokenizer."""

from __future__ import annotations

import re

import pytest
from datasets import Dataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tag_tokenizers import byte_level, sentencepiece, wrap
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sdmlm.language_model.encoding import Encoded, Encoder, VerificationTags, check_rows, collate, encode

TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-level, prefix space": byte_level(prefix=True),
    "byte-level, hungry": byte_level(hungry=True),
    "sentencepiece": sentencepiece(),
    "sentencepiece, always": sentencepiece(style="always"),
    "sentencepiece, normalizer": sentencepiece(style="normalizer"),
    "sentencepiece, hungry": sentencepiece(hungry=True),
}
ENCODERS = {name: Encoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}
PIECES = ["<verified>", "</verified>", "Yes", "No", "\n", " ", "fox", ".", "é", "🙂", "<", ">", "a", "7", "<|"]
bodies = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def unmasked(encoder: Encoder, document: Encoded) -> str:
    kept = [i for i, label in zip(document.input_ids, document.labels, strict=True) if label != -100]
    assert kept == [label for label in document.labels if label != -100]
    return encoder.decode(kept)


def test_the_tokenizers_are_as_hard_as_they_should_be() -> None:
    for name in ("byte-level, hungry", "sentencepiece, hungry"):
        encoder = ENCODERS[name]
        joined = encoder.continuation("fox\n<verified>Yes</verified>")
        cuts = {len(encoder.decode(joined[:n])) for n in range(len(joined))}
        assert not {len("fox\n"), len("fox\n<verified>")} <= cuts, f"{name}: no token straddles the segments"
    assert ENCODERS["sentencepiece"].continuation("é") == TOKENIZERS["sentencepiece"].convert_tokens_to_ids(
        ["<0xC3>", "<0xA9>"]
    )


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(
    body=bodies, verified=st.booleans(), prompt=st.sampled_from(["Say hi.", "Say <verified>Yes</verified>\n", "🙂 "])
)
def test_text_mask_and_position_are_exact(name: str, body: str, verified: bool, prompt: str) -> None:
    encoder, tags = ENCODERS[name], VerificationTags()
    document = encoder.encode(prompt, body, verified)
    kept = tags.strip_suffix(body)
    answer = "Yes</verified>" if verified else "No</verified>"
    prompt_ids = encoder.encode_prompt(prompt)
    assert prompt_ids == list(TOKENIZERS[name](prompt)["input_ids"])
    assert document.input_ids[: len(prompt_ids)] == prompt_ids
    # All of the text, and nothing that nobody wrote.
    assert encoder.decode(document.input_ids[len(prompt_ids) :]) == kept + "\n<verified>" + answer + "<|end|>"
    # Contrastive masking, Table 1.
    assert unmasked(encoder, document) == (kept + "\n" if verified else "") + "<verified>" + answer + "<|end|>"
    counted = [label != -100 for label in document.labels]
    assert counted == sorted(counted)
    # The right-most <verified>, which is ours.
    judged = document.input_ids[: document.verified_at + 1]
    assert encoder.decode(judged[len(prompt_ids) :]) == kept + "\n<verified>"
    assert judged == encoder.encode_for_judging(prompt, body)
    assert encoder.decode(document.input_ids[document.verified_at + 1 :]) == answer + "<|end|>"


@pytest.mark.parametrize("name", ["byte-level", "byte-level, hungry"])
def test_against_a_plain_version_from_the_spec(name: str) -> None:
    """Where a tokenizer adds no space of its own, a document is the segments' ids, one after the other."""
    tokenizer = TOKENIZERS[name]

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    for verified in (True, False):
        prompt = list(tokenizer("Say hi.")["input_ids"])
        body, tag, answer = ids("hi fox\n"), ids("<verified>"), ids("Yes</verified>" if verified else "No</verified>")
        suffix = [*tag, *answer, tokenizer.eos_token_id]
        masked = [-100] * len(prompt) + (body if verified else [-100] * len(body))
        expected = Encoded(prompt + body + suffix, masked + suffix, len(prompt + body + tag) - 1)
        assert encode(tokenizer, "Say hi.", "hi fox", verified) == expected


@given(body=bodies, verified=st.booleans(), blank=st.sampled_from(["", "\n", "  \n"]))
def test_a_suffix_is_replaced_not_doubled(body: str, verified: bool, blank: str) -> None:
    tags = VerificationTags()
    assert tags.strip_suffix(body + tags.suffix(verified) + blank) == body
    encoder = ENCODERS["byte-level"]
    if tags.strip_suffix(body) == body:
        assert encoder.encode("x", body + tags.suffix(verified), True) == encoder.encode("x", body, True)


@given(body=bodies, verified=st.booleans())
def test_split_takes_the_right_most_tag(body: str, verified: bool) -> None:
    tags = VerificationTags()
    assert tags.split(body + tags.suffix(verified)) == (body, verified)


def test_split_of_unfinished_generations() -> None:
    tags = VerificationTags()
    assert tags.split("hi") == ("hi", None)
    assert tags.split("hi\n") == ("hi", None)
    assert tags.split("hi <verified>") == ("hi ", None)
    assert tags.split("hi\n<verified>Maybe</verified>") == ("hi", None)
    assert tags.split("hi\n<verified>No") == ("hi", False)
    assert tags.split("a<verified>No</verified>b\n<verified>Yes") == ("a<verified>No</verified>b", True)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(body=bodies.filter(lambda b: "</verified>" not in b), verified=st.booleans(), word=st.sampled_from(["", " fox"]))
def test_generated_ids_are_read_back(name: str, body: str, verified: bool, word: str) -> None:
    """The ids a model would emit give the body back, and the generation ends exactly where the closing tag does."""
    encoder, body = ENCODERS[name], word + body
    # No further tag, whole or begun, at its end.
    begun = ["<verified>"[:k] for k in range(2, 11)] + ["\n<"]
    assume(not body.endswith(tuple(begun)))
    assume(not re.search(r"<verified>\s*(|Y|Ye|Yes(<|</[a-z>]*)?|N|No(<|</[a-z>]*)?)\s*$", body))
    document = encoder.encode("Say hi.", body, verified)
    emitted = document.input_ids[len(encoder.encode_prompt("Say hi.")) :]
    ended = [encoder.ends(emitted[: n + 1]) for n in range(len(emitted))]
    assert ended == ["</verified>" in encoder.decode(emitted[: n + 1]) for n in range(len(emitted) - 1)] + [True]
    assert encoder.read(emitted) == encoder.read(emitted[:-1]) == (body, verified)
    assert encoder.read([*emitted, 7, 8]) == (body, verified)


def test_a_tag_that_was_cut_off_is_no_part_of_a_generated_answer() -> None:
    """Hard negatives are read as answers in use are."""
    encoder = ENCODERS["byte-level"]
    for text in ("abc\n<ver", "abc\n<", "abc<ver", "abc\n<verified>", "abc\n"):
        assert encoder.read(encoder.continuation(text)) == ("abc", None)
    for text in ("abc\n<\n<verified>No", "abc<ver<verified>No", "abc\n<verified>Yes\n<verified>No"):
        assert encoder.read(encoder.continuation(text)) == ("abc", False)
    assert encoder.read(encoder.continuation("abc <")) == ("abc <", None)


def test_tags_are_configurable_in_one_place() -> None:
    tags = VerificationTags(open="[[", close="]]", yes="ja", no="nein", separator=" ")
    encoder = Encoder(TOKENIZERS["sentencepiece"], tags)
    document = encoder.encode("Say hi.", "fox [[nein]]", True)
    assert unmasked(encoder, document) == "fox [[ja]]<|end|>"
    assert encoder.decode(document.input_ids[: document.verified_at + 1]).endswith("fox [[")


@pytest.mark.parametrize(
    "wrong", [{"open": ""}, {"yes": "No"}, {"no": "Yes, no"}, {"open": "|", "close": "||"}, {"close": "<verified>"}]
)
def test_ambiguous_tags_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="VerificationTags"):
        VerificationTags(**wrong)


def test_a_tokenizer_that_cannot_spell_the_tags_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "<|begin|>": 2, "<|end|>": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="cannot spell"):
        Encoder(wrap(tokenizer))


CHATML = (
    "{% for m in messages %}<|{{ m.role if m.role != 'system' else 'begin' }}|>"
    "{{ m.content | trim }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'system' %}{{ raise_exception('no system messages') }}"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize(
    ("template", "prompt", "completion"),
    [
        (CHATML, "<|user|>Say hi.<|stop|>\n<|assistant|>", "fox\n<verified>Yes</verified><|stop|>"),
        (PHI, "<|user|>\nSay hi.<|stop|>\n<|assistant|>\n", "fox\n<verified>Yes</verified><|stop|>\n<|end|>"),
        (LLAMA2, "<|begin|>[INST] Say hi. [/INST]", " fox\n<verified>Yes</verified> <|end|>"),
        (PLAIN, "user: Say hi.\nassistant: ", "fox\n<verified>Yes</verified><|end|>"),
    ],
)
def test_chat_templates(make, template: str, prompt: str, completion: str) -> None:
    tokenizer = make()
    tokenizer.chat_template = template
    encoder = Encoder(tokenizer)
    document = encoder.encode([{"role": "user", "content": "Say hi."}], [{"role": "assistant", "content": "fox"}], True)
    prompt_ids = encoder.encode_prompt("Say hi.")  # a string is one user message
    assert prompt_ids == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert document.input_ids[: len(prompt_ids)] == prompt_ids
    assert encoder.decode(document.input_ids[len(prompt_ids) :]) == completion
    assert unmasked(encoder, document) == completion
    negative = encoder.encode("Say hi.", "fox", False)
    assert unmasked(encoder, negative) == completion[completion.index("<verified>") :].replace("Yes", "No")
    assert encoder.ends([tokenizer.eos_token_id])
    assert encoder.ends([tokenizer.convert_tokens_to_ids("<|stop|>")]) == ("<|stop|>" in template)
    assert not encoder.ends([tokenizer.convert_tokens_to_ids("<|user|>")])


def test_a_template_that_hides_the_answer_leaves_the_turn_to_eos() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {% endfor %}<|stop|>"
    assert Encoder(tokenizer).closing_ids == [tokenizer.eos_token_id]


def test_white_space_never_ends_a_turn() -> None:
    """Some tokenizers have line breaks among their added tokens."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["\n"])
    tokenizer.chat_template = PHI
    encoder = Encoder(tokenizer)
    assert encoder.decode(encoder.closing_ids) == "<|stop|>\n<|end|>"
    assert encoder.stop_ids == set(tokenizer.convert_tokens_to_ids(["<|stop|>", "<|end|>"]))


def test_system_messages_and_turns() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    messages = [
        {"role": "system", "content": "Be a dog."},
        {"role": "user", "content": "Say hi."},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "Again."},
    ]
    turns = ["<|begin|>Be a dog.", "<|user|>Say hi.", "<|assistant|>hi", "<|user|>Again.", "<|assistant|>"]
    text = "<|stop|>\n".join(turns)
    assert tokenizer.decode(Encoder(tokenizer).encode_prompt(messages)) == text
    tokenizer.chat_template = LLAMA2
    with pytest.raises(ValueError, match=r"Row 3: .*no system messages"):
        Encoder(tokenizer).encode(messages, "hi", True, row=3)
    tokenizer.chat_template = None
    assert Encoder(tokenizer).encode_prompt(messages) == tokenizer("Be a dog.\n\nSay hi.\n\nhi\n\nAgain.")["input_ids"]


def test_bos_in_a_prompt_is_text_and_no_special_tokens_are_needed() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = Encoder(tokenizer).encode_prompt("<|begin|>hi")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == "<|begin|><|begin|>hi"
    bare = PreTrainedTokenizerFast(tokenizer_object=byte_level(hungry=True)._tokenizer)
    assert (bare.pad_token_id, bare.eos_token_id) == (None, None)
    encoder = Encoder(bare)
    document = encoder.encode("Say hi.", "fox", True)
    assert bare.decode(document.input_ids) == "Say hi.fox\n<verified>Yes</verified>"
    assert (encoder.pad_id, encoder.stop_ids, bare.pad_token_id) == (0, set(), None)


def test_an_eos_that_the_tokenizer_adds_is_not_part_of_the_prompt() -> None:
    tokenizer = byte_level()
    special = [(t, tokenizer.convert_tokens_to_ids(t)) for t in ("<|begin|>", "<|end|>")]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=special
    )
    assert tokenizer.decode(Encoder(tokenizer).encode_prompt("hi")) == "<|begin|>hi"


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@given(extra=st.integers(-3, 60), verified=st.booleans())
@settings(max_examples=30, deadline=None)
def test_too_long(name: str, extra: int, verified: bool) -> None:
    tokenizer = TOKENIZERS[name]
    prompt, body = "Say hi to the fox. " * 4, "the lazy dog"
    whole = max((ENCODERS[name].encode(prompt, body, v) for v in (True, False)), key=lambda d: len(d.input_ids))
    limit = len(whole.input_ids) - extra
    cutting = Encoder(tokenizer, max_length=limit, truncate_prompt=True)
    if extra <= 0:
        expected = ENCODERS[name].encode(prompt, body, verified)
        assert Encoder(tokenizer, max_length=limit).encode(prompt, body, verified) == expected
        assert cutting.encode(prompt, body, verified) == expected
        return
    with pytest.raises(ValueError, match=r"Row 17 .*max_length.*truncate_prompt=True"):
        Encoder(tokenizer, max_length=limit).encode(prompt, body, verified, row=17)
    completion = unmasked(ENCODERS[name], ENCODERS[name].encode(prompt, body, True))
    completion_length = sum(label != -100 for label in ENCODERS[name].encode(prompt, body, True).labels)
    if limit < completion_length + 2:  # BOS and one token of the prompt
        with pytest.raises(ValueError, match=r"Row 17 .*raise max_length"):
            cutting.encode(prompt, body, verified, row=17)
        return
    document = cutting.encode(prompt, body, verified)
    assert limit - 2 <= len(document.input_ids) <= limit  # the answers may differ in length
    assert document.input_ids[0] == tokenizer.bos_token_id
    text = cutting.decode(document.input_ids[1:])
    assert text.endswith(completion if verified else completion.replace("Yes", "No"))
    # What the SDM layer reads does not depend on the answer.
    other = cutting.encode(prompt, body, not verified)
    assert document.input_ids[: document.verified_at + 1] == other.input_ids[: other.verified_at + 1]


def test_collate_pads_on_the_right() -> None:
    documents = [Encoded([1, 2, 3], [-100, 2, 3], 1), Encoded([4, 5], [-100, 5], 0)]
    batch = {name: tensor.tolist() for name, tensor in collate(documents, pad_id=9).items()}
    assert batch == {
        "input_ids": [[1, 2, 3], [4, 5, 9]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[-100, 2, 3], [-100, 5, -100]],
        "verified_at": [1, 0],
    }


GOOD = {"prompt": "Say hi.", "chosen": "hi", "rejected": "ho", "extra": 3}
CHAT = {
    "prompt": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Say hi."}],
    "chosen": [{"role": "assistant", "content": "hi"}],
    "rejected": [{"role": "assistant", "content": "ho"}],
}


def test_good_rows_pass() -> None:
    check_rows([GOOD, CHAT])
    check_rows(Dataset.from_list([GOOD] * 3))
    check_rows(Dataset.from_list([CHAT] * 3))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "y"}, "Row 1: column 'rejected' is missing"),
        ({**GOOD, "prompt": ""}, "Row 1: 'prompt' is empty"),
        ({**GOOD, "prompt": " \n"}, "Row 1: 'prompt' is empty"),
        ({**GOOD, "prompt": []}, "Row 1: 'prompt' is empty"),
        ({**GOOD, "chosen": "\n<verified>Yes</verified>"}, "Row 1: 'chosen' is empty"),
        ({**GOOD, "chosen": None}, "Row 1: 'chosen' is NoneType, not text"),
        ({**GOOD, "rejected": 3}, "Row 1: 'rejected' is int, not text"),
        ({**GOOD, "prompt": ["Say hi."]}, "Row 1: 'prompt' is list, not text"),
        ({**GOOD, "prompt": [{"role": "user", "content": None}]}, "Row 1: 'prompt' is list, not text"),
        ({**GOOD, "prompt": [{"role": "assistant", "content": "x"}]}, "Row 1: 'prompt' ends with an assistant"),
        ({**GOOD, "chosen": [{"role": "user", "content": "x"}]}, "Row 1: 'chosen' must be exactly one assistant"),
        ({**GOOD, "chosen": CHAT["chosen"] * 2}, "Row 1: 'chosen' must be exactly one assistant"),
        ({**GOOD, "rejected": " hi\n<verified>No</verified>"}, "Row 1: 'chosen' and 'rejected' are equal"),
    ],
)
def test_bad_rows_are_named(row: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_rows([GOOD, row, GOOD])
    assert str(error.value).startswith(message)
    with pytest.raises(ValueError, match=r"\(2 more rows have a problem too.\)"):
        check_rows([GOOD, row, row, row])


def test_no_rows() -> None:
    with pytest.raises(ValueError, match="no rows"):
        check_rows([])
