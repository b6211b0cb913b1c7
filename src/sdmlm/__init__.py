"""sdmlm: uncertainty-aware language models with Similarity-Distance-Magnitude estimators."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from sdmlm.classifier import SDMClassifier
    from sdmlm.config import SDMConfig
    from sdmlm.estimator import SDMEstimator
    from sdmlm.lm import SDMLanguageModel
    from sdmlm.region import HighReliabilityRegion
    from sdmlm.scores import Scores
    from sdmlm.search import SearchPolicy
    from sdmlm.search_calibration import calibrate_search
    from sdmlm.trainer import SDMTrainer
    from sdmlm.verification import Verification

# Loaded when first used: `import sdmlm` and `sdmlm --help` need not wait for torch.
_WHERE = {
    "HighReliabilityRegion": "sdmlm.region",
    "SDMClassifier": "sdmlm.classifier",
    "SDMConfig": "sdmlm.config",
    "SDMEstimator": "sdmlm.estimator",
    "SDMLanguageModel": "sdmlm.lm",
    "SDMTrainer": "sdmlm.trainer",
    "Scores": "sdmlm.scores",
    "SearchPolicy": "sdmlm.search",
    "Verification": "sdmlm.verification",
    "calibrate_search": "sdmlm.search_calibration",
}
__all__ = [
    "HighReliabilityRegion",
    "SDMClassifier",
    "SDMConfig",
    "SDMEstimator",
    "SDMLanguageModel",
    "SDMTrainer",
    "Scores",
    "SearchPolicy",
    "Verification",
    "__version__",
    "calibrate_search",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'sdmlm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
