"""The reduction of the summary "states+likelihood" to the few columns that the SDM layer reads (docs/method.md, 9).

The likelihood of an answer says most about whether it is right, but its five figures would have little weight among hundreds of
columns of states. So the states are reduced to their first principal components. Log-probabilities x are close to 0 for sure
answers and far below for others, so they are replaced by -log(-x). This keeps their order and is roughly linear in the log-odds
of being right.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdmlm.estimator.adaptor import standardization
from sdmlm.estimator.convex import principal_components
from sdmlm.language_model.likelihood import FIGURES
from sdmlm.language_model.sdm_folder import layer_sha256
from sdmlm.storage.artifacts import DamagedError, read_artifact, write_artifact

FOLDER = "reduction"  # in sdm/
KIND, VERSION = "sdmlm summary reduction", 1
COMPONENTS = 4
LOGARITHMS = [name.endswith("log_probability") for name in FIGURES]  # the columns that are replaced by -log(-x)
_LEAST = 1e-4  # in nats: two passes of the LM over a document differ by less


@dataclass(frozen=True)
class Reduction:
    """An affine map of the states; the likelihood figures follow, with logarithms of log-probabilities."""

    mean: Tensor  # (D - 5,)
    matrix: Tensor  # (D - 5, K)

    @classmethod
    def fit(cls, h: Tensor) -> Reduction:
        """Fit on the summaries (N, D) of documents."""
        states = h[:, : -len(FIGURES)]
        mean, std = standardization(states, "feature")
        axes = principal_components(((states - mean) / std).cpu().double().numpy(), COMPONENTS)
        matrix = torch.from_numpy(axes.T.copy()) / std.cpu().double()[:, None]
        return cls(mean.cpu().float(), matrix.float())

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of columns of a summary before and after the reduction."""
        return tuple(size + len(FIGURES) for size in self.matrix.shape)  # type: ignore[return-value]

    def __call__(self, h: Tensor) -> Tensor:
        """The reduced summaries (N, K + 5) of summaries (N, D), on the CPU."""
        if len(h) == 0:
            return torch.empty(0, self.widths[1])
        h = h.cpu().float()
        return torch.cat([(h[:, : -len(FIGURES)] - self.mean) @ self.matrix, log_figures(h)], dim=1)


def log_figures(h: Tensor) -> Tensor:
    """The likelihood figures (N, 5) of summaries (N, D), with log-probabilities x as -log(-x)."""
    figures = h[:, -len(FIGURES) :].clone()
    figures[:, LOGARITHMS] = -torch.log((-figures[:, LOGARITHMS]).clamp(min=_LEAST))
    return figures


# On disk


def save_reduction(sdm: Path, reduction: Reduction | None) -> dict[str, str]:
    """Write `sdm/reduction/`, or remove it; returns its entry for lm.json."""
    if reduction is None:
        shutil.rmtree(sdm / FOLDER, ignore_errors=True)
        return {}
    write_artifact(sdm / FOLDER, KIND, VERSION, {}, {"mean": reduction.mean, "matrix": reduction.matrix}, {})
    return {"reduction": layer_sha256(sdm / FOLDER)}


def load_reduction(sdm: Path, metadata: Mapping[str, Any]) -> Reduction | None:
    """What `save_reduction` wrote; None if the SDM layer reads whole summaries. `metadata` is lm.json."""
    if "reduction" not in metadata:
        return None
    _, tensors, _ = read_artifact(sdm / FOLDER, KIND, VERSION)
    if layer_sha256(sdm / FOLDER) != metadata["reduction"] or not {"mean", "matrix"} <= set(tensors):
        raise DamagedError(f"{sdm / FOLDER} does not belong to the SDM layer beside it: run sdmlm calibrate --force.")
    return Reduction(tensors["mean"], tensors["matrix"])
