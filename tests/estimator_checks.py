"""What the tests of the estimator share."""

import dataclasses

import numpy as np

SMALL = {"exemplar_dim": 16, "epochs": 12, "learning_rate": 1e-2, "rounds": 1, "progress": False}


def blobs(n=240, classes=2, dim=6, seed=0, gap=2.2):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    return (rng.normal(size=(n, dim)) + gap * np.eye(classes, dim)[y]).astype(np.float32), y


def same(one, two):
    return all(
        np.array_equal(getattr(one, f.name), getattr(two, f.name), equal_nan=getattr(one, f.name).dtype.kind == "f")
        for f in dataclasses.fields(one)
    )
