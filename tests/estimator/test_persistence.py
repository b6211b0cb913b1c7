"""Estimators saved and loaded again."""

import copy

import numpy as np
import pytest
import torch
from estimator_checks import SMALL, blobs, same

from sdmlm import SDMEstimator


def test_numpy_parameters_survive_saving(tmp_path):
    X, y = blobs(60)
    parameters = {**SMALL, "exemplar_dim": np.int64(8), "alpha": np.float64(0.8), "learning_rate": np.float32(0.01)}
    estimator = SDMEstimator.published(**parameters).fit(X, y)
    estimator.save_pretrained(tmp_path / "e")
    assert same(SDMEstimator.from_pretrained(tmp_path / "e").score(X), estimator.score(X))


def test_the_digest_is_of_all_that_decisions_rest_on():
    X, y = blobs()
    split = {"calibration": (X[120:], y[120:])}
    one = SDMEstimator.published(**{**SMALL, "epochs": 1}).fit(X[:120], y[:120], **split)
    flipped = y[120:].copy()
    flipped[:10] = 1 - flipped[:10]
    others = [
        SDMEstimator.published(**{**SMALL, "epochs": 1}).fit(X[:120], y[:120], calibration=(X[120:], flipped)),
        SDMEstimator.published(**{**SMALL, "epochs": 1}, max_q=2).fit(X[:120], y[:120], **split),
        SDMEstimator.published(**{**SMALL, "epochs": 1}, seed=1).fit(X[:120], y[:120], **split),
    ]
    assert torch.equal(one.layers_[0].adaptor.weight, others[0].layers_[0].adaptor.weight)
    assert len({estimator.digest() for estimator in (one, *others)}) == 4
    assert one.digest() == SDMEstimator.published(**{**SMALL, "epochs": 1}).fit(X[:120], y[:120], **split).digest()
    for name in ("bias", "out_bias", "mean", "std"):
        changed = copy.deepcopy(one)
        getattr(changed.layers_[0].adaptor, name)[...] += 1e-3
        assert changed.digest() != one.digest(), name
    changed = copy.deepcopy(one)
    changed.layers_[0].support.predictions[0] = 1 - changed.layers_[0].support.predictions[0]
    assert changed.digest() != one.digest()


def test_the_cap_on_q_holds_everywhere(tmp_path):
    X, y = blobs()
    estimator = SDMEstimator.published(alpha=0.8, max_q=3, **SMALL).fit(X, y)
    estimator.save_pretrained(tmp_path)
    for one in (estimator, SDMEstimator.from_pretrained(tmp_path)):
        assert one.score(X).q.max() == 3
        assert one.layers_[0].calibration.q.max() == 3


@pytest.mark.parametrize("combine", ["best", "all"])
def test_saved_and_loaded_it_is_the_same(tmp_path, combine):
    X, y = blobs(classes=3)
    documents = {i: f"text {i}" for i in range(len(X))}
    estimator = SDMEstimator.published(alpha=0.8, combine=combine, **{**SMALL, "rounds": 2}).fit(
        X, y, documents=documents
    )
    estimator.recalibrate(0.7).add_to_support(X[:3] + 0.1, y[:3], ids=["a", "b", "c"])
    estimator.save_pretrained(tmp_path / "saved")
    loaded = SDMEstimator.from_pretrained(tmp_path / "saved")
    assert same(estimator.score(X), loaded.score(X))
    assert estimator.explain(X[:2]) == loaded.explain(X[:2])
    assert loaded.alpha_ == 0.7
    assert loaded.region_ == estimator.region_
    assert loaded.history_ == estimator.history_
    assert loaded.support_index(["b"]).tolist() == estimator.support_index(["b"]).tolist()


@pytest.mark.parametrize("kind", [list, torch.from_numpy, lambda x: x.astype(np.float64)])
def test_lists_tensors_and_doubles_are_fine(kind):
    X, y = blobs(60)
    assert same(
        SDMEstimator.published(**SMALL).fit(X, y).score(X),
        SDMEstimator.published(**SMALL).fit(kind(X), y).score(kind(X)),
    )
