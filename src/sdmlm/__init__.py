"""sdmlm: uncertainty-aware language models with Similarity-Distance-Magnitude estimators."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sdmlm.estimator.classifier import SDMClassifier
    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.estimator.region import HighReliabilityRegion
    from sdmlm.estimator.scores import Scores
    from sdmlm.finetuning.config import SDMConfig
    from sdmlm.finetuning.trainer import SDMTrainer
    from sdmlm.generation.language_model import SDMLanguageModel
    from sdmlm.generation.search import SearchPolicy
    from sdmlm.generation.search_calibration import calibrate_search
    from sdmlm.generation.search_certificate import certify_search
    from sdmlm.generation.verification import Verification

# Loaded when first used: `import sdmlm` and `sdmlm --help` need not wait for torch.
_WHERE = {
    "HighReliabilityRegion": "sdmlm.estimator.region",
    "SDMClassifier": "sdmlm.estimator.classifier",
    "SDMConfig": "sdmlm.finetuning.config",
    "SDMEstimator": "sdmlm.estimator.estimator",
    "SDMLanguageModel": "sdmlm.generation.language_model",
    "SDMTrainer": "sdmlm.finetuning.trainer",
    "Scores": "sdmlm.estimator.scores",
    "SearchPolicy": "sdmlm.generation.search",
    "Verification": "sdmlm.generation.verification",
    "calibrate_search": "sdmlm.generation.search_calibration",
    "certify_search": "sdmlm.generation.search_certificate",
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
    "certify_search",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'sdmlm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
