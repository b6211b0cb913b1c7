"""What a language model did on one test set, prompt by prompt, and the file that keeps it.

`sdmlm.experiments.evaluate` makes an `Evaluation`; tables, reports and the model card read it without the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdmlm.estimator.region import HighReliabilityRegion, membership
from sdmlm.storage.artifacts import finite_or_none, none_as_infinity, write_text_atomically

EVALUATIONS = "evaluations"  # in the folder of a model: one file per test set
_COLUMNS = {  # of an evaluation, in the order of its file
    "y": np.int64, "prediction": np.int64, "accepted": np.bool_, "accepted_lower": np.bool_, "probability": np.float64,
    "q": np.int64, "d": np.float64, "q_prime": np.float64, "answer_right": np.bool_, "exact_match": np.bool_,
}  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """The results of a model on a test set: one entry per prompt in every array, and numbers of its SDM layer.

    `regions` are (alpha, q'_min, psi_0, psi_1) for a grid of alphas. Together with q', y_hat and the output they give the
    decisions at each alpha, so curves can be drawn without the model.
    """

    y: NDArray[np.int64]  # r(s+, generation)
    prediction: NDArray[np.int64]  # y_hat, the verdict of the SDM layer
    accepted: NDArray[np.bool_]  # in the high-reliability region
    accepted_lower: NDArray[np.bool_]  # also by the lower estimate
    probability: NDArray[np.float64]  # SDM(z') of y_hat
    q: NDArray[np.int64]
    d: NDArray[np.float64]
    q_prime: NDArray[np.float64]
    answer_right: NDArray[np.bool_]  # the answer between its tags is the reference, whatever surrounds it
    exact_match: NDArray[np.bool_]  # the whole text: body, formatting, and the LM's own verdict Yes
    generated: list[str]  # what the LM wrote
    alpha: float
    calibration: dict[str, float]  # metrics of the SDM layer over its calibration points
    regions: list[tuple[float, float, float, float]]

    def __len__(self) -> int:
        return len(self.y)

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Which verdicts of the SDM layer are right."""
        return np.asarray(self.y == self.prediction)

    def accepted_by_alpha(self) -> NDArray[np.bool_]:
        """Which generations would have been accepted at each alpha of `regions`, (N, number of regions)."""
        p = np.where(np.arange(2) == self.prediction[:, None], self.probability[:, None], 1 - self.probability[:, None])
        regions = [HighReliabilityRegion(alpha, q_min, tuple(psi)) for alpha, q_min, *psi in self.regions]
        return membership(regions, self.q_prime, p, self.prediction)

    def accepted_at(self, alpha: float) -> NDArray[np.bool_]:
        """Which generations would have been accepted at one alpha of `regions`."""
        return self.accepted_by_alpha()[:, [region[0] for region in self.regions].index(alpha)]

    def estimators(self) -> dict[str, NDArray[np.bool_]]:
        """What each rule accepts: everything, the high-reliability region, the same by the lower estimate."""
        return {"no-reject": np.ones(len(self), bool), "HR": self.accepted, "HR lower": self.accepted_lower}

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinities are null."""
        columns = {name: getattr(self, name).tolist() for name in _COLUMNS} | {"generated": self.generated}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return {
            "alpha": self.alpha,
            "calibration": {name: finite_or_none(value) for name, value in self.calibration.items()},
            "regions": [[finite_or_none(value) for value in region] for region in self.regions],
            "rows": rows,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Evaluation:
        """The inverse of `to_json`."""
        rows = content["rows"]
        arrays: dict[str, Any] = {n: np.array([row[n] for row in rows], dtype=kind) for n, kind in _COLUMNS.items()}
        calibration = {name: none_as_infinity(value) for name, value in content["calibration"].items()}
        regions = [(r[0], *(none_as_infinity(value) for value in r[1:4])) for r in content["regions"]]
        generated = [str(row["generated"]) for row in rows]
        return cls(**arrays, generated=generated, alpha=content["alpha"], calibration=calibration, regions=regions)


def evaluation_file(folder: str | Path, test: str) -> Path:
    """Where the evaluation of the model in `folder` on a test set is kept."""
    return Path(folder) / EVALUATIONS / f"{test}.json"


def write_evaluation(path: Path, evaluation: Evaluation, metadata: Mapping[str, Any]) -> None:
    """Write atomically, with one line per prompt, so that the file can be read by people too."""
    content = {"format_version": 1, **metadata, **evaluation.to_json()}
    rows = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in content.pop("rows"))
    head = json.dumps(content, ensure_ascii=False, allow_nan=False)
    write_text_atomically(path, f'{head[:-1]}, "rows": [\n{rows}\n]}}\n')


def read_evaluation(path: Path) -> tuple[Evaluation, dict[str, Any]]:
    """The evaluation in a file, and the metadata written with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Evaluation.from_json(content), {k: v for k, v in content.items() if k != "rows"}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is damaged: remove it, and the evaluation will be made again.") from error


def read_evaluations(folder: str | Path, layer: str) -> tuple[dict[str, Evaluation], list[Path]]:
    """Evaluations of the model in a folder, by test set, and the files that another SDM layer made.

    `layer` is the SHA-256 of the SDM layer that the model has now.
    """
    own, others = read_with_metadata(folder, layer)
    return {test: evaluation for test, (evaluation, _) in own.items()}, others


def read_with_metadata(
    folder: str | Path, layer: str | None
) -> tuple[dict[str, tuple[Evaluation, dict[str, Any]]], list[Path]]:
    """Like `read_evaluations`, each evaluation with its metadata; `layer` None accepts every SDM layer."""
    own, others = {}, []
    for path in sorted((Path(folder) / EVALUATIONS).glob("*.json")):
        evaluation, metadata = read_evaluation(path)
        if layer is None or metadata.get("sdm_sha256") == layer:
            own[path.stem] = evaluation, metadata
        else:
            others.append(path)
    return own, others
