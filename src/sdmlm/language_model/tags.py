"""The verification tags: how they are added to a document, and read from or removed from a text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VerificationTags:
    """The two tags, the two answers and the separator before them.

    Only this class decides which part of a text is a verification suffix (docs/security.md): these exact strings, at the end
    of a text. Tags elsewhere, or with another spelling or spacing, are ordinary text.
    """

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
        """All text after the body."""
        return self.separator + self.open + self.answer(verified)

    def strip_suffix(self, completion: str) -> str:
        """A completion of a training row without the whole verification suffix at its end, if it has one."""
        text = completion.rstrip()
        for verified in (True, False):
            if text.endswith(self.open + self.answer(verified)):
                return text.removesuffix(self.open + self.answer(verified)).removesuffix(self.separator)
        return completion

    def split(self, generated: str) -> tuple[str, bool | None]:
        """Body and verdict of a generated text, split at its last opening tag; the verdict is None if there is none."""
        body, tag, rest = generated.rpartition(self.open)
        if not tag:
            body, rest = generated, ""
        verdict = True if rest.startswith(self.yes) else False if rest.startswith(self.no) else None
        return body.removesuffix(self.separator), verdict

    def read(self, generated: str) -> tuple[str, bool | None]:
        """As `split`, but the body never ends in a tag or in the beginning of one, which a length limit may have cut."""
        body, verdict = self.split(generated)
        cut = overlap(body, self.separator + self.open) if self.separator else 0
        return self.bare(body[: len(body) - cut] if cut > len(self.separator) else body), verdict

    def bare(self, text: str) -> str:
        """A text without the verification suffixes at its end, whole or cut short, however many there are.

        A single character at the end that a tag begins with may be ordinary text, so it stays.
        """

        def before(at: int) -> int:
            return at - len(self.separator) * text.endswith(self.separator, 0, at)

        end, at = len(text), text.rfind(self.open)
        while True:
            partial = overlap(text[max(0, end - len(self.open)) : end], self.open)
            left = before(end - partial) if partial > 1 else end
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
        """The part of an unfinished text that belongs to the answer, whatever follows (more text, or a tag)."""
        end, marks = len(text), (self.separator + self.open, self.open, self.separator)
        while True:
            # All separators at once: a model that repeats newlines may write thousands.
            while self.separator and text.endswith(self.separator, 0, end):
                end -= len(self.separator)
            tail = text[max(0, end - len(marks[0])) : end]
            if not (partial := max(overlap(tail, mark) for mark in marks)):
                return text[:end]
            end -= partial


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that the mark begins with."""
    return next((k for k in range(min(len(text), len(mark)), 0, -1) if text.endswith(mark[:k])), 0)
