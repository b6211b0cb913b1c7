"""Points for tests of the estimator: Gaussian classes of unit spread, `gap` apart."""

from __future__ import annotations

import numpy as np


def blobs(n=240, classes=2, dim=6, seed=0, gap=2.2):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    return (rng.normal(size=(n, dim)) + gap * np.eye(classes, dim)[y]).astype(np.float32), y
