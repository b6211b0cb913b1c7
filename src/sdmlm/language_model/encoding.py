"""Documents as token ids: segments, contrastive masking, verification tags (spec section 7, the paper's Table 1).

A document is prompt + body + separator + `<verified>` + `Yes</verified>` (or `No</verified>`) + what closes the turn.
The segments are tokenised apart and joined, so no token ever straddles two of them and masks and positions are exact
for every tokenizer. The tags are ours to add, not the user's.

Rows follow TRL's preference format: `prompt`, `chosen`, `rejected`, either strings or lists of role/content. The model
decides how a prompt is put: with a chat template a string is one user message; without one the text stands as it is,
after BOS if the tokenizer adds one, and EOS closes the turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sdmlm.errors import BadRow

IGNORED = -100  # the label that PyTorch's and Hugging Face's losses skip
COLUMNS = ("prompt", "chosen", "rejected")
Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages


class PromptIds(list[int]):
    """A prompt as `Encoder.prompt_ids` has read it; an encoder takes it in place of the prompt, and need not read it again."""


@dataclass(frozen=True)
class VerificationTags:
    """The tags and the two answers: the one place where they are written."""

    open: str = "<verified>"
    close: str = "</verified>"
    yes: str = "Yes"
    no: str = "No"
    separator: str = "\n"

    def __post_init__(self) -> None:
        if not all((self.open, self.close, self.yes, self.no)):
            raise ValueError("VerificationTags: open, close, yes and no must not be empty.")
        if self.open in self.close or self.close in self.open:
            raise ValueError(
                f"VerificationTags: open ({self.open!r}) and close ({self.close!r}) must not contain each other."
            )
        if self.yes.startswith(self.no) or self.no.startswith(self.yes):
            raise ValueError(f"VerificationTags: yes ({self.yes!r}) and no ({self.no!r}) must not begin alike.")

    def answer(self, verified: bool) -> str:
        """What follows the opening tag: `Yes</verified>` or `No</verified>`."""
        return (self.yes if verified else self.no) + self.close

    def suffix(self, verified: bool) -> str:
        """All that follows the body."""
        return self.separator + self.open + self.answer(verified)

    def strip_suffix(self, completion: str) -> str:
        """The body of a completion of the user's data: a whole verification suffix at its end is taken off."""
        text = completion.rstrip()
        for verified in (True, False):
            if text.endswith(self.open + self.answer(verified)):
                return text.removesuffix(self.open + self.answer(verified)).removesuffix(self.separator)
        return completion

    def split(self, generated: str) -> tuple[str, bool | None]:
        """Body and verdict of a generated text, at its right-most opening tag; no legible verdict is None."""
        body, tag, rest = generated.rpartition(self.open)
        if not tag:
            body, rest = generated, ""
        verdict = True if rest.startswith(self.yes) else False if rest.startswith(self.no) else None
        return body.removesuffix(self.separator), verdict

    def read(self, generated: str) -> tuple[str, bool | None]:
        """As `split`, but the body never ends in a tag or the beginning of one, which a limit may have cut off."""
        body, verdict = self.split(generated)
        cut = overlap(body, self.separator + self.open) if self.separator else 0
        return self.bare(body[: len(body) - cut] if cut > len(self.separator) else body), verdict

    def bare(self, text: str) -> str:
        """A text without a verification suffix at its end, whole or cut off, however many there are.

        A single character that a tag begins with may be text like any other, and stays.
        """

        def before(at: int) -> int:
            return at - len(self.separator) * text.endswith(self.separator, 0, at)

        end, at = len(text), text.rfind(self.open)
        while True:
            begun = overlap(text[max(0, end - len(self.open)) : end], self.open)
            left = before(end - begun) if begun > 1 else end
            while at >= 0:
                rest = text[at + len(self.open) : left].strip()
                if at + len(self.open) > left:
                    at = text.rfind(self.open, 0, left)
                elif any(self.answer(verified).startswith(rest) for verified in (True, False)):
                    left = before(at)
                else:
                    break
            if left == end:
                return text[:end]
            end = left

    def certain(self, text: str) -> str:
        """Of a text that goes on, or goes on with a tag, what is surely part of the answer."""
        end, marks = len(text), (self.separator + self.open, self.open, self.separator)
        while True:
            # All separators at once: a model stuck on newlines writes thousands.
            while self.separator and text.endswith(self.separator, 0, end):
                end -= len(self.separator)
            tail = text[max(0, end - len(marks[0])) : end]
            if not (begun := max(overlap(tail, mark) for mark in marks)):
                return text[:end]
            end -= begun


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document: ids, labels (-100 where the loss is masked), index of the last token of our `<verified>`."""

    input_ids: list[int]
    labels: list[int]
    verified_at: int

    def __getitem__(self, name: str) -> Any:  # as a Hugging Face encoding may be read
        return getattr(self, name)


@dataclass
class Encoder:
    """Turns rows into ids for one tokenizer, which is read and never changed.

    `max_length` bounds prompt, completion and suffix together. A longer row is refused by name, or with
    `truncate_prompt` loses the left of its prompt; completion and suffix are never cut.
    """

    tokenizer: Any
    tags: VerificationTags = field(default_factory=VerificationTags)
    max_length: int | None = None
    truncate_prompt: bool = False

    def __post_init__(self) -> None:
        tok = self.tokenizer
        self._anchor = self._plain("a")
        self._anchor_length = len(self._spelled(self._anchor))
        self._adds_space = self.decode(self._anchor) != "a"
        self._anchors = {anchor: self._plain(anchor) for anchor in ("\n", ">", "a", ".", "0")}
        # What the tokenizer puts before a text (BOS or nothing). What it may put after it is no part of a prompt.
        whole = list(tok("a", verbose=False)["input_ids"])
        width = len(self._anchor)
        self._before = whole[: next((i for i in range(len(whole)) if whole[i : i + width] == self._anchor), 0)]
        # An added token is atomic: one that stands at the end of a turn ends it by itself.
        self._atomic = {i for i, token in tok.added_tokens_decoder.items() if token.content.strip()}
        self._lead, self.closing_ids = self._turn()
        self.open_ids = self.continuation(self.tags.open)
        self.answer_ids = {verified: self.continuation(self.tags.answer(verified)) for verified in (True, False)}
        for ids in (self.open_ids, *self.answer_ids.values()):
            if self.decode(ids) not in (self.tags.open, self.tags.answer(True), self.tags.answer(False)):
                raise ValueError(
                    f"This tokenizer cannot spell the verification tags (one of them reads back as "
                    f"{self.decode(ids)!r}): choose other VerificationTags."
                )
        # The same room for both answers, so that the prompt kept never depends on the answer that follows.
        self.suffix_length = len(self.open_ids) + max(map(len, self.answer_ids.values())) + len(self.closing_ids)
        self.stop_ids: set[int] = ({*self.closing_ids} & self._atomic) | ({tok.eos_token_id} - {None})
        self.pad_id: int = next((i for i in (tok.pad_token_id, tok.eos_token_id) if i is not None), 0)
        self._may_close: dict[int, bool] = {}

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def continuation(self, text: str) -> list[int]:
        """Ids of a text that follows other text.

        SentencePiece-style tokenizers put a space before every text they are given, which nobody wrote: there the
        text is read after an anchor, whose ids are then taken off again.
        """
        if self._adds_space and text:
            for anchor, head in self._anchors.items():
                both = self._plain(anchor + text)
                if both[: len(head)] == head:  # otherwise the anchor has merged with the text: try another
                    return both[len(head) :]
        return self._plain(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids that follow other ids, special tokens and a leading space included."""
        return self._spelled([*self._anchor, *ids])[self._anchor_length :]

    def _spelled(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _render(self, messages: Messages, begin: bool) -> str:
        plain = [dict(m) for m in messages]
        return str(self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=begin))

    def _turn(self) -> tuple[str, list[int]]:
        """White space that the chat template puts before an answer, and the ids that close the assistant's turn.

        Both are read off a rendered conversation. Line breaks at its very end belong to the next turn, and a turn
        that no added token closes is closed by EOS, for otherwise the model could not learn to stop.
        """
        eos = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        if not self.tokenizer.chat_template:
            return "", eos
        from jinja2 import TemplateError

        question, mark = {"role": "user", "content": "a"}, "SDMLM-BODY"
        try:
            begun = self._render([question], True)
            whole = self._render([question, {"role": "assistant", "content": mark}], False)
        except TemplateError as error:
            raise ValueError(
                f"The tokenizer's chat template refuses a question of the user with its answer ({error}): change it."
            ) from error
        before, found, after = whole.rpartition(mark)
        lead, ids = before.removeprefix(begun), self.continuation(after.rstrip() if found else "")
        return lead if lead.isspace() else "", ids if self._atomic.intersection(ids) else ids + eos

    def prompt_ids(self, prompt: Prompt | PromptIds, row: object = None) -> PromptIds:
        """The ids of a prompt, however long."""
        if isinstance(prompt, PromptIds):
            return prompt
        if not self.tokenizer.chat_template:
            text = prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt)
            ids = self._plain(text)
            return PromptIds(ids if self._before and ids[: len(self._before)] == self._before else self._before + ids)
        from jinja2 import TemplateError

        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return PromptIds(self._plain(self._render(messages, True)))
        except TemplateError as error:
            raise BadRow(row, f"the tokenizer's chat template refuses this prompt ({error}).") from error

    def _fitted(self, prompt_ids: list[int], following: int, row: object) -> list[int]:
        """The prompt's ids, refused or cut on the left where `following` more do not fit; BOS is kept."""
        if self.max_length is None or len(prompt_ids) + following <= self.max_length:
            return prompt_ids
        bos = prompt_ids[:1] if prompt_ids[:1] == [self.tokenizer.bos_token_id] else []
        room = self.max_length - following - len(bos)
        if self.truncate_prompt and room >= 1:
            return bos + prompt_ids[-room:]
        fix = "" if self.truncate_prompt else ", or set truncate_prompt=True"
        raise ValueError(
            f"{_name(row)} needs {len(prompt_ids)} tokens for its prompt and {following} after it but max_length is "
            f"{self.max_length}: raise max_length or drop the row{fix}."
        )

    def _parts(
        self, prompt: Prompt | PromptIds, completion: str | Messages, row: object
    ) -> tuple[list[int], list[int]]:
        """Ids of the prompt, and of body and separator."""
        body = self.tags.strip_suffix(completion_text(completion))
        lead = "" if body.startswith(self._lead) else self._lead
        body_ids = self.continuation(lead + body + self.tags.separator)
        prompt_ids = self.prompt_ids(prompt, row)
        return self._fitted(prompt_ids, len(body_ids) + self.suffix_length, row), body_ids

    def encode(
        self, prompt: Prompt | PromptIds, completion: str | Messages, verified: bool, row: object = None
    ) -> Encoded:
        """A whole document with its contrastive mask: a positive counts from its first completion token on, a
        negative from our `<verified>` on. A verification suffix that the completion already has is replaced."""
        prompt_ids, body_ids = self._parts(prompt, completion, row)
        suffix = self.open_ids + self.answer_ids[verified] + self.closing_ids
        masked = len(prompt_ids) + (0 if verified else len(body_ids))
        ids = prompt_ids + body_ids + suffix
        return Encoded(
            input_ids=ids,
            labels=[IGNORED] * masked + ids[masked:],
            verified_at=len(prompt_ids) + len(body_ids) + len(self.open_ids) - 1,
        )

    def encode_for_judging(
        self, prompt: Prompt | PromptIds, completion: str | Messages, row: object = None
    ) -> list[int]:
        """The document up to and including `<verified>`: what the SDM layer reads."""
        prompt_ids, body_ids = self._parts(prompt, completion, row)
        return prompt_ids + body_ids + self.open_ids

    def encode_prompt(self, prompt: Prompt | PromptIds, room: int = 1, row: object = None) -> list[int]:
        """The prompt to generate from, leaving at least `room` tokens before the suffix (where there is a bound)."""
        return self._fitted(self.prompt_ids(prompt, row), room + self.suffix_length, row)

    def ends(self, generated: Sequence[int]) -> bool:
        """Whether the newest of the generated ids ends the generation: end of turn, or closing tag complete."""
        newest = generated[-1]
        if newest in self.stop_ids:
            return True
        if newest not in self._may_close:  # most tokens cannot complete the tag: look closer only at those that can
            self._may_close[newest] = not {self.tags.close[-1], "\ufffd"}.isdisjoint(self.decode([newest]))
        window = len(self.tags.close.encode())  # each of its tokens spells at least one byte of the tag
        return self._may_close[newest] and self.tags.close in self.decode(generated[-window:])

    def turn(self, generated: Sequence[int]) -> list[int]:
        """Generated ids up to the end of the turn."""
        return list(itertools.takewhile(lambda i: i not in self.stop_ids, generated))

    def read(self, generated: Sequence[int]) -> tuple[str, bool | None]:
        """Answer and verdict in generated ids."""
        return self.tags.read(self.decode(self.turn(generated)))


