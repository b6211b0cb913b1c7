"""The `sdm/` folder of a language model: its SDM layer, and lm.json, which says how documents are formatted for the model.

lm.json names the estimator and, by a fingerprint of the weights, the language model that it belongs to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.storage.artifacts import CONFIG, DamagedError, read_metadata, write_metadata

LM_FILE = "lm.json"
_REQUIRED = (
    "format_version", "sdmlm_version", "fingerprint", "tags", "max_length", "truncate_prompt", "max_new_tokens", "training",
)  # fmt: skip


def write_sdm_folder(folder: Path, estimator: SDMEstimator, metadata: Mapping[str, Any]) -> None:
    """Save an estimator with the metadata of its language model.

    lm.json is written last and names the estimator it belongs to, so that an interrupted save is recognised.
    """
    estimator.save_pretrained(folder)
    write_metadata(folder / LM_FILE, {**metadata, "estimator_sha256": layer_sha256(folder)}, indent=2)


def read_lm_metadata(folder: str | Path) -> dict[str, Any]:
    """lm.json of an `sdm/` folder; refused if it does not belong to the estimator in that folder."""
    folder = Path(folder)
    try:
        metadata = read_metadata(folder / LM_FILE)
        same = metadata["estimator_sha256"] == layer_sha256(folder)
        missing = [name for name in _REQUIRED if name not in metadata]
    except DamagedError as error:
        raise DamagedError(f"{folder / LM_FILE} is damaged ({error}): run sdmlm calibrate --force.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} holds no whole SDM layer of a language model: run sdmlm calibrate.") from error
    if not same:
        raise ValueError(
            f"{folder / LM_FILE} belongs to another SDM layer than the one beside it, as when a save was cut off: run "
            "sdmlm calibrate --force again."
        )
    if missing:
        raise DamagedError(f"{folder / LM_FILE} is damaged ({missing[0]} is missing): run sdmlm calibrate --force.")
    return metadata


def layer_sha256(folder: Path) -> str:
    """The identity of the SDM layer in an `sdm/` folder: a hash over its config.json."""
    return hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest()  # it holds the checksums of the other files


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """A hash over a sample of every weight in the state dict of an LM; it tells whether an SDM layer belongs to these weights.

    The sample is rounded to bfloat16, so that a model trained in float32 is recognised when it is loaded in bfloat16.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        flat = tensor.detach().flatten()
        some = flat[:: max(1, len(flat) // 64)].to("cpu", torch.bfloat16).contiguous()
        digest.update(name.encode() + str(tuple(tensor.shape)).encode() + some.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
