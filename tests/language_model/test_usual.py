"""How usual the likelihood of an answer is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdmlm.language_model.reduction import Reduction
from sdmlm.language_model.usual import UsualLikelihood


def test_usual_likelihood_gives_up_a_share_and_rejects_what_is_far() -> None:
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(5, 5)) * [1, 2, 30, 1, 10]
    h = np.concatenate([rng.normal(size=(3000, 3)), rng.normal(size=(3000, 5)) @ mixing], axis=1)
    usual = UsualLikelihood.fit(h[:2000])
    assert np.mean(usual.d(h[2000:]) < 0.1) == pytest.approx(0.1, abs=0.03)
    far = h[2000:].copy()
    far[:, -1] += 200
    assert np.mean(usual.d(far) >= 0.1) < 0.02
    other_states = h[2000:].copy()
    other_states[:, :3] += 100  # the states play no part
    np.testing.assert_array_equal(usual.d(other_states), usual.d(h[2000:]))


def test_a_reduced_summary_is_as_usual_as_the_whole_one() -> None:
    rng = np.random.default_rng(1)
    summed = -np.exp(rng.normal(size=500))
    figures = np.stack([summed / 9, summed / 2, summed, rng.normal(size=500), rng.normal(9, 1, 500)], axis=1)
    h = np.concatenate([rng.normal(size=(500, 12)), figures], axis=1)
    reduction = Reduction.fit(torch.from_numpy(h).float())
    reduced = reduction(torch.from_numpy(h).float()).numpy()
    whole = UsualLikelihood.fit(h[:300]).d(h[300:])
    np.testing.assert_allclose(UsualLikelihood.fit(reduced[:300], reduced=True).d(reduced[300:]), whole, atol=0.01)
