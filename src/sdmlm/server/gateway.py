"""Gateway mode: another server generates, and the SDM language model here judges its answers.

The upstream has OpenAI's API (vLLM, llama.cpp, a vendor). Our own LM reads its text, and the SDM layer judges by the states.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import Any

from sdmlm.generation.search import NOT_CALIBRATED, SearchPolicy
from sdmlm.language_model.encoding import VerificationTags
from sdmlm.server.engine import ignore_result
from sdmlm.server.errors import ApiError
from sdmlm.server.model import Model, OnText
from sdmlm.server.protocol import Ask, GivenAnswer, PlainPrompt
from sdmlm.server.settings import Upstream
from sdmlm.server.upstream import ask_events, ask_json, failed
from sdmlm.server.work import DEFAULT_BUDGET, Judged


@dataclass
class Written:
    """An answer of the upstream."""

    text: str = ""
    finish_reason: str = "stop"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Gateway:
    """Answers like a `Model`. At most `at_once` requests to the upstream are open."""

    def __init__(self, model: Model, upstream: Upstream, at_once: int) -> None:
        self._model, self._upstream = model, upstream
        self._free = asyncio.Semaphore(at_once)

    async def generate(self, ask: Ask, on_text: OnText | None = None) -> list[Judged]:
        """Answers to a request, in the order of its choices. `on_text(choice, piece)` is called with their text as it comes."""
        rows = ask.rows()
        self._model.check_rows(len(rows), "n" if ask.n > 1 else "prompt")
        await self._model.check_prompts(ask.prompts)  # before the upstream is paid for an answer
        tasks = [asyncio.ensure_future(self._row(ask, n, prompt, on_text)) for n, prompt in enumerate(rows)]
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
                task.add_done_callback(ignore_result)

    async def _row(self, ask: Ask, n: int, prompt: PlainPrompt, on_text: OnText | None) -> Judged:
        if ask.sdm.on_reject != "search":
            return await self._judged(ask, prompt, await self._write(ask, prompt, n, ask.temperature, on_text, n))
        budget = DEFAULT_BUDGET if ask.sdm.budget is None else ask.sdm.budget
        temperature, tries, spent = ask.temperature, 0, 0
        best: Judged | None = None
        while tries <= budget and not (best and best.verification.verified):
            written = await self._write(ask, prompt, n + tries * len(ask.rows()), temperature)
            tries, temperature = tries + 1, SearchPolicy().temperature
            judged = await self._judged(ask, prompt, written)
            spent += judged.verification.completion_tokens
            if best is None or judged.verification.verified or _yes(judged) > _yes(best):
                best = judged
        assert best is not None
        v = best.verification
        # This search cannot be calibrated: the upstream's answers to the calibration prompts are not known.
        reason = v.reason + NOT_CALIBRATED
        v = dataclasses.replace(v, tries=tries, calibrated=False, reason=reason, completion_tokens=spent)
        return dataclasses.replace(best, verification=v)

    async def _judged(self, ask: Ask, prompt: PlainPrompt, written: Written) -> Judged:
        """The verdict on an answer, with the upstream's own count of tokens if it gave one."""
        try:
            (judged,) = await self._model.verify([GivenAnswer(prompt, written.text)], ask.sdm)
        except ApiError as error:
            if error.status != 400:
                raise
            raise ApiError(502, f"The upstream's answer cannot be judged: {error.message}", code=error.code) from error
        v = judged.verification
        v = dataclasses.replace(
            v,
            generated=written.text,
            finish_reason=written.finish_reason,
            prompt_tokens=v.prompt_tokens if written.prompt_tokens is None else written.prompt_tokens,
            completion_tokens=v.completion_tokens if written.completion_tokens is None else written.completion_tokens,
        )
        return dataclasses.replace(judged, verification=v)

    async def _write(
        self,
        ask: Ask,
        prompt: PlainPrompt,
        number: int,
        temperature: float,
        on_text: OnText | None = None,
        choice: int = 0,
    ) -> Written:
        """One answer of the upstream; `number` makes the seeds of a request's answers differ."""
        payload: dict[str, Any] = {"model": self._upstream.model, "temperature": temperature}
        payload[ask.max_tokens_name] = self._model.max_tokens(ask.max_tokens)
        payload |= {"messages": _messages(prompt)} if ask.chat else {"prompt": prompt}
        if ask.top_p < 1:
            payload["top_p"] = ask.top_p
        if ask.stop:
            payload["stop"] = list(ask.stop)
        if ask.seed is not None:
            payload["seed"] = ask.seed + number
        path = "/chat/completions" if ask.chat else "/completions"
        async with self._free:
            if on_text is None:
                return _whole(await ask_json(self._upstream, path, payload), ask.chat)
            payload |= {"stream": True, "stream_options": {"include_usage": True}}
            written, body = Written(), BodyText(self._model.tags)
            async for event in ask_events(self._upstream, path, payload):
                new = _add(written, event, ask.chat)
                if piece := body.piece(new):
                    on_text(choice, piece)
            return written


class BodyText:
    """The body of an answer while it arrives, without text that may turn out to be part of a verification suffix."""

    def __init__(self, tags: VerificationTags) -> None:
        self._tags, self._text, self._sent = tags, "", 0

    def piece(self, new: str) -> str:
        """The part of the body that becomes certain with this further text."""
        self._text += new
        text = self._tags.certain(self._text.partition(self._tags.open)[0])
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece


def _messages(prompt: PlainPrompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _yes(judged: Judged) -> float:
    return judged.verification.probability_of_yes


def _whole(answer: dict[str, Any], chat: bool) -> Written:
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
    except (KeyError, IndexError, TypeError) as error:
        raise failed("answered in another form than OpenAI's") from error
    if not isinstance(text, str):
        raise failed("gave no text")
    written = Written(text)
    _note(written, choice, answer)
    return written


def _add(written: Written, event: dict[str, Any], chat: bool) -> str:
    """Take note of an event of a stream; returns its text."""
    choices = event.get("choices") or [{}]
    choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
    part = choice.get("delta") if chat else choice
    if not isinstance(part, dict | None):
        raise failed("answered in another form than OpenAI's")
    said = (part or {}).get("content" if chat else "text")
    text = said if isinstance(said, str) else ""
    written.text += text
    _note(written, choice, event)
    return text


def _note(written: Written, choice: dict[str, Any], answer: dict[str, Any]) -> None:
    if isinstance(choice.get("finish_reason"), str):
        written.finish_reason = choice["finish_reason"]
    usage = answer.get("usage")
    for name in ("prompt_tokens", "completion_tokens"):
        count = usage.get(name) if isinstance(usage, dict) else None
        if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
            setattr(written, name, count)
