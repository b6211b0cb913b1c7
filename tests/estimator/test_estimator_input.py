"""Bad input to the estimator is named."""

import numpy as np
import pytest
from estimator_checks import SMALL, blobs

from sdmlm import SDMEstimator

GOOD = blobs(40)


BROKEN = GOOD[0].copy()


BROKEN[3, 1] = np.nan


@pytest.mark.parametrize(
    ("X", "y", "options", "message"),
    [
        (np.empty((0, 4)), [], {}, "X is empty"),
        (np.empty((4, 0)), [0, 1, 0, 1], {}, "X is empty"),
        (GOOD[0], np.zeros(40, int), {}, "only one class"),
        (GOOD[0][:3], [0, 1, 2], {}, "at least 2 of each class"),
        (BROKEN, GOOD[1], {}, "row 3"),
        (GOOD[0] * np.float64(1e300), GOOD[1], {}, "infinite"),
        (GOOD[0], GOOD[1][:-1], {}, "40 rows but y has 39"),
        (GOOD[0], GOOD[1] + 0.5, {}, "not whole"),
        (GOOD[0], np.array(["a"] * 40), {}, "only one class"),
        (GOOD[0], np.array([None] * 40), {}, "mixes kinds of labels"),
        (GOOD[0][0], GOOD[1], {}, "must be a matrix"),
        ([["a"]], [0], {}, "not a matrix of numbers"),
        (*GOOD, {"alpha": 0.5}, "alpha"),
        (*GOOD, {"alpha": 1.2}, "alpha"),
        (*GOOD, {"epochs": 0}, "epochs"),
        (*GOOD, {"rounds": 1.5}, "rounds"),
        (*GOOD, {"learning_rate": -1}, "learning_rate"),
        (*GOOD, {"center": "row"}, "center"),
        (*GOOD, {"index": "hnsw"}, "index"),
        (*GOOD, {"max_q": 0}, "max_q"),
        (*GOOD, {"seed": None}, "seed"),
        (GOOD[0], np.where(np.arange(40) == 3, 10**12, GOOD[1]), {}, "1 point.s. of class 1000000000000"),
        (*GOOD, {"promise": "all"}, "promise"),
        (*GOOD, {"delta": 1.0}, "delta"),
        (*GOOD, {"epsilon": -0.1}, "epsilon"),
        (*GOOD, {"rule": "HR"}, "rule"),
        (*GOOD, {"combine": "mean"}, "combine"),
        (*GOOD, {"distance": "L1"}, "distance"),
        (*GOOD, {"learning_rate": None}, "without a learning_rate"),
    ],
)
def test_bad_input_to_fit_is_named(X, y, options, message):
    with pytest.raises(ValueError, match=message):
        SDMEstimator.published(**{**SMALL, **options}).fit(X, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": [1] * 40}, "an id twice"),
        ({"ids": [1, 2]}, "ids has 2"),
        ({"ids": [None, *range(39)]}, "holds None"),
        ({"ids": [False, *range(1, 40)]}, "holds False"),
        ({"calibration": (GOOD[0][:, :2], GOOD[1])}, "2 wide"),
        ({"calibration": (GOOD[0], GOOD[1] * 5)}, "label 5"),
        ({"calibration": (GOOD[0][:2], [0, 0])}, "class 1"),
        ({"calibration": (*GOOD, list(range(5, 45)))}, "both splits"),
        ({"calibration": (GOOD[0],)}, "calibration must be"),
        ({"documents": ["a"] * 40}, "documents must map"),
        ({"class_names": ["one"]}, "1 names but there are 2 classes"),
    ],
)
def test_bad_options_of_fit_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SDMEstimator.published(**SMALL).fit(*GOOD, **options)