def encode(
    tokenizer: Any,
    prompt: str | Messages,
    completion: str | Messages,
    verified: bool,
    *,
    tags: VerificationTags | None = None,
    max_length: int | None = None,
    truncate_prompt: bool = False,
    row: object = None,
) -> Encoded:
    """One document. For many, make one `Encoder` and call its `encode`."""
    encoder = Encoder(tokenizer, tags or VerificationTags(), max_length, truncate_prompt)
    return encoder.encode(prompt, completion, verified, row)


def collate(documents: Sequence[Encoded], pad_id: int) -> dict[str, Tensor]:
    """A batch, padded on the right: `input_ids`, `attention_mask`, `labels` (B, L) and `verified_at` (B,)."""
    longest = max(len(d.input_ids) for d in documents)

    def padded(rows: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])

    return {
        "input_ids": padded([d.input_ids for d in documents], pad_id),
        "attention_mask": padded([[1] * len(d.input_ids) for d in documents], 0),
        "labels": padded([d.labels for d in documents], IGNORED),
        "verified_at": torch.tensor([d.verified_at for d in documents]),
    }


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that the mark begins with."""
    return next((k for k in range(min(len(text), len(mark)), 0, -1) if text.endswith(mark[:k])), 0)


def completion_text(completion: str | Messages) -> str:
    """The text of a completion in either format."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def check_rows(rows: Sequence[Mapping[str, Any]], tags: VerificationTags | None = None) -> None:
    """Refuse a data set (a `datasets.Dataset` or a list of dicts) whose rows cannot be trained on."""
    tags = tags or VerificationTags()
    if len(rows) == 0:
        raise ValueError("The data set has no rows.")
    problems = [(n, problem) for n, row in enumerate(rows) if (problem := _problem(row, tags))]
    if problems:
        row_number, problem = problems[0]
        others = f" ({len(problems) - 1} more rows have a problem too.)" if len(problems) > 1 else ""
        raise BadRow(row_number, problem + others)


