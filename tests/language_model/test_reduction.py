"""What the SDM layer reads of a summary: principal components of the states, and the likelihood figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from sdmlm.language_model.likelihood import FIGURES
from sdmlm.language_model.reduction import COMPONENTS, Reduction, load_reduction, save_reduction
from sdmlm.storage.artifacts import DamagedError


def summaries(n: int = 200) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(n, 30, generator=generator) @ torch.randn(30, 30, generator=generator) + 3
    summed = -torch.rand(n, 1, generator=generator) * 8
    figures = torch.cat([summed / 9, summed / 2, summed, torch.randn(n, 1, generator=generator), summed * 0 + 9], dim=1)
    return torch.cat([states, figures], dim=1)


def test_states_become_principal_components_of_standardised_columns() -> None:
    h = summaries()
    found = Reduction.fit(h)(h)[:, :COMPONENTS].numpy()
    states = StandardScaler().fit_transform(h[:, :30].double().numpy())
    wanted = PCA(COMPONENTS).fit_transform(states)
    signs = np.sign((found * wanted).sum(axis=0))
    np.testing.assert_allclose(found * signs, wanted, atol=2e-2 * np.abs(wanted).max())


def test_log_probabilities_enter_by_their_logarithm_and_keep_their_order() -> None:
    h = summaries()
    figures = Reduction.fit(h)(h)[:, COMPONENTS:].numpy()
    assert figures.shape[1] == len(FIGURES)
    for column, name in enumerate(FIGURES):
        given = h[:, 30 + column].numpy()
        if name.endswith("log_probability"):
            np.testing.assert_allclose(figures[:, column], -np.log(np.maximum(-given, 1e-4)), rtol=1e-5)
            assert np.array_equal(np.argsort(figures[:, column], kind="stable"), np.argsort(given, kind="stable"))
        else:
            np.testing.assert_array_equal(figures[:, column], given)
    sure = h[:1].clone()
    sure[0, 30:33] = 0.0  # a probability of 1 in float32
    assert bool(torch.isfinite(Reduction.fit(h)(sure)).all())


def test_a_reduction_is_kept_with_the_layer_that_it_belongs_to(tmp_path: Path) -> None:
    h = summaries()
    reduction = Reduction.fit(h)
    metadata = save_reduction(tmp_path, reduction)
    again = load_reduction(tmp_path, metadata)
    assert again is not None
    assert again.widths == (35, COMPONENTS + 5)
    torch.testing.assert_close(again(h), reduction(h))
    save_reduction(tmp_path, Reduction.fit(h + h.flip(0)))
    with pytest.raises(DamagedError, match="does not belong to the SDM layer"):
        load_reduction(tmp_path, metadata)
    assert save_reduction(tmp_path, None) == {}
    assert load_reduction(tmp_path, {}) is None
    assert not (tmp_path / "reduction").exists()
    assert reduction(h[:0]).shape == (0, COMPONENTS + 5)
