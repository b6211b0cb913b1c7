"""Reading prompts and completions. One that cannot be answered or judged is an error that names its position in the list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdmlm.errors import BadCompletion, BadPrompt, BadRow, CompletionTooLong, PromptTooLong, SDMError
from sdmlm.generation.answers import Answer
from sdmlm.language_model.encoding import Encoder, PromptIds, completion_text

_NOT_TEXT = " holds half of a surrogate pair, which is not text: remove it."


def as_list(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether a single one was given."""
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise ValueError(
            f"prompts is {type(prompts).__name__}: give text, a conversation (a list of role/content), or a list of these."
        )
    return ([prompts], True) if is_conversation(prompts) else (list(prompts), False)


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, rather than a list of prompts."""
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)


def read_prompt(encoder: Encoder, prompt: Any, index: int = 0) -> PromptIds:
    """The token ids of a prompt; one that cannot be answered is refused."""
    if not isinstance(prompt, str):
        if not isinstance(prompt, Sequence) or not prompt or not all(map(_is_message, prompt)):
            raise BadPrompt(
                index,
                f" is {type(prompt).__name__}: give text, or a conversation, which is a list of "
                "{'role': ..., 'content': ...} with text in both.",
            )
        if prompt[-1]["role"] == "assistant":
            raise BadPrompt(index, " ends with an assistant message: end with what is to be answered.")
    text = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
    last = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if not last.strip():
        raise BadPrompt(index, " is empty: write something to answer.")
    if not _is_unicode(text):
        raise BadPrompt(index, _NOT_TEXT)
    try:
        ids = encoder.prompt_ids(prompt)
    except BadRow as error:
        raise BadPrompt(index, f": {error.problem}") from error
    if encoder.max_length is None:
        return ids
    room = encoder.max_length - encoder.suffix_length - 1  # at least one token for the answer
    if len(ids) <= room or (encoder.truncate_prompt and room > 1):
        return ids
    raise PromptTooLong(index, f" has {len(ids)} tokens, but the model's context leaves room for {room}: shorten it.")


def read_completion(encoder: Encoder, prompt: PromptIds, completion: Any, index: int = 0) -> Answer:
    """A given completion as an answer to be judged."""
    if not isinstance(completion, str) and not (
        isinstance(completion, Sequence) and len(completion) == 1 and _is_message(completion[0])
    ):
        raise BadCompletion(index, f" is {type(completion).__name__}: give text, or a list with one assistant message.")
    text = encoder.tags.bare(completion_text(completion))
    if not _is_unicode(text):
        raise BadCompletion(index, _NOT_TEXT)
    try:
        ids, start = encoder.judged_document(prompt, text)
    except BadRow as error:
        raise BadCompletion(index, f": {error.problem}") from error
    except ValueError as error:
        raise CompletionTooLong(
            index,
            f" and its completion are longer together than the {encoder.max_length} tokens of the model's context: "
            "shorten them.",
        ) from error
    length = len(encoder.encode_prompt(prompt))
    return Answer(text, ids, length, len(ids) - length, start=start)


def find_too_long(
    encoder: Encoder, prompts: Sequence[Any], completions: Sequence[Any] | None = None
) -> dict[int, SDMError]:
    """The prompts (with their completions, if given) that do not fit into the context, by position."""
    too_long: dict[int, SDMError] = {}
    for n, prompt in enumerate(prompts):
        try:
            ids = read_prompt(encoder, prompt, n)
            if completions is not None:
                read_completion(encoder, ids, completions[n], n)
        except (PromptTooLong, CompletionTooLong) as error:
            too_long[n] = error
    return too_long


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _is_unicode(text: str) -> bool:
    """Whether a string can be encoded as UTF-8: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
