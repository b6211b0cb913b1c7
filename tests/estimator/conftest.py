"""A small estimator, fitted once."""

import pytest
from estimator_checks import SMALL, blobs

from sdmlm import SDMEstimator


@pytest.fixture(scope="module")
def fitted():
    X, y = blobs()
    return SDMEstimator.published(alpha=0.8, **SMALL).fit(X, y)
