"""The calibration of a search."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference as slow
from hypothesis import given
from hypothesis import strategies as st
from search_checks import HOT, PROMPTS, by_hand
from tiny_sdm_lm import calibration_rows

from sdmlm import SDMLanguageModel
from sdmlm.cli.commands.calibrate_search import summary
from sdmlm.estimator.layer import ALPHA_GRID
from sdmlm.estimator.region import HighReliabilityRegion
from sdmlm.generation import search_calibration
from sdmlm.generation.search import SearchPolicy
from sdmlm.generation.search_calibration import SearchCalibration, calibrate_search, verified_region
from sdmlm.storage.artifacts import read_metadata, write_metadata


@pytest.fixture
def lm(folder: Path) -> SDMLanguageModel:
    """A model of its own for each test, which may change it."""
    return SDMLanguageModel.from_pretrained(folder)


def follows(prompts: list[str], completions: list[str], chosen: list[str], **columns: Any) -> list[int]:
    return [int(c == right) for c, right in zip(completions, chosen, strict=True)]


@pytest.mark.parametrize("kind", ["resample", "continue"])
def test_calibration_is_over_final_answers(lm: SDMLanguageModel, kind: str) -> None:
    rows, policy = calibration_rows(), SearchPolicy(kind, budget=2, temperature=1.5)
    calibration = calibrate_search(lm, rows, policy, follows, save=False)
    layer = lm.estimator.layers_[0]
    support = {rows[i]["prompt"] for i in layer.support_ids}
    ids = [i for i in sorted(layer.calibration_ids) if rows[i]["prompt"] not in support]
    assert list(calibration.ids) == ids
    assert 10 < len(ids) < 48  # a prompt that is in both halves is left out
    finals = [by_hand(lm, rows[i]["prompt"], n, policy, 0.8) for n, i in enumerate(ids)]
    labels = [int(v.text == rows[i]["chosen"]) for i, (v, _) in zip(ids, finals, strict=True)]
    assert list(calibration.labels) == labels
    assert list(calibration.tries) == [tries for _, tries in finals]
    assert [v.verdict == "Yes" for v, _ in finals] == [bool(c) for c in calibration.predictions]
    p = np.array([[1 - v.probability_of_yes, v.probability_of_yes] for v, _ in finals])
    np.testing.assert_allclose(np.array(calibration.p), p, atol=1e-5)
    np.testing.assert_allclose(calibration.q_prime, [v.q_prime for v, _ in finals], rtol=1e-4)
    for alpha in (0.55, 0.6, 0.7, 0.8, 0.9):
        own = layer.region(alpha)
        finals_at = [(v.q_prime, v.probability_of_yes, y) for (v, _), y in zip(finals, labels, strict=True)]
        expected = slow.verified_region(finals_at, own.q_min, own.psi[1], alpha)
        region = calibration.region(alpha)
        assert region.q_min == pytest.approx(expected, rel=1e-4)
        assert region.psi == (math.inf, own.psi[1])
    assert calibration.region() is calibration.region(0.8)
    yes = [v.verdict == "Yes" and v.q_prime >= (1 - 1e-4) * calibration.region().q_min for v, _ in finals]
    assert calibration.accepted.tolist() == [
        a and v.probability_of_yes >= layer.region(0.8).psi[1] - 1e-5 for a, (v, _) in zip(yes, finals, strict=True)
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([0.2, 0.7, 0.9, 0.99]), st.sampled_from([0, 1, 1, 1, 1])),
        max_size=120,
    ),
    st.sampled_from([0.0, 3.0, math.inf]),
    st.sampled_from([0.3, 0.6, 0.8, 0.95]),
)
def test_the_region_of_a_search(finals: list[tuple[int, float, int]], q_min: float, alpha: float) -> None:
    q, yes, y = (np.array(c, dtype=float) for c in zip(*finals, strict=True)) if finals else (np.empty(0),) * 3
    p = np.stack([1 - yes, yes], axis=1)
    own = HighReliabilityRegion(alpha, q_min, (0.9, 0.8))
    region = verified_region(q, p, (yes > 0.5).astype(np.int64), y.astype(np.int64), own)
    assert region.q_min == slow.verified_region([(float(a), b, c) for a, b, c in finals], q_min, 0.8, alpha)
    assert (region.alpha, region.psi) == (alpha, (math.inf, 0.8))
    inside = region.contains(q, p, (yes > 0.5).astype(np.int64))
    assert region.q_min >= q_min  # never easier than for a single answer
    if inside.any():
        assert y[inside].mean() > alpha  # by a margin


def test_prompts_with_feedback_do_not_calibrate_a_search(lm: SDMLanguageModel) -> None:
    """The support holds an answer to them, as to the prompts of its own half."""
    rows = calibration_rows()
    before = calibrate_search(lm, rows, HOT, save=False)
    for i in before.ids[:3]:
        lm.feedback(rows[i]["prompt"], rows[i]["chosen"], True, save=False)
    asked = {rows[i]["prompt"] for i in before.ids[:3]}
    after = calibrate_search(lm, rows, HOT, save=False)
    assert list(after.ids) == [i for i in before.ids if rows[i]["prompt"] not in asked]


def test_a_search_that_is_right_too_seldom_is_hardly_ever_let_through() -> None:
    """New draws each time: the true accuracy, known here, is below alpha in the region found in at most 5%."""
    rng = np.random.default_rng(0)
    own = HighReliabilityRegion(0.9, 4.0, (0.9, 0.5))
    n, draws, wrongly, found = 150, 1000, 0, 0
    for _ in range(draws):
        q = rng.integers(1, 100, n).astype(float)
        truth = np.where(q < 32, 0.8, np.where(q < 64, 0.89, 0.99))  # of an answer with this q'
        y = (rng.random(n) < truth).astype(np.int64)
        region = verified_region(q, np.tile([0.1, 0.9], (n, 1)), np.ones(n, np.int64), y, own)
        every = np.arange(1, 100)
        kept = np.where(every < 32, 0.8, np.where(every < 64, 0.89, 0.99))[every >= region.q_min]
        found += len(kept) > 0
        wrongly += len(kept) > 0 and kept.mean() < 0.9
    assert found > 0.5 * draws
    assert wrongly <= 0.05 * draws


def forged(lm: SDMLanguageModel, policy: SearchPolicy, alpha: float = 0.8) -> SearchCalibration:
    """A calibration whose region is known: q'_min 16 and psi 0.9 for Yes."""
    return SearchCalibration(
        policy,
        alpha,
        lm.sampling(),
        lm.digest(),
        ids=tuple(range(60)),
        labels=(0, 1, *[0] * 18, *[1] * 40),
        predictions=(0, *[1] * 59),
        q_prime=(30.0, 3.0, *[15.0] * 18, *[31.0] * 40),
        p=((0.9, 0.1), (0.7, 0.3), *[(0.05, 0.95)] * 18, *[(0.1, 0.9)] * 40),
        tries=(1,) * 60,
        regions=tuple(HighReliabilityRegion(a, 2.0, (0.9, 0.9)) for a in sorted({*ALPHA_GRID, alpha})),
    )


