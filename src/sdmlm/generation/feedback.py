"""Feedback: documents judged by a person that join the support of a model's SDM layer, and can leave it again.

The SDM layer on disk stays as it was fitted. `sdm/feedback/` holds the documents with their summaries h, which do not depend
on the layer, only on the LM; loading adds them to the support, so taking one back is to leave it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.storage.artifacts import CONFIG, DamagedError, read_artifact, write_artifact

FEEDBACK = "feedback"
KIND, VERSION = "sdmlm feedback", 1


@dataclass(frozen=True)
class Feedback:
    """One document with a person's label: 1 where it follows the instructions, 0 where it does not."""

    id: str
    text: str  # the whole document, prompt included
    label: int
    h: Tensor


@dataclass(frozen=True)
class FeedbackLog:
    """All that was given and not taken back, in order, and the number of the next."""

    items: tuple[Feedback, ...] = ()
    next: int = 1

    def same(self, other: FeedbackLog) -> bool:
        """Whether both hold the same documents."""
        return (self.next, [i.id for i in self.items]) == (other.next, [i.id for i in other.items])

    def added(self, text: str, label: int, h: Tensor) -> FeedbackLog:
        """With one more at its end."""
        item = Feedback(f"feedback:{self.next}", text, label, h.float().cpu())
        return FeedbackLog((*self.items, item), self.next + 1)

    def without(self, id: str | None) -> tuple[FeedbackLog, Feedback]:
        """Without one of them (default: the last), and that one."""
        if not self.items:
            raise ValueError("There is no feedback to undo.")
        gone = next((item for item in self.items if item.id == id), None) if id is not None else self.items[-1]
        if gone is None:
            known = ", ".join(item.id for item in self.items[-5:])
            raise ValueError(f"There is no feedback {id!r} to undo; the latest are {known}.")
        return FeedbackLog(tuple(item for item in self.items if item is not gone), self.next), gone


def with_feedback(estimator: SDMEstimator, items: Sequence[Feedback]) -> SDMEstimator:
    """A copy of the estimator with these documents in its support; the one given stays as it is."""
    if not items:
        return estimator
    h = torch.stack([item.h for item in items])
    texts: dict[int | str, str] = {item.id: item.text for item in items}
    return estimator.with_support(h, [item.label for item in items], [item.id for item in items], texts)


def save_feedback(sdm: Path, log: FeedbackLog, fingerprint: str) -> None:
    """Write `sdm/feedback/`, whole or not at all."""
    texts = [{"id": item.id, "text": item.text, "label": item.label} for item in log.items]
    h = torch.stack([item.h for item in log.items]) if log.items else torch.empty(0, 0)
    facts = {"fingerprint": fingerprint, "next": log.next}
    write_artifact(sdm / FEEDBACK, KIND, VERSION, facts, {"h": h}, {"items": texts})


def load_feedback(sdm: Path, fingerprint: str) -> FeedbackLog:
    """What `save_feedback` wrote, nothing where there is none; refused where it is of other weights."""
    folder = sdm / FEEDBACK
    if not (folder / CONFIG).exists():
        return FeedbackLog()
    config, tensors, texts = read_artifact(folder, KIND, VERSION)
    try:
        h, next_number = tensors["h"], int(config["next"])
        items = tuple(
            Feedback(str(item["id"]), str(item["text"]), int(item["label"]), row)
            for item, row in zip(texts["items"], h, strict=True)
        )
        same = config["fingerprint"] == fingerprint
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{folder} is damaged: restore it from a copy or delete it.") from error
    if not same:
        raise DamagedError(f"{folder} was given over other weights than the SDM layer beside it: delete it.")
    return FeedbackLog(items, next_number)
