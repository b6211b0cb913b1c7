"""Feedback: documents judged by a person are added to the support of a model's SDM layer, and can be removed again.

The SDM layer on disk stays as it was fitted. `sdm/feedback/` holds the documents with their summaries h, which depend only
on the LM. Loading a model adds them to the support, so a document that was removed is simply not added.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdmlm.errors import NoSuchFeedback
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.language_model.encoding import VerificationTags
from sdmlm.storage.artifacts import CONFIG, DamagedError, locked, read_artifact, write_artifact

FEEDBACK = "feedback"
KIND, VERSION = "sdmlm feedback", 1
LOCK_SECONDS = 10.0  # a process that was stopped while it stores must not stop all others


@dataclass(frozen=True)
class FeedbackItem:
    """One document with a person's label: 1 if it follows the instructions, 0 if not."""

    id: str
    text: str  # the whole document, prompt included
    label: int
    h: Tensor


@dataclass(frozen=True)
class FeedbackLog:
    """All feedback that was given and not undone, in order, and the number of the next item."""

    items: tuple[FeedbackItem, ...] = ()
    next: int = 1

    def same(self, other: FeedbackLog) -> bool:
        """Whether both hold the same documents."""
        return (self.next, [i.id for i in self.items]) == (other.next, [i.id for i in other.items])

    def added(self, text: str, label: int, h: Tensor) -> FeedbackLog:
        """A log with one more item at its end."""
        item = FeedbackItem(f"feedback:{self.next}", text, label, h.float().cpu())
        return FeedbackLog((*self.items, item), self.next + 1)

    def find(self, text: str, label: int, h: Tensor) -> FeedbackItem | None:
        """The item that says the same: this document with this label."""
        h = h.float().cpu()
        for item in self.items:
            # Other documents may decode to the same text; the states of one differ a little between machines.
            if (item.text, item.label) == (text, label) and torch.allclose(item.h, h, rtol=1e-2, atol=1e-2):
                return item
        return None

    def without(self, id: str | None) -> tuple[FeedbackLog, FeedbackItem]:
        """A log without one item (default: the last), and the item that was removed."""
        if not self.items:
            raise NoSuchFeedback("There is no feedback to undo.")
        removed = next((item for item in self.items if item.id == id), None) if id is not None else self.items[-1]
        if removed is None:
            known = ", ".join(item.id for item in self.items[-5:])
            raise NoSuchFeedback(f"There is no feedback {id!r} to undo; the latest are {known}.")
        return FeedbackLog(tuple(item for item in self.items if item is not removed), self.next), removed


