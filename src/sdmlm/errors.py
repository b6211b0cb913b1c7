"""Error types. All are ValueErrors about bad input, with a message of one sentence; callers distinguish them by type."""

from __future__ import annotations


class SDMError(ValueError):
    """Base of the errors below."""


class BadSetting(SDMError):
    """A setting whose value cannot be used; `name` is the setting and `problem` the rest of the sentence."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name, self.problem = name, problem


class BadRow(SDMError):
    """A row of a data set that cannot be used; `row` is its number or name, None where there is only one."""

    def __init__(self, row: object, problem: str) -> None:
        super().__init__(f"{'This row' if row is None else f'Row {row}'}: {problem}")
        self.row, self.problem = row, problem


class NoOwnAnswers(SDMError):
    """An SDM layer over the model's own answers cannot be fitted here."""


class ControlText(SDMError):
    """Text from outside that would become a control token, and cannot be encoded in another way."""


class NoSuchFeedback(SDMError):
    """Feedback that is to be taken back, but was never given or is taken back already."""


class BadInput(SDMError):
    """A prompt or completion that cannot be used.

    `index` is its position in the list that was given. `problem` is the sentence without its subject, so that
    callers who handle a single item can name it in their own words (`named`).
    """

    subject = "Input"

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(f"{self.subject} {index}{problem}")
        self.index, self.problem = index, problem

    def named(self, subject: str | None = None) -> str:
        """The sentence about `subject` (default: "The prompt" or "The completion") instead of a position."""
        return (subject or f"The {self.subject.lower()}") + self.problem


class BadPrompt(BadInput):
    """A prompt that cannot be answered or judged."""

    subject = "Prompt"


class PromptTooLong(BadPrompt):
    """A prompt that leaves no room for an answer."""


class BadCompletion(BadInput):
    """A completion that cannot be judged."""

    subject = "Completion"


class CompletionTooLong(BadCompletion):
    """A completion that does not fit into the model's context together with its prompt."""

    subject = "Prompt"  # the sentence is about both: "Prompt 3 and its completion ..."
