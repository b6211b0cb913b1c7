"""Small tokenizers of every kind that transformers knows, each with control tokens of several kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

import sdmlm.demo

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "[INST]", "[/INST]"]
TEXTS = [
    "the quick brown fox jumps over the lazy dog.", "a dog is not a fox", "Say hi to the fox.", "0 1 2 3 > < / | [ ]",
    "\n<verified>Yes</verified>", "\n<verified>No</verified>", "user: end assistant s unk system INST think",
]  # fmt: skip


def wrapped(tokenizer: Tokenizer, decoder: Any = None) -> PreTrainedTokenizerFast:
    """With further control tokens: not special, and special ones that take white space along or must stand alone."""
    if decoder is not None:
        tokenizer.decoder = decoder
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=SPECIAL[3:],
    )
    fast.add_tokens(["<think>", "</think>", AddedToken("<tool/>", normalized=False)])
    fast.add_tokens(
        [
            AddedToken("<left>", lstrip=True, special=True),
            AddedToken("<right>", rstrip=True, special=True),
            AddedToken("<alone>", single_word=True, special=True),
            AddedToken("<Look>", normalized=True, special=True),
        ],
        special_tokens=True,
    )
    return fast


def byte_level(prefix: bool = False, nfkc: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    if nfkc:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrapped(tokenizer, decoders.ByteLevel())


def ignoring_merges() -> PreTrainedTokenizerFast:
    """A whole word of the vocabulary is one token, whatever the merges say: control strings are within reach of text."""
    state = json.loads(byte_level()._tokenizer.to_str())
    state["model"]["ignore_merges"] = True
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in SPECIAL]
    state["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return wrapped(Tokenizer.from_str(json.dumps(state)))


def sentencepiece(style: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if style == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style)
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*SPECIAL, *bytes_], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in SPECIAL]
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(Tokenizer.from_str(json.dumps(state)), decoder)


def unigram() -> PreTrainedTokenizerFast:
    """Its control strings are pieces like any other, with the best score of all: plain text gives their ids."""
    letters = sorted({c for text in TEXTS for c in text.replace(" ", "▁")} | set("xyzéLT"))
    words = sorted({f"▁{word}" for text in TEXTS for word in text.split()} - {*letters})
    vocab = [(t, 0.0) for t in SPECIAL] + [(c, -5.0) for c in letters] + [(w, -6.0) for w in words]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return wrapped(tokenizer, decoders.Metaspace(prepend_scheme="first"))


def word_piece(split_punctuation: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    bert, spaces = pre_tokenizers.BertPreTokenizer(), pre_tokenizers.WhitespaceSplit()
    tokenizer.pre_tokenizer = bert if split_punctuation else spaces
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrapped(tokenizer, decoders.WordPiece())


class SlowTokenizer(PreTrainedTokenizer):
    """One token per character, in Python: it does not tell which part of a text an id stands for."""

    def __init__(self, **options: Any) -> None:
        self._characters = ["<unk>", *map(chr, range(32, 127)), "\n", "é"]
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return len(self._characters)

    def get_vocab(self) -> dict[str, int]:
        return {c: i for i, c in enumerate(self._characters)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._characters.index(token) if token in self._characters else 0

    def _convert_id_to_token(self, index: int) -> str:
        return self._characters[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def slow() -> SlowTokenizer:
    tokenizer = SlowTokenizer(unk_token="<unk>", bos_token="<s>", eos_token="</s>", extra_special_tokens=SPECIAL[3:])
    tokenizer.add_tokens(["<think>", "</think>", "<tool/>"])
    return tokenizer


def demo() -> Any:
    return AutoTokenizer.from_pretrained(Path(sdmlm.demo.__file__).parent / "base")


ZOO: dict[str, Any] = {
    "byte-level": byte_level(),
    "byte-level, prefix space": byte_level(prefix=True),
    "byte-level, NFKC and lower case": byte_level(nfkc=True),
    "byte-level, ignoring merges": ignoring_merges(),
    "sentencepiece, first": sentencepiece("first"),
    "sentencepiece, always": sentencepiece("always"),
    "sentencepiece, normalizer": sentencepiece("normalizer"),
    "unigram": unigram(),
    "WordPiece": word_piece(True),
    "WordPiece, white space": word_piece(False),
    "slow": slow(),
    "demo": demo(),
}
