"""The summaries h of answers: from their generation where that gives the same h, otherwise from a pass over the document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sdmlm.generation.answers import Answer
from sdmlm.language_model.encoding import Encoder
from sdmlm.language_model.forward import inner_lm
from sdmlm.language_model.likelihood import VerdictTokens, answer_summaries, summary_width
from sdmlm.language_model.reading import embed_sequences
from sdmlm.language_model.reduction import Reduction


def check_summary(kind: str, model: Any, features: int, reduction: Reduction | None) -> None:
    """Refuse an SDM layer that reads other summaries than this model gives."""
    width = summary_width(kind, inner_lm(model).config.get_text_config().hidden_size)
    if features != width if reduction is None else reduction.widths != (width, features):
        raise ValueError(
            f"The SDM layer reads summaries {features} wide but this model gives {width}: it belongs to another model."
        )


def reading_precision(model: Any, metadata: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """A context with the precision in which the SDM layer's documents were read: autocast, if training used it."""
    name = metadata.get("autocast")
    return nullcontext() if name is None else torch.autocast(model.device.type, dtype=getattr(torch, name))


def add_missing(
    model: Any, encoder: Encoder, answers: Sequence[Answer], likelihood: bool, tokens_per_batch: int, progress: bool
) -> Tensor:
    """h of all answers (N, D); it is computed and stored for those that have none yet."""
    missing = [answer for answer in answers if answer.h is None]
    if missing:
        ids, lm = [answer.ids for answer in missing], inner_lm(model)
        if likelihood:
            starts = [answer.start for answer in missing]
            h = answer_summaries(lm, ids, starts, VerdictTokens.of(encoder), tokens_per_batch, progress)
        else:
            h = embed_sequences(lm, ids, tokens_per_batch=tokens_per_batch, progress=progress)
        for answer, row in zip(missing, h, strict=True):
            answer.h = row
    return torch.stack([answer.h.float().cpu() for answer in answers if answer.h is not None])
