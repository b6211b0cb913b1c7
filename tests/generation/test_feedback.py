"""Feedback on disk and in the support."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.generation.feedback import FeedbackLog, load_feedback, save_feedback, with_feedback


@pytest.fixture(scope="module")
def estimator() -> SDMEstimator:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 60)
    x = rng.normal(size=(60, 4)) + 3.0 * y[:, None]
    made = SDMEstimator.published(
        alpha=0.8, exemplar_dim=4, epochs=5, learning_rate=1e-2, rounds=1, progress=False, device="cpu"
    )
    return made.fit(x, y, documents={i: f"document {i}" for i in range(60)})


def test_given_and_taken_back(estimator: SDMEstimator, tmp_path: Path) -> None:
    h = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    log = FeedbackLog()
    for n in range(3):
        log = log.added(f"text {n}", n % 2, h[n])
    assert [item.id for item in log.items] == ["feedback:1", "feedback:2", "feedback:3"]
    shorter, gone = log.without("feedback:2")
    assert gone.text == "text 1"
    assert [item.id for item in shorter.items] == ["feedback:1", "feedback:3"]
    assert log.without(None)[1].id == "feedback:3"
    twice = shorter.added("new", 1, h[0]).added("newer", 1, h[0])  # an id is never used twice
    assert [item.id for item in twice.items[2:]] == ["feedback:4", "feedback:5"]

    save_feedback(tmp_path, shorter, "print")
    again = load_feedback(tmp_path, "print")
    assert again.next == 4
    for a, b in zip(again.items, shorter.items, strict=True):
        assert (a.id, a.text, a.label, a.h.tolist()) == (b.id, b.text, b.label, b.h.tolist())
    save_feedback(tmp_path, FeedbackLog((), 9), "print")
    assert load_feedback(tmp_path, "print") == FeedbackLog((), 9)
    assert load_feedback(tmp_path / "nowhere", "print") == FeedbackLog()


def test_the_estimator_given_stays_as_it_is(estimator: SDMEstimator, tmp_path: Path) -> None:
    digest, documents = estimator.digest(), dict(estimator.documents_)
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    before = estimator.score(x)
    log = FeedbackLog().added("one", 1, x[0]).added("two", 0, x[1])
    at_once = with_feedback(estimator, log.items)
    one_by_one = with_feedback(with_feedback(estimator, log.items[:1]), log.items[1:])
    estimator.save_pretrained(tmp_path)
    plainly = SDMEstimator.from_pretrained(tmp_path, device="cpu")
    plainly.add_to_support(x[:2], [1, 0], ["feedback:1", "feedback:2"])
    assert at_once.digest() == plainly.digest() != digest
    for other in (one_by_one, plainly):
        np.testing.assert_array_equal(at_once.score(x).q, other.score(x).q)
        np.testing.assert_allclose(at_once.score(x).d, other.score(x).d)
    assert at_once.documents_["feedback:2"] == "two"
    assert estimator.digest() == digest
    assert estimator.documents_ == documents
    np.testing.assert_array_equal(estimator.score(x).q, before.q)
    assert with_feedback(estimator, ()) is estimator


def test_other_documents_with_the_same_text_are_told_apart() -> None:
    """Text that spells control tokens decodes like the tokens themselves."""
    h = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    log = FeedbackLog().added("text", 1, h[0])
    assert log.find("text", 1, h[0] * (1 + 1e-5)) is log.items[0]  # computed on another machine
    assert log.find("text", 1, h[1]) is None
    assert log.find("text", 0, h[0]) is None
    assert log.find("other", 1, h[0]) is None


def killed_at(step: int, folder: Path, log: FeedbackLog) -> bool:
    """Save in a process that dies, without any clean-up, before its nth operation on files; whether it acknowledged."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        left = step

        def count(*_: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)

        sync = os.fsync
        os.fsync = lambda handle: (count(), sync(handle))[1]
        sys.addaudithook(lambda event, _: count() if event in FILE_EVENTS else None)
        try:
            save_feedback(folder, log, "weights")
            os.write(write, b"stored")
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    said = os.read(read, 10)
    os.close(read)
    return said == b"stored"


FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_between_any_two_writes_what_was_acknowledged_is_stored(tmp_path: Path) -> None:
    """A save that dies leaves the log before it or the new one, whole; one that was acknowledged, the new one."""
    h = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    before = FeedbackLog().added("first", 1, h[0])
    after = before.added("second", 0, h[1])
    seen = []
    for step in range(200):
        folder = tmp_path / str(step)
        save_feedback(folder, before, "weights")
        acknowledged = killed_at(step, folder, after)
        stored = load_feedback(folder, "weights")
        assert stored.same(before) or stored.same(after)
        assert stored.same(after) or not acknowledged
        assert [item.text for item in stored.items] == [
            item.text for item in (after if stored.same(after) else before).items
        ]
        save_feedback(folder, after, "weights")  # what is left of the dead does not get in the way
        assert load_feedback(folder, "weights").same(after)
        seen.append((stored.same(after), acknowledged))
        if acknowledged:
            break
    assert acknowledged
    assert len(seen) > 8  # it died in many places,
    assert {(False, False), (True, False), (True, True)} == set(seen)  # before the commit, after it, and not at all
