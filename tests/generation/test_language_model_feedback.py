"""Feedback to an SDM language model, and its model card."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sdm_lm_checks import PROMPTS, all_same, same
from tiny_sdm_lm import calibration_rows

from sdmlm import SDMLanguageModel, SearchPolicy, calibrate_search
from sdmlm.errors import NoSuchFeedback
from sdmlm.evaluation.lm_evaluation import Evaluation, evaluation_file, write_evaluation
from sdmlm.generation import feedback as feedback_module
from sdmlm.language_model.sdm_folder import layer_sha256
from sdmlm.storage.artifacts import locked

# Feedback


def test_feedback_is_kept_and_can_be_undone_after_a_reload(copied: Path) -> None:
    lm = SDMLanguageModel.from_pretrained(copied)
    before = lm.verify(PROMPTS, ["zz"] * len(PROMPTS))
    wanted = lm.verify("abc=", "abc")
    base = lm.estimator
    first = lm.feedback("abc=", "abc", False)
    assert len(base.layers_[0].support) == 48  # whoever holds the old one is not disturbed
    after = lm.verify("abc=", "abc")
    assert (after.d_nearest, after.exemplars[0].id) == (pytest.approx(0, abs=1e-3), first)
    assert after.exemplars[0].label == 0
    assert after.exemplars[0].text == "abc=abc\n<verified>"
    assert (after.q, after.out_of_distribution) == (0, True)  # the nearest is not one that is rightly predicted
    second = lm.feedback("abd=", [{"role": "assistant", "content": "abd\n<verified>No</verified>"}], "yes")
    assert lm.feedback_ids == [first, second]

    again = SDMLanguageModel.from_pretrained(copied)
    assert again.feedback_ids == [first, second]
    assert again.digest() == lm.digest()
    same(again.verify("abc=", "abc"), lm.verify("abc=", "abc"))
    assert again.undo_feedback(first) == first
    with pytest.raises(ValueError, match="no feedback 'feedback:1'"):
        again.undo_feedback(first)
    third = again.feedback("abe=", "abe", "No", save=False)
    assert third not in (first, second)  # an id is never used twice
    assert SDMLanguageModel.from_pretrained(copied).feedback_ids == [second]
    assert again.undo_feedback() == third
    assert again.undo_feedback() == second
    same(again.verify("abc=", "abc"), wanted)
    last = SDMLanguageModel.from_pretrained(copied)
    assert last.feedback_ids == []
    all_same(last.verify(PROMPTS, ["zz"] * len(PROMPTS)), before)
    assert last.estimator.digest() == base.digest()
    with pytest.raises(ValueError, match="no feedback to undo"):
        last.undo_feedback()


def test_two_processes_give_feedback_and_none_is_lost(copied: Path) -> None:
    one, two = SDMLanguageModel.from_pretrained(copied), SDMLanguageModel.from_pretrained(copied)
    assert one.feedback("abc=", "abc", True) == "feedback:1"
    assert two.feedback("abd=", "abd", True) == "feedback:2"  # with that of the other
    assert two.feedback_ids == ["feedback:1", "feedback:2"]
    assert one.undo_feedback("feedback:2") == "feedback:2"
    again = SDMLanguageModel.from_pretrained(copied)
    assert again.feedback_ids == one.feedback_ids == ["feedback:1"]
    assert again.digest() == one.digest()
    two.feedback("abe=", "abe", True, save=False)
    with pytest.raises(ValueError, match="changed by another process"):
        two.feedback("abf=", "abf", True)
    assert SDMLanguageModel.from_pretrained(copied).feedback_ids == ["feedback:1"]


def test_the_same_feedback_counts_once(copied: Path) -> None:
    """Also after a restart, and where another process gave it: whoever got no answer may send it again."""
    lm, other = SDMLanguageModel.from_pretrained(copied), SDMLanguageModel.from_pretrained(copied)
    id = lm.feedback("abc=", "abc", True)
    digest = lm.digest()
    assert lm.feedback("abc=", "abc", "yes") == id
    assert other.feedback("abc=", "abc", True) == id
    assert SDMLanguageModel.from_pretrained(copied).feedback("abc=", "abc", True) == id
    again = SDMLanguageModel.from_pretrained(copied)
    assert again.feedback_ids == lm.feedback_ids == other.feedback_ids == [id]
    assert again.digest() == lm.digest() == other.digest() == digest
    ids = [id, lm.feedback("abc=", "abc", False), lm.feedback("abc=", "abd", True), lm.feedback("abd=", "abc", True)]
    assert lm.feedback_ids == ids
    assert len(set(ids)) == 4
    lm.undo_feedback(id)
    assert lm.feedback("abc=", "abc", True) not in ids  # taken back and given again


def test_what_others_store_is_seen_when_asked_for(copied: Path) -> None:
    lm, other = SDMLanguageModel.from_pretrained(copied), SDMLanguageModel.from_pretrained(copied)
    sdm = copied / "sdm"
    assert other.feedback_store.refresh(sdm) is None
    id = lm.feedback("abc=", "abc", False)
    estimator = other.feedback_store.refresh(sdm)
    assert estimator is not None
    assert estimator.digest() == lm.digest()
    other.estimator = estimator
    same(other.verify("abc=", "abc"), lm.verify("abc=", "abc"))
    assert other.feedback_store.refresh(sdm) is None  # seen
    assert lm.feedback_store.refresh(sdm) is None  # its own
    assert other.undo_feedback(id) == id
    assert lm.feedback_store.refresh(sdm).digest() == other.digest()
    with pytest.raises(NoSuchFeedback):
        lm.undo_feedback(id)
    other.feedback("abd=", "abd", True, save=False)
    lm.feedback("abe=", "abe", True)
    assert other.feedback_store.refresh(sdm) is None  # it holds some that was not saved, which would be lost


def test_a_process_that_stops_while_it_stores_does_not_stop_others(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, sdm = SDMLanguageModel.from_pretrained(copied), copied / "sdm"
    other = SDMLanguageModel.from_pretrained(copied)
    monkeypatch.setattr(feedback_module, "LOCK_SECONDS", 0.1)
    other.feedback("abc=", "abc", True)
    with locked(sdm):  # as a process that was frozen would hold it
        with pytest.raises(OSError, match="another process has been writing feedback for too long"):
            lm.feedback("abd=", "abd", True)
        assert lm.feedback_store.refresh(sdm) is None  # does not wait
    assert lm.feedback_ids == []
    assert lm.feedback_store.refresh(sdm) is not None
    assert lm.feedback("abd=", "abd", True) == "feedback:2"


def test_feedback_at_the_same_moment_is_not_lost(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock both would read the same log, and the second would write over the first."""
    models = [SDMLanguageModel.from_pretrained(copied) for _ in range(2)]
    both, load = threading.Barrier(2), feedback_module.load_feedback

    def slowly(*args: Any) -> Any:
        found = load(*args)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return found

    monkeypatch.setattr(feedback_module, "load_feedback", slowly)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: models[n].feedback(f"ab{'cd'[n]}=", "abc", True), range(2)))
    monkeypatch.undo()
    assert SDMLanguageModel.from_pretrained(copied).feedback_ids == ["feedback:1", "feedback:2"]