def _problem(row: Mapping[str, Any], tags: VerificationTags) -> str | None:
    for column in COLUMNS:
        if column not in row:
            found = ", ".join(map(repr, row)) or "none"
            return f"column {column!r} is missing (found: {found}): rows need 'prompt', 'chosen' and 'rejected'."
        value = row[column]
        if not isinstance(value, str):
            if not isinstance(value, Sequence) or not all(
                isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in value
            ):
                return (
                    f"{column!r} is {type(value).__name__}, not text: give a string or a list of "
                    "{'role': ..., 'content': ...} with text in both."
                )
            if column == "prompt" and value and value[-1]["role"] == "assistant":
                return "'prompt' ends with an assistant message: move that message to 'chosen' and 'rejected'."
            if column != "prompt" and [m["role"] for m in value] not in ([], ["assistant"]):
                return f"{column!r} must be exactly one assistant message: put the turns before it into 'prompt'."
        text = value if isinstance(value, str) else "".join(m["content"] for m in value)
        if not (text if column == "prompt" else tags.strip_suffix(text)).strip():
            return f"{column!r} is empty: fill it or drop the row."
    bodies = [tags.strip_suffix(completion_text(row[column])).strip() for column in ("chosen", "rejected")]
    if bodies[0] == bodies[1]:
        return (
            "'chosen' and 'rejected' are equal (tags and outer white space apart): 'rejected' must be a wrong answer."
        )
    return None


def _name(row: object) -> str:
    return "This row" if row is None else f"Row {row}"
