"""Generating answers: with listeners, stop strings, and summaries from the states of the generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdmlm.generation.answers import Answer, AnswerText, Sampling
from sdmlm.language_model.decoding import generate
from sdmlm.language_model.encoding import Encoder, Prompt, PromptIds
from sdmlm.language_model.likelihood import LikelihoodReader, VerdictTokens
from sdmlm.language_model.summary import GenerationReader


def write_answers(
    model: Any,
    encoder: Encoder,
    prompts: Sequence[PromptIds],
    sampling: Sampling,
    seeds: Sequence[Sequence[int]],
    room: int,
    tokens_per_batch: int,
    listeners: Mapping[int, Callable[[str], bool | None]],
    keep_going: Callable[[int], bool] | None,
    progress: bool,
    contexts: Sequence[Prompt | PromptIds] | None,
    prefixes: Sequence[Sequence[int]] | None,
    likelihood: bool = False,
) -> list[Answer]:
    """See `SDMLanguageModel.write`; `room` is the number of tokens that a prompt must leave for its answer.

    `likelihood`: summaries hold the likelihood of the answer too.
    """
    answers: dict[int, Answer] = {}
    texts = [AnswerText(encoder, sampling.stop) for _ in prompts]

    def finish(n: int, ids: list[int]) -> list[int]:
        answers[n] = _written_answer(encoder, prompts[n], ids, texts[n], room)
        return answers[n].ids

    def should_stop(n: int, ids: list[int]) -> bool:
        if (keep_going is not None and not keep_going(n)) or texts[n].stopped(ids):
            return True
        listener = listeners.get(n)
        piece = texts[n].piece(ids) if listener is not None else ""  # decoding costs time
        return bool(piece) and listener is not None and listener(piece) is False

    # The generation gives summaries only if the LM reads the document that is judged.
    reader: GenerationReader | None = None
    if contexts is None and prefixes is None:
        reader = (
            LikelihoodReader(encoder.open_ids, finish, VerdictTokens.of(encoder))
            if likelihood
            else GenerationReader(encoder.open_ids, finish)
        )
    generated = generate(
        model,
        encoder,
        prompts if contexts is None else contexts,
        sampling.max_new_tokens,
        sampling.temperature,
        seeds,
        tokens_per_batch,
        progress,
        rooms=[room] * len(prompts),
        top_p=sampling.top_p,
        prefixes=prefixes,
        should_stop=should_stop if sampling.stop or listeners or keep_going is not None else None,
        reader=reader,
    )
    for n, ids in enumerate(generated):
        if n not in answers:
            finish(n, ids)
        if reader is not None:
            answers[n].h = reader.h.get(n)
        if n in listeners and (piece := texts[n].last(answers[n].text)):
            listeners[n](piece)
    return [answers[n] for n in range(len(prompts))]


def _written_answer(encoder: Encoder, prompt: PromptIds, ids: list[int], text: AnswerText, room: int) -> Answer:
    """The answer in generated ids; `room` is the number of tokens that the prompt left for it."""
    verbatim, prompt_ids = text.verbatim(ids), encoder.encode_prompt(prompt, room)
    body, verdict = text.read(verbatim)
    document, start = encoder.written_document(prompt, body, ids, room)
    stopped, ends = text.stopped(ids), encoder.ends(ids)
    return Answer(
        text=body,
        ids=document,
        start=start,
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(ids),
        generated=verbatim,
        lm_verdict=verdict,
        finish_reason="stop" if stopped or ends else "length",
        cut=stopped or not ends,
    )
