"""Rows for training: checked and encoded once, and then passed on in that form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdmlm.finetuning.negatives import EpochDocument
from sdmlm.language_model.encoding import Encoded, Encoder, check_rows, completion_text
from sdmlm.rewards import Reward, check_reward


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A row that was checked, with both of its documents as token ids."""

    columns: Mapping[str, Any]
    positive: Encoded
    negative: Encoded

    def document(self, positive: bool) -> Encoded:
        """The encoded positive or (static) negative document."""
        return self.positive if positive else self.negative


TrainingRows = list[TrainingRow]


def encode_rows(rows: Iterable[Mapping[str, Any]], encoder: Encoder, source: str) -> TrainingRows:
    """Encode rows that were checked already; the error for a row that is too long names its number and `source`."""
    encoded = []
    for number, row in enumerate(rows):
        name = f"{number} of {source}"
        positive = encoder.encode(row["prompt"], row["chosen"], True, row=name)
        negative = encoder.encode(row["prompt"], row["rejected"], False, row=name)
        encoded.append(TrainingRow(row, positive, negative))
    return encoded


def encode_document(encoder: Encoder, row: TrainingRow, document: EpochDocument) -> Encoded:
    """The document that represents a row in an epoch; a correction that does not fit is left out."""
    prompt = row.columns["prompt"]
    if document.correction is not None:
        revision = encoder.encode_revision(prompt, document.completion, document.correction, row=document.row)
        if revision is not None:
            return revision
    if document.source in ("generated", "other"):
        return encoder.encode(prompt, document.completion, False, row=document.row)
    return row.document(document.positive)


def training_rows(
    rows: Iterable[Mapping[str, Any]] | Sequence[TrainingRow], encoder: Encoder, reward: Reward, name: str
) -> TrainingRows:
    """Rows of any data set, checked and encoded; `TrainingRow`s are both already, and are returned unchanged."""
    given = list(rows)
    if given and all(isinstance(row, TrainingRow) for row in given):
        return given  # type: ignore[return-value]
    plain = [dict(row) for row in given]  # type: ignore[arg-type, call-overload]
    try:
        check_rows(plain, encoder.tags)
    except ValueError as error:
        raise ValueError(f"The {name} rows cannot be used. {error}") from error
    check_reward(reward, plain)
    return encode_rows(plain, encoder, f"the {name} rows")


def completion_room(encoder: Encoder, rows: Iterable[Mapping[str, Any]]) -> int:
    """Tokens that a generation may take: the longest completion of the rows and 8 more."""
    texts = [completion_text(row[name]) for row in rows for name in ("chosen", "rejected")]
    return max(len(encoder.continuation(text)) for text in texts) + encoder.suffix_length + 8