def first_letter(prompts: Any, completions: Any, **_: Any) -> list[int]:
    return [int(c.startswith(p[0])) for p, c in zip(prompts, completions, strict=True)]


def test_without_a_reward_a_calibration_takes_that_of_the_sdm_layer(lm: SDMLanguageModel) -> None:
    rows, policy = calibration_rows(), SearchPolicy(budget=0)
    calibrated = partial(calibrate_search, lm, rows, policy, save=False, progress=False)
    exact, other = calibrated().labels, calibrated(first_letter).labels
    assert exact != other
    lm.metadata["reward"] = "test_search_calibration:first_letter"
    assert calibrated().labels == other
    assert calibrated("sdmlm.rewards:exact_match").labels == exact
    lm.metadata["reward"] = None
    with pytest.raises(ValueError, match="a reward that has no name: give one"):
        calibrated()
    with pytest.raises(ValueError, match="cannot be called with the columns"):
        calibrated(lambda prompts, completions: [])


def test_two_calibrations_at_the_same_moment_are_both_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    models = [SDMLanguageModel.from_pretrained(copied) for _ in range(2)]
    both, load = threading.Barrier(2), search_calibration.load_searches

    def slowly(path: Path) -> Any:
        found = load(path)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(2)
        return found

    monkeypatch.setattr(search_calibration, "load_searches", slowly)
    rows = calibration_rows()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: calibrate_search(models[n], rows, SearchPolicy(budget=n), progress=False), range(2)))
    monkeypatch.undo()
    kept = SDMLanguageModel.from_pretrained(copied).search_calibrations
    assert {c.policy.budget for c in kept} == {0, 1}


def test_the_summary_of_a_calibration(lm: SDMLanguageModel) -> None:
    facts = summary(dataclasses.replace(forged(lm, HOT), tries=(1,) * 58 + (2, 3)))
    assert facts["policy"] == dataclasses.asdict(HOT)
    assert (facts["prompts"], facts["right"], facts["verified"], facts["verified_right"]) == (60, 41, 40, 40)
    assert (facts["tries"], facts["q_min"], facts["psi"]) == (63 / 60, 16.0, 0.9)


