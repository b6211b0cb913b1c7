"""Errors are told apart by type, and each is one sentence about one thing."""

from __future__ import annotations

import pytest

from sdmlm import errors


@pytest.mark.parametrize(
    ("error", "sentence", "alone"),
    [
        (errors.BadPrompt(3, " is empty."), "Prompt 3 is empty.", "The prompt is empty."),
        (errors.PromptTooLong(0, " has 9 tokens."), "Prompt 0 has 9 tokens.", "The prompt has 9 tokens."),
        (errors.BadCompletion(1, " is int."), "Completion 1 is int.", "The completion is int."),
        (
            errors.CompletionTooLong(2, " and its completion are too long."),
            "Prompt 2 and its completion are too long.",
            "The prompt and its completion are too long.",
        ),
    ],
)
def test_input_errors_know_their_position(error: errors.BadInput, sentence: str, alone: str) -> None:
    assert isinstance(error, errors.SDMError)
    assert isinstance(error, ValueError)
    assert (str(error), error.named()) == (sentence, alone)
    assert str(error.index) in sentence
    assert error.named("This") == "This" + error.problem


def test_settings_and_rows_are_named() -> None:
    setting = errors.BadSetting("epochs", "is 0 but must be at least 1.")
    assert (str(setting), setting.name) == ("epochs is 0 but must be at least 1.", "epochs")
    assert str(errors.BadRow(4, "it is empty.")) == "Row 4: it is empty."
    assert str(errors.BadRow(None, "it is empty.")) == "This row: it is empty."


def test_a_completion_is_not_a_prompt() -> None:
    assert not issubclass(errors.BadCompletion, errors.BadPrompt)
    assert issubclass(errors.PromptTooLong, errors.BadPrompt)
    assert issubclass(errors.CompletionTooLong, errors.BadCompletion)