class FeedbackStore:
    """The feedback of one model: as this process uses it, and as this process last saw it on disk.

    `fitted` is the estimator without feedback, `fingerprint` that of the LM's weights.
    """

    def __init__(self, fitted: SDMEstimator, fingerprint: str, log: FeedbackLog | None = None) -> None:
        self.fitted, self.fingerprint = fitted, fingerprint
        self.log = self._stored = log or FeedbackLog()
        self._stamp: tuple[int, ...] = ()  # of the file that `refresh` looked at last

    @contextlib.contextmanager
    def latest(self, sdm: Path | None) -> Iterator[FeedbackLog]:
        """All feedback so far. With a folder, this includes feedback of other processes; they wait until the block ends."""
        if sdm is None:
            yield self.log
            return
        with locked(sdm, LOCK_SECONDS) as ours:
            if not ours:
                raise OSError(errno.EBUSY, "another process has been writing feedback for too long", str(sdm))
            stored = load_feedback(sdm, self.fingerprint)
            if stored.same(self._stored):
                yield self.log
            elif self.log.same(self._stored):
                yield stored
            else:
                raise ValueError(
                    f"The feedback in {sdm} was changed by another process, and this one holds some that was not saved: "
                    "open the model again."
                )

    def give(self, text: str, label: int, h: Tensor, sdm: Path | None) -> tuple[SDMEstimator, str]:
        """Add a document with a label; returns the estimator with it, and its id.

        Given twice, it counts once. So a client that got no answer (the server was killed) can safely send it again.
        """
        with self.latest(sdm) as log:
            known = log.find(text, label, h)
            log = log if known else log.added(text, label, h)
            return self.use(log, sdm), known.id if known else log.items[-1].id

    def take_back(self, id: str | None, sdm: Path | None) -> tuple[SDMEstimator, str]:
        """Remove one item (default: the last); returns the estimator without it, and its id."""
        with self.latest(sdm) as log:
            log, removed = log.without(id)
            return self.use(log, sdm), removed.id

    def use(self, log: FeedbackLog, sdm: Path | None) -> SDMEstimator:
        """Use a log, and store it if a folder is given; returns the estimator with its feedback."""
        estimator = with_feedback(self.fitted, log.items)  # all at once, to be identical to the state after a reload
        if sdm is not None:  # first: if it cannot be stored, nothing changes
            save_feedback(sdm, log, self.fingerprint)
            self._stored, self._stamp = log, _stamp(sdm)
        self.log = log
        return estimator

    def refresh(self, sdm: Path) -> SDMEstimator | None:
        """The estimator with what other processes have stored meanwhile; None where there is nothing new.

        Does not wait for a process that is storing something at this moment: ask again later.
        """
        if _stamp(sdm) == self._stamp:
            return None
        with locked(sdm, wait=0) as free:
            if not free:
                return None
            self._stamp = _stamp(sdm)  # before it is read: what cannot be read is not tried again
            stored = load_feedback(sdm, self.fingerprint)
        if stored.same(self._stored) or not self.log.same(self._stored):
            return None
        self._stored = stored
        return self.use(stored, None)

    def saved(self) -> None:
        """To be called after the log in use was written to the model's folder."""
        self._stored = self.log


def _stamp(sdm: Path) -> tuple[int, ...]:
    """What changes whenever feedback is stored, whatever the clock says; empty where there is none."""
    try:
        found = (sdm / FEEDBACK / CONFIG).stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def label_number(label: Any, tags: VerificationTags) -> int:
    """1 for True, "yes" or the tags' word for yes; 0 for False, "no" or the tags' word for no."""
    words = {"yes": 1, "no": 0, tags.yes.lower(): 1, tags.no.lower(): 0}
    known = label if isinstance(label, bool) else words.get(label.lower()) if isinstance(label, str) else None
    if known is None:
        raise ValueError(f'label is {label!r} but must be True, False, "yes" or "no".')
    return int(known)


def with_feedback(estimator: SDMEstimator, items: Sequence[FeedbackItem]) -> SDMEstimator:
    """A copy of the estimator with these documents in its support; the given estimator does not change."""
    if not items:
        return estimator
    h = torch.stack([item.h for item in items])
    texts: dict[int | str, str] = {item.id: item.text for item in items}
    return estimator.with_support(h, [item.label for item in items], [item.id for item in items], texts)


def save_feedback(sdm: Path, log: FeedbackLog, fingerprint: str) -> None:
    """Write `sdm/feedback/`, completely or not at all."""
    texts = [{"id": item.id, "text": item.text, "label": item.label} for item in log.items]
    h = torch.stack([item.h for item in log.items]) if log.items else torch.empty(0, 0)
    metadata = {"fingerprint": fingerprint, "next": log.next}
    write_artifact(sdm / FEEDBACK, KIND, VERSION, metadata, {"h": h}, {"items": texts})


def load_feedback(sdm: Path, fingerprint: str) -> FeedbackLog:
    """What `save_feedback` wrote, or an empty log; feedback for other weights is refused."""
    folder = sdm / FEEDBACK
    if not (folder / CONFIG).exists():
        return FeedbackLog()
    config, tensors, texts = read_artifact(folder, KIND, VERSION)
    try:
        h, next_number = tensors["h"], int(config["next"])
        items = tuple(
            FeedbackItem(str(item["id"]), str(item["text"]), int(item["label"]), row)
            for item, row in zip(texts["items"], h, strict=True)
        )
        same = config["fingerprint"] == fingerprint
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{folder} is damaged: restore it from a copy or delete it.") from error
    if not same:
        raise DamagedError(f"{folder} was given over other weights than the SDM layer beside it: delete it.")
    return FeedbackLog(items, next_number)
