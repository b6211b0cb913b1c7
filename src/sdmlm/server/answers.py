"""Answers in OpenAI's format, with the evidence in `choices[i].sdm`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sdmlm.server.protocol import Ask
from sdmlm.server.work import Judged

TEXT_FIELDS = ("text", "completion", "generated")


def evidence(judged: Judged, withheld: bool = False) -> dict[str, Any]:
    """The fields of an answer's `Verification` and the region that decided; without the text if that is withheld."""
    fields = judged.verification.to_dict()
    if withheld:
        fields.update(dict.fromkeys(TEXT_FIELDS))
    return {**fields, "region": judged.region}


def usage(judged: Sequence[Judged], n: int) -> dict[str, int]:
    """Tokens of a request. A prompt counts once, however many answers it has."""
    prompt = sum(j.verification.prompt_tokens for j in judged[::n])
    completion = sum(j.verification.completion_tokens for j in judged)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclass(frozen=True)
class ResponseBuilder:
    """Builds the response to one request, whole or in chunks."""

    ask: Ask
    model: str
    fingerprint: str
    id: str
    created: int

    @classmethod
    def of(cls, ask: Ask, model: str, fingerprint: str) -> ResponseBuilder:
        """A builder for a request that has just arrived."""
        prefix = "chatcmpl" if ask.chat else "cmpl"
        return cls(ask, model, fingerprint, f"{prefix}-{uuid.uuid4().hex}", int(time.time()))

    def whole(self, judged: Sequence[Judged]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = [self._choice(n, j) for n, j in enumerate(judged)]
        return {**self._frame("chat.completion"), "choices": choices, "usage": usage(judged, self.ask.n)}

    def _choice(self, n: int, judged: Judged) -> dict[str, Any]:
        withheld = self.withholds(judged)
        refusal = judged.verification.reason if withheld else None
        text = judged.verification.text
        said: dict[str, Any]
        if self.ask.chat:
            said = {"message": {"role": "assistant", "content": None if withheld else text, "refusal": refusal}}
        else:
            said = {"text": "" if withheld else text, **({"refusal": refusal} if withheld else {})}
        return {"index": n, **said, "logprobs": None, **self._end(judged, withheld)}

    def first(self, n: int) -> dict[str, Any]:
        """The first chunk of a choice."""
        return self._chunk(n, {"role": "assistant", "content": ""}, "")

    def piece(self, n: int, text: str) -> dict[str, Any]:
        """A chunk with text."""
        return self._chunk(n, {"content": text}, text)

    def last(self, n: int, judged: Judged) -> dict[str, Any]:
        """The last chunk of a choice, with its evidence."""
        withheld = self.withholds(judged)
        refusal = {"refusal": judged.verification.reason} if withheld else {}
        chunk = self._chunk(n, refusal, "")
        chunk["choices"][0].update(self._end(judged, withheld), **({} if self.ask.chat else refusal))
        return chunk

    def used(self, judged: Sequence[Judged]) -> dict[str, Any]:
        """The chunk after all others, if the client asked for it."""
        return {**self._frame("chat.completion.chunk"), "choices": [], "usage": usage(judged, self.ask.n)}

    def withholds(self, judged: Judged) -> bool:
        """Whether the client does not want this answer: neither one that is rejected nor one accepted as wrong."""
        return self.ask.sdm.on_reject == "abstain" and not judged.verification.verified

    def _end(self, judged: Judged, withheld: bool) -> dict[str, Any]:
        return {"finish_reason": judged.verification.finish_reason, "sdm": evidence(judged, withheld)}

    def _chunk(self, n: int, delta: dict[str, Any], text: str) -> dict[str, Any]:
        said = {"delta": delta} if self.ask.chat else {"text": text}
        frame = self._frame("chat.completion.chunk")
        if self.ask.include_usage:
            frame["usage"] = None  # as in OpenAI's API: only the chunk after all others has it
        return {**frame, "choices": [{"index": n, **said, "logprobs": None, "finish_reason": None}]}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind if self.ask.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
