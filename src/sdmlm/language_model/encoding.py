"""Documents as token ids: segments, contrastive masking, verification tags (the paper's Table 1).

A document is prompt + body + separator + `<verified>` + `Yes</verified>` (or `No</verified>`) + what closes the turn.
The segments are tokenised separately and joined, so no token spans two of them, and masks and positions are exact for
every tokenizer. sdmlm adds the tags, users leave them out; no text from outside becomes a control token (`content`).

Rows follow TRL's preference format: `prompt`, `chosen`, `rejected`, either strings or lists of role/content. The tokenizer
decides how a prompt is formatted: with a chat template a string is one user message; without one the text is used as it
is, after BOS if the tokenizer adds one, and EOS closes the turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sdmlm.errors import BadRow, ControlText
from sdmlm.language_model.chat import ChatTemplate, Messages
from sdmlm.language_model.content import TextEncoder
from sdmlm.language_model.tags import VerificationTags, overlap

IGNORED = -100  # the label that PyTorch's and Hugging Face's losses skip
COLUMNS = ("prompt", "chosen", "rejected")
Prompt = str | Messages

__all__ = [
    "COLUMNS",
    "IGNORED",
    "Encoded",
    "Encoder",
    "Messages",
    "Prompt",
    "PromptIds",
    "VerificationTags",
    "check_rows",
    "collate",
    "completion_text",
    "encode",
    "overlap",
]  # fmt: skip


class PromptIds(list[int]):
    """The ids that `Encoder.prompt_ids` returned. Pass them instead of the prompt to avoid encoding it twice."""


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
        self._text = TextEncoder(tok)
        self._chat = ChatTemplate(self._text) if tok.chat_template else None
        # Ids that the tokenizer adds before a text (BOS or none). Those that it adds after a text are not part of a prompt.
        whole, anchor = list(tok("a", verbose=False)["input_ids"]), self._text.trusted("a", follows=False)
        starts = (i for i in range(len(whole)) if whole[i : i + len(anchor)] == anchor)
        self._before = whole[: next(starts, 0)]
        # An added token is atomic: one that stands at the end of a turn ends it by itself.
        self._atomic = {i for i, token in tok.added_tokens_decoder.items() if token.content.strip()}
        self._lead, self.closing_ids = self._turn()
        self.open_ids = self._text.trusted(self.tags.open)
        self.answer_ids = {verified: self._text.trusted(self.tags.answer(verified)) for verified in (True, False)}
        for ids in (self.open_ids, *self.answer_ids.values()):
            if self.decode(ids) not in (self.tags.open, self.tags.answer(True), self.tags.answer(False)):
                raise ValueError(
                    f"This tokenizer cannot spell the verification tags (one of them reads back as "
                    f"{self.decode(ids)!r}): choose other VerificationTags."
                )
        # The same length for both answers, so that how much of a prompt is kept does not depend on the answer after it.
        self.suffix_length = len(self.open_ids) + max(map(len, self.answer_ids.values())) + len(self.closing_ids)
        self.stop_ids: set[int] = ({*self.closing_ids} & self._atomic) | ({tok.eos_token_id} - {None})
        self.pad_id: int = next((i for i in (tok.pad_token_id, tok.eos_token_id) if i is not None), 0)
        self._may_close: dict[int, bool] = {}

    @property
    def control_ids(self) -> frozenset[int]:
        """Control ids: untrusted text is never encoded as one of these."""
        return self._text.control_ids

    def continuation(self, text: str) -> list[int]:
        """Ids of untrusted text that follows other text, without control tokens."""
        return self._text.content(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids that follow other ids, special tokens and a leading space included."""
        return self._text.decode(ids)

    def _turn(self) -> tuple[str, list[int]]:
        """White space that the chat template puts before an answer, and the ids that close the assistant's turn.

        Both are read off a rendered conversation. Line breaks at its end belong to the next turn. A turn that no added token
        closes is closed by EOS; otherwise the model could not learn to stop.
        """
        eos = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        if self._chat is None:
            return "", eos
        from jinja2 import TemplateError

        question, mark = {"role": "user", "content": "a"}, "SDMLM-BODY"
        try:
            start = self._chat.render([question])
            whole = self._chat.render([question, {"role": "assistant", "content": mark}], begin=False)
        except TemplateError as error:
            raise ValueError(
                f"The tokenizer's chat template refuses a question of the user with its answer ({error}): change it."
            ) from error
        before, rendered, after = whole.rpartition(mark)
        lead, ids = before.removeprefix(start), self._text.trusted(after.rstrip() if rendered else "")
        return lead if lead.isspace() else "", ids if self._atomic.intersection(ids) else ids + eos

    def prompt_ids(self, prompt: Prompt | PromptIds, row: object = None) -> PromptIds:
        """The ids of a prompt, however long."""
        if isinstance(prompt, PromptIds):
            return prompt
        from jinja2 import TemplateError

        try:
            if self._chat is None:
                text = prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt)
                return PromptIds(self._before + self._text.content(text, follows=False))
            return PromptIds(
                self._chat.ids([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
            )
        except ControlText as error:
            raise BadRow(row, str(error)) from error
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

    def _body_ids(self, completion: str | Messages, lead: str = "") -> list[int]:
        """Ids of body and separator; `lead` is the white space that the template puts before an answer."""
        body = self.tags.strip_suffix(completion_text(completion))
        return self.continuation(("" if body.startswith(lead) else lead) + body + self.tags.separator)

    def _parts(
        self, prompt: Prompt | PromptIds, completion: str | Messages, row: object
    ) -> tuple[list[int], list[int]]:
        """Ids of the prompt, and of body and separator."""
        try:
            body_ids = self._body_ids(completion, self._lead)
        except ControlText as error:
            raise BadRow(row, str(error)) from error
        prompt_ids = self.prompt_ids(prompt, row)
        return self._fitted(prompt_ids, len(body_ids) + self.suffix_length, row), body_ids

    def encode(
        self, prompt: Prompt | PromptIds, completion: str | Messages, verified: bool, row: object = None
    ) -> Encoded:
        """A whole document with its contrastive mask. The loss counts from the first completion token on in a positive, and
        from our `<verified>` on in a negative. A verification suffix that the completion already has is replaced."""
        prompt_ids, body_ids = self._parts(prompt, completion, row)
        suffix = self.open_ids + self.answer_ids[verified] + self.closing_ids
        masked = len(prompt_ids) + (0 if verified else len(body_ids))
        ids = prompt_ids + body_ids + suffix
        return Encoded(
            input_ids=ids,
            labels=[IGNORED] * masked + ids[masked:],
            verified_at=len(prompt_ids) + len(body_ids) + len(self.open_ids) - 1,
        )

    def encode_revision(
        self, prompt: Prompt | PromptIds, wrong: str | Messages, right: str | Messages, row: object = None
    ) -> Encoded | None:
        """A negative that is followed by the right answer in the same turn; None where both do not fit.

        It begins as the negative does, and its `verified_at` is the negative's. The loss counts the first verdict and all
        that follows.
        """
        negative = self.encode(prompt, wrong, False, row)
        begin = len(negative.input_ids) - len(self.closing_ids)
        correction = self.continuation(self.tags.separator) + self._body_ids(right) + self.open_ids
        correction += self.answer_ids[True] + self.closing_ids
        if self.max_length is not None and begin + len(correction) > self.max_length:
            return None
        ids, labels = negative.input_ids[:begin], negative.labels[:begin]
        return Encoded(ids + correction, labels + correction, negative.verified_at)

    def refused(self, bodies: Sequence[str]) -> list[int]:
        """How the assistant's turn begins after refused answers: each with the verdict No, as in `encode_revision`."""
        no = self.open_ids + self.answer_ids[False] + self.continuation(self.tags.separator)
        leads = [self._lead, *[""] * len(bodies)]
        return [i for body, lead in zip(bodies, leads, strict=False) for i in self._body_ids(body, lead) + no]

    def encode_for_judging(
        self, prompt: Prompt | PromptIds, completion: str | Messages, row: object = None
    ) -> list[int]:
        """The document up to and including `<verified>`: what the SDM layer reads."""
        return self.judged_document(prompt, completion, row)[0]

    def judged_document(
        self, prompt: Prompt | PromptIds, completion: str | Messages, row: object = None
    ) -> tuple[list[int], int]:
        """The document up to and including `<verified>`, and how many of its ids are the prompt's."""
        prompt_ids, body_ids = self._parts(prompt, completion, row)
        return prompt_ids + body_ids + self.open_ids, len(prompt_ids)

    def written_document(
        self, prompt: Prompt | PromptIds, body: str, generated: Sequence[int], room: int = 1
    ) -> tuple[list[int], int]:
        """As `judged_document`, of an answer that the LM wrote: never refused, unless the prompt is.

        Encoded again, its text may have too many tokens. Then the ids are those that were generated. `room` is the number of
        tokens that the prompt left for it.
        """
        prompt_ids = self.encode_prompt(prompt, room)
        try:
            return self.judged_document(prompt, body)
        except ValueError:
            return prompt_ids + self._up_to_tag(generated), len(prompt_ids)

    def _up_to_tag(self, generated: Sequence[int]) -> list[int]:
        """Generated ids up to and including their right-most `<verified>`, or with one appended.

        Control tokens that the LM wrote into its answer are left out: an answer must not contain turns.
        """
        turn, tag = self.turn(generated), self.open_ids
        ends = range(len(turn) - len(tag), -1, -1)
        body = turn[: next((n for n in ends if turn[n : n + len(tag)] == tag), len(turn))]
        return [i for i in body if i not in self.control_ids] + tag

    def encode_prompt(self, prompt: Prompt | PromptIds, room: int = 1, row: object = None) -> list[int]:
        """The prompt to generate from. If there is a `max_length`, it leaves at least `room` tokens before the suffix."""
        return self._fitted(self.prompt_ids(prompt, row), room + self.suffix_length, row)

    def ends(self, generated: Sequence[int]) -> bool:
        """Whether the newest of the generated ids ends the generation: the turn has ended, or the closing tag is complete."""
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
        """The answer and the verdict in generated ids."""
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
            columns = ", ".join(map(repr, row)) or "none"
            return f"column {column!r} is missing (found: {columns}): rows need 'prompt', 'chosen' and 'rejected'."
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
