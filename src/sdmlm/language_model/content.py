"""Text to token ids, for two kinds of text: trusted text, in which control strings count, and content, in which they do not.

Trusted text is what the program writes itself: the verification tags and the text of the chat template. Content is everything
that comes from outside. A control string in content (`<|end|>`) is encoded as ordinary characters, so nobody can end a turn or
begin another by writing one (docs/security.md).

Content without control strings gets the ids that the tokenizer gives it. Otherwise the text is cut inside each control string,
and the pieces are encoded separately and joined. Pieces are cut again until no control id is left.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sdmlm.errors import ControlText


@dataclass(frozen=True)
class EncodedText:
    """The ids of a text, and the part of the text that each stands for (None if the tokenizer does not report it)."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]] | None


class TextEncoder:
    """Text to ids and back, for one tokenizer, which is read and never changed."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._anchors: dict[str, list[int]] = {"": []}
        self._anchor = self.trusted("a", follows=False)
        self._anchor_length = len(self._spelled(self._anchor))
        if self.decode(self._anchor) != "a":  # the tokenizer puts a space before every text
            self._anchors = {a: self.trusted(a, follows=False) for a in ("\n", ">", "a", ".", "0")} | self._anchors
        # The unknown token also stands for ordinary characters that the vocabulary lacks. It is no control token, unless it
        # has another role too. Only its own name in a text counts as a control string.
        self._unknown = tokenizer.unk_token_id
        tasks = {name: value for name, value in tokenizer.special_tokens_map.items() if name != "pad_token"}
        tasks.pop("unk_token", None)
        others = {token for value in tasks.values() for token in ([value] if isinstance(value, str) else value)}
        added = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special or not _is_word(t.content)}
        self._may_be_unknown = tokenizer.unk_token not in others
        self.control_ids: frozenset[int] = frozenset()
        self.add_control({*tokenizer.all_special_ids} | added)

    def add_control(self, ids: Iterable[int]) -> None:
        """Treat further ids as control tokens: those that a chat template writes."""
        new = list({*ids} - {None, self._unknown if self._may_be_unknown else None})
        # Tokens for single bytes are ordinary text, even if a conversion of the tokenizer made them added tokens.
        names = zip(new, self.tokenizer.convert_ids_to_tokens(new), strict=True)
        self.control_ids |= {i for i, name in names if not re.fullmatch("<0x[0-9A-F]{2}>", name or "")}

    def trusted(self, text: str, follows: bool = True) -> list[int]:
        """Ids of trusted text; `follows` says whether there is other text before it."""
        return self.encoded([text], follows)[0].ids

    def content(self, text: str, follows: bool = True) -> list[int]:
        """Ids of untrusted text; none of them is a control token."""
        pieces = self.encoded([text], follows)
        while any(spans := [self.control_strings(piece) for piece in pieces]):
            pairs = list(zip(pieces, spans, strict=True))
            texts = [part for piece, places in pairs for part in _cut(piece.text, places)]
            known = {piece.text: piece for piece, places in pairs[1:] if not places}
            new = dict.fromkeys(part for part in texts[1:] if part not in known)
            known |= {piece.text: piece for piece in self.encoded(list(new))}
            pieces = self.encoded(texts[:1], follows) + [known[part] for part in texts[1:]]
        return [i for piece in pieces for i in piece.ids]

    def control_strings(self, encoded: EncodedText) -> list[tuple[int, int]]:
        """The (start, end) of each control string in a text, from the spans of its control ids."""
        if not self._suspicious(encoded):
            return []
        text, control_spans = encoded.text, []
        if encoded.spans is None:
            return self.names(text) or [(0, len(text))]
        for i, (start, end) in zip(encoded.ids, encoded.spans, strict=True):
            while start < end and text[start].isspace() and not text[start:end].isspace():
                start += 1  # a control token may include the white space around it
            while start < end and text[end - 1].isspace() and not text[start:end].isspace():
                end -= 1
            if i in self.control_ids or (i == self._unknown and self._names_unknown(text[start:end])):
                control_spans.append((start, end) if start < end else (0, len(text)))
        return control_spans

    def _suspicious(self, encoded: EncodedText) -> bool:
        if not self.control_ids.isdisjoint(encoded.ids):
            return True
        return self._unknown in encoded.ids and self._names_unknown(encoded.text)

    def _names_unknown(self, text: str) -> bool:
        return _folded(str(self.tokenizer.unk_token)) in _folded(text)

    def names(self, text: str) -> list[tuple[int, int]]:
        """The (start, end) of each name of a control token in a text, even if the tokenizer would not read it as one there."""
        ids, added = self.control_ids | ({self._unknown} - {None}), self.tokenizer.added_tokens_decoder
        # The vocabulary may have the normalized form of an added token's name.
        names = {*self.tokenizer.convert_ids_to_tokens(list(ids)), *(added[i].content for i in ids if i in added)}
        places = set()
        for name in filter(None, names):
            at = text.find(name)
            while at >= 0:
                places.add((at, at + len(name)))
                at = text.find(name, at + 1)
        return sorted(places)

    def encoded(self, texts: Sequence[str], follows: bool = True) -> list[EncodedText]:
        """Each text as the tokenizer encodes it, control strings included.

        SentencePiece-style tokenizers add a space before every text. So a text that `follows` other text is encoded after
        an anchor, whose ids are then removed. If the anchor merges with the text, the next anchor is tried.
        """
        out: dict[int, EncodedText] = {n: EncodedText("", [], []) for n, text in enumerate(texts) if not text}
        for anchor, head in self._anchors.items() if follows else [("", [])]:
            rest = [n for n in range(len(texts)) if n not in out]
            if not rest:
                break
            given = [anchor + texts[n] for n in rest]
            fast = bool(self.tokenizer.is_fast)
            encoding = self.tokenizer(
                given, add_special_tokens=False, verbose=False, return_offsets_mapping=fast, return_attention_mask=False
            )
            for k, n in enumerate(rest):
                ids = list(encoding["input_ids"][k])
                if ids[: len(head)] == head:
                    spans = encoding["offset_mapping"][k][len(head) :] if fast else None
                    shifted = None if spans is None else [(max(0, a - len(anchor)), b - len(anchor)) for a, b in spans]
                    out[n] = EncodedText(texts[n], ids[len(head) :], shifted)
        return [out[n] for n in range(len(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids that follow other ids, special tokens and a leading space included."""
        return self._spelled([*self._anchor, *ids])[self._anchor_length :]

    def _spelled(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _cut(text: str, control_spans: Sequence[tuple[int, int]]) -> list[str]:
    """The text in pieces, cut in the middle of each control string."""
    places = set()
    for start, end in control_spans:
        if end - start > 1:
            places.add((start + end) // 2)
        elif len(text) > 1:  # a single character: encoded separately, it may get other ids
            places |= {start, end}
        else:
            raise ControlText(
                f"the text holds {text!r}, which this tokenizer can only encode as a control token: remove it."
            )
    ends = sorted({*places, len(text)} - {0})
    return [text[a:b] for a, b in itertools.pairwise([0, *ends])]


def _is_word(added: str) -> bool:
    """Whether an added token that is not special extends the vocabulary: white space (indentation), a word, a character.

    Such a token has no control function, and models were trained with it in ordinary text. If the chat template writes it, it
    counts as a control token all the same (`add_control`).
    """
    text = added.replace("▁", " ")
    return not text.strip() or len(text) == 1 or all(c.isalnum() or c.isspace() for c in text)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()
