import numpy as np
import pytest
import reference as slow
import torch
from toy_points import blobs

from sdmlm import SDMEstimator
from sdmlm.estimator.label_errors import suspected_label_errors
from sdmlm.estimator.layer import points_of


def test_flipped_labels_are_found_first():
    X, y = blobs(400, 2, gap=5)
    flipped = [3, 50, 200, 399]
    y[flipped] = 1 - y[flipped]
    ids = [f"row {i}" for i in range(400)]
    estimator = SDMEstimator(rule="region", progress=False)
    estimator.fit(X, y, ids, documents={"row 3": "third"}, class_names=["a", "b"])
    errors = estimator.label_errors(4)
    assert {error.id for error in errors} == {f"row {i}" for i in flipped}
    assert [error.confidence for error in errors] == sorted((e.confidence for e in errors), reverse=True)
    for error in errors:
        assert error.label == y[int(error.id.split()[1])] == 1 - error.prediction
        assert error.q > 0
        assert error.d > 0
        assert error.text == ("third" if error.id == "row 3" else None)
    assert len(estimator.label_errors(1)) == 1
    assert estimator.label_errors(1)[0] == errors[0]


def test_only_confident_contradictions_count_and_the_order_is_that_of_confidence():
    z = torch.tensor([[3.0, 0.0]] * 5 + [[0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 1, 1, 1, 0])
    q = torch.tensor([9.0, 9.0, 0.0, 9.0, 30.0, 5.0], dtype=torch.float64)
    d = torch.tensor([1.0, 0.5, 1.0, 0.0, 0.3, 1.0], dtype=torch.float64)
    points = points_of(labels, z, q, torch.ones(6), d)
    found = suspected_label_errors(points, list("abcdef"), {"e": "text"}, 10)
    # a is right, c has q = 0, d is far from everything
    assert [error.id for error in found] == ["e", "b", "f"]
    assert found[0].confidence == pytest.approx(slow.confidence([3.0, 0.0], 30.0))
    assert (found[0].label, found[0].prediction, found[0].q, found[0].text) == (1, 0, 30.0, "text")
    assert found[0].d == np.float64(0.3)
    assert suspected_label_errors(points, list("abcdef"), {}, 2) == [
        found[0].__class__("e", 1, 0, found[0].confidence, 30.0, 0.3, None),
        found[1],
    ]