def test_a_calibrated_search_is_decided_by_its_own_region(lm: SDMLanguageModel) -> None:
    lm.search_calibrations = (forged(lm, HOT),)
    region = lm.search_calibrations[0].region()
    assert (region.q_min, region.psi) == (16.0, (math.inf, 0.9))
    ours, theirs = lm.generate(PROMPTS, search=HOT), lm.generate(PROMPTS, search=dataclasses.replace(HOT, budget=2))
    plain = SDMLanguageModel(lm.model, lm.tokenizer, lm.encoder, lm.estimator, lm.metadata).generate(
        PROMPTS, search=HOT
    )
    assert all(v.calibrated for v in ours)
    assert not any(v.calibrated for v in theirs)
    for v, before in zip(ours, plain, strict=True):
        assert (v.text, v.q, v.tries, v.probability) == (before.text, before.q, before.tries, before.probability)
        assert v.accepted == v.verified == (v.q_prime >= 16 and v.probability_of_yes >= 0.9)
        assert "not calibrated" not in v.reason
        assert v.reason.startswith("Accepted" if v.accepted else "Rejected")
    assert any(v.accepted for v in plain)
    assert [v.accepted for v in ours] != [v.accepted for v in plain]
    # Anything else than the settings that it was made with is not calibrated.
    for change in ({"alpha": 0.81}, {"max_new_tokens": 9}, {"temperature": 0.5}, {"stop": "h"}, {"top_p": 0.5}):
        assert not lm.generate(PROMPTS[0], search=HOT, **change).calibrated
    lm.feedback("abc=", "abc", True, save=False)
    assert not lm.generate(PROMPTS[0], search=HOT).calibrated
    lm.undo_feedback(save=False)
    assert lm.generate(PROMPTS[0], search=HOT, seed=9).calibrated  # whatever the seed


def test_a_calibration_is_kept_with_the_model(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    lm = SDMLanguageModel.from_pretrained(copied)
    rows = calibration_rows()
    first = calibrate_search(lm, rows, HOT)
    other = calibrate_search(lm, rows, "continue", alpha=0.7, max_new_tokens=12, stop="h")
    again = calibrate_search(lm, rows, HOT, follows)
    assert again == first  # the same rows, the same reward, the same chance
    reopened = SDMLanguageModel.from_pretrained(copied)
    assert reopened.search_calibrations == lm.search_calibrations == (other, first)
    assert reopened.generate(PROMPTS[:3], search=HOT)[0].calibrated
    reopened.save_pretrained(tmp_path / "new")
    assert SDMLanguageModel.from_pretrained(tmp_path / "new").search_calibrations == (other, first)
    card = (tmp_path / "new" / "README.md").read_text()
    assert "## Calibrated searches" in card
    q_min = first.region().q_min
    share = f"{first.accepted.mean():.1%}"
    assert f"| resample | 3 | 0.8 | {f'{q_min:.4g}' if math.isfinite(q_min) else 'none'} | {share} |" in card

    # Two processes that each calibrate a search lose neither.
    one, two = SDMLanguageModel.from_pretrained(copied), SDMLanguageModel.from_pretrained(copied)
    mine = calibrate_search(one, rows, SearchPolicy("resample", 1))
    yours = calibrate_search(two, rows, SearchPolicy("resample", 2))
    assert SDMLanguageModel.from_pretrained(copied).search_calibrations == (other, first, mine, yours)

    path = copied / "sdm" / "search.json"
    facts = read_metadata(path)
    path.write_text(path.read_text().replace('"budget": 1', '"budget": 7'))
    with pytest.raises(ValueError, match="its checksum differs"):
        SDMLanguageModel.from_pretrained(copied)
    facts["searches"][0]["labels"] = [1]
    write_metadata(path, facts)
    with pytest.raises(ValueError, match="its columns differ in length"):
        SDMLanguageModel.from_pretrained(copied)
    write_metadata(path, {**facts, "format_version": 2})
    with pytest.raises(ValueError, match="newer sdmlm"):
        SDMLanguageModel.from_pretrained(copied)


def test_rows_that_are_not_the_calibration_rows(lm: SDMLanguageModel) -> None:
    rows = calibration_rows()
    with pytest.raises(ValueError, match="fitted over 96 rows and 95 are given"):
        calibrate_search(lm, rows[1:], HOT)
    with pytest.raises(ValueError, match="has another prompt than document"):
        calibrate_search(lm, rows[::-1], HOT)
    with pytest.raises(ValueError, match="column 'chosen' is missing"):
        calibrate_search(lm, [{"prompt": "abc="}], HOT)
    lm.folder = None
    with pytest.raises(ValueError, match="give save=False"):
        calibrate_search(lm, rows, HOT)