def test_saving_where_others_save_too_loses_nothing_of_theirs(copied: Path) -> None:
    one, two = SDMLanguageModel.from_pretrained(copied), SDMLanguageModel.from_pretrained(copied)
    one.feedback("abc=", "abc", True)
    policy = SearchPolicy(budget=1)
    calibrate_search(one, calibration_rows(), policy, progress=False)
    two.save_pretrained(copied)
    again = SDMLanguageModel.from_pretrained(copied)
    assert again.feedback_ids == two.feedback_ids == ["feedback:1"]
    assert again.digest() == two.digest() == one.digest()
    assert [c.policy for c in again.search_calibrations] == [c.policy for c in two.search_calibrations] == [policy]
    again.save_pretrained(copied)
    assert len(SDMLanguageModel.from_pretrained(copied).search_calibrations) == 1
    one.feedback("abd=", "abd", True)
    two.feedback("abe=", "abe", True, save=False)
    with pytest.raises(ValueError, match="changed by another process"):
        two.save_pretrained(copied)


def test_a_card_says_what_the_model_did_on_test_sets(copied: Path, tmp_path: Path) -> None:
    y = np.array([1, 1, 0, 1, 0])
    says = np.array([1, 0, 0, 1, 1])
    accepted = np.array([True, True, True, False, True])
    blank = {f.name: np.zeros(5) for f in dataclasses.fields(Evaluation)}
    columns = {"y": y, "prediction": says, "accepted": accepted, "generated": [""] * 5}
    done = Evaluation(**{**blank, **columns, "alpha": 0.8, "calibration": {}, "regions": []})
    layer = layer_sha256(copied / "sdm")
    write_evaluation(evaluation_file(copied, "mine"), done, {"sdm_sha256": layer})
    write_evaluation(evaluation_file(copied, "older"), done, {"sdm_sha256": "another"})
    lm = SDMLanguageModel.from_pretrained(copied)
    lm.save_pretrained(tmp_path / "new")
    lines = (tmp_path / "new" / "README.md").read_text().split("\n")
    assert "| mine | 5 | 60.0% | 0.8 | 80.0% | 50.0% | 40.0% | 50.0% |" in lines
    assert not any("| older" in line for line in lines)
    evaluation_file(copied, "mine").write_text("{")  # a card can do without
    SDMLanguageModel.from_pretrained(copied).save_pretrained(tmp_path / "other")
    assert "## On test sets" not in (tmp_path / "other" / "README.md").read_text()


def test_a_card_that_is_not_ours_stays(copied: Path) -> None:
    lm = SDMLanguageModel.from_pretrained(copied)
    (copied / "README.md").write_text("My own words.")
    lm.save_pretrained(copied)
    assert (copied / "README.md").read_text() == "My own words."
    (copied / "README.md").unlink()
    lm.save_pretrained(copied)
    lm.feedback("abc=", "abc", True)
    lm.save_pretrained(copied)
    assert "1 of them are feedback" in (copied / "README.md").read_text()


def test_feedback_that_cannot_be_kept_changes_nothing(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = SDMLanguageModel.from_pretrained(copied)
    digest = lm.digest()

    def full(*args: Any) -> None:
        raise ValueError("Could not save: No space left on device.")

    monkeypatch.setattr("sdmlm.generation.feedback.write_artifact", full)
    with pytest.raises(ValueError, match="No space"):
        lm.feedback("abc=", "abc", True)
    assert (lm.feedback_ids, lm.digest()) == ([], digest)
    for label in ("maybe", 1, None):
        with pytest.raises(ValueError, match="label is"):
            lm.feedback("abc=", "abc", label)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="The prompt is empty"):
        lm.feedback(" ", "abc", True)
    alone = SDMLanguageModel(lm.model, lm.tokenizer, lm.encoder, lm.estimator, lm.metadata)
    with pytest.raises(ValueError, match="no folder of its own"):
        alone.feedback("abc=", "abc", True)
    assert alone.feedback("abc=", "abc", True, save=False) == "feedback:1"
