"""Answers before they are judged: the settings of their generation, and their text while and after it is generated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sdmlm.language_model.encoding import Encoder, overlap


@dataclass(frozen=True)
class Sampling:
    """How the LM writes: the length of an answer, temperature, nucleus sampling and stop strings."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        if not _is_number(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature!r} but must be a number of at least 0 (0 is greedy).")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r} but must be above 0 and at most 1.")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError("stop must be a string or a list of strings, none of them empty.")


@dataclass
class Answer:
    """An answer before it is judged."""

    text: str
    ids: list[int]  # the document up to and including `<verified>`
    prompt_tokens: int
    completion_tokens: int
    generated: str | None = None
    lm_verdict: bool | None = None
    finish_reason: str = "given"
    start: int = 0  # how many of `ids` are the prompt's
    h: Tensor | None = None  # its summary, if it is known
    cut: bool = False  # by a stop string, or before its own end
    as_certified: bool = True  # greedy and whole, as a certificate's held-out answers are written


def marked(answer: Answer, sampling: Sampling, usual: Sampling) -> Answer:
    """The answer with `as_certified`: whether `usual`, the settings of a certificate, would have given it too."""
    whole = not answer.cut and answer.completion_tokens <= usual.max_new_tokens
    return replace(answer, as_certified=sampling == usual or (sampling.temperature == 0 and whole))


class AnswerText:
    """The text of one answer while its ids are generated: where a stop string ends it, and which part is final already."""

    def __init__(self, encoder: Encoder, stop: Sequence[str] = ()) -> None:
        self._encoder, self._stop, self._sent = encoder, stop, 0
        self._window = max((len(s.encode()) for s in stop), default=0)  # each token spells at least one byte

    def stopped(self, ids: Sequence[int]) -> bool:
        """Whether there is a stop string at the end of the ids."""
        return bool(self._stop) and self._first_stop(self._encoder.decode(ids[-self._window :])) is not None

    def _first_stop(self, text: str) -> int | None:
        return min((at for s in self._stop if (at := text.find(s)) >= 0), default=None)

    def verbatim(self, ids: Sequence[int]) -> str:
        """What the LM wrote up to its end of turn."""
        return self._encoder.decode(self._encoder.turn(ids))

    def read(self, text: str) -> tuple[str, bool | None]:
        """(answer, the LM's own verdict) in what the LM wrote (`verbatim`), up to a stop string."""
        return self._encoder.tags.read(text[: self._first_stop(text)])

    def piece(self, ids: Sequence[int]) -> str:
        """The text that became final since the last call: no part of a tag, of a stop string, or of half a character."""
        tags, text = self._encoder.tags, self.verbatim(ids)
        text, tag, _ = text[: self._first_stop(text)].partition(tags.open)
        if tag:
            text = tags.certain(text)
        else:
            text = text.rstrip("\ufffd")
            # A stop string may begin at the end of this text. If so, the start of a tag before it is not final either.
            ends = (text, text[: len(text) - max((overlap(text, stop) for stop in self._stop), default=0)])
            text = min((tags.certain(end) for end in ends), key=len)
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece

    def last(self, text: str) -> str:
        """The part of the finished answer that no `piece` has returned yet."""
        return text[self._sent :]


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r} but must be a whole number of at least {least}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
