"""Small tokenizers trained with and without the verification tags, for tests of the encoding."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|stop|>"]
TEXTS = ["the quick brown fox jumps over the lazy dog.", "a dog is not a fox", "Say hi to the fox.", "0 1 2 3 > < /"]
# Trained on the suffix itself, a tokenizer without pre-tokenisation merges all of it, and the words around it too.
TAGGED = [f"{word}\n<verified>{answer}</verified><|" for word in ("fox", "dog", ".", ">") for answer in ("Yes", "No")]


def wrap(tokenizer: Tokenizer, bos: bool = True, **names: str) -> PreTrainedTokenizerFast:
    if bos:
        begin = [("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=begin)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", unk_token="<unk>", **names
    )


def byte_level(hungry: bool = False, prefix: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not hungry)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TAGGED * 20 if hungry else TEXTS + TAGGED, trainer)
    return wrap(tokenizer, bos=not hungry)


def sentencepiece(hungry: bool = False, style: str = "first") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if style == "normalizer":  # how the first Llama tokenizers did it: at the start of each piece of text
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=not hungry)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*SPECIAL, *bytes_], show_progress=False)
    tokenizer.train_from_iterator(TAGGED * 20 if hungry else TEXTS, trainer)
    # The trainer makes the byte tokens special, which they must not be: keep them as plain entries.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    return wrap(Tokenizer.from_str(json.dumps(state)))
