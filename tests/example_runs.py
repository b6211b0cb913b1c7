"""Made-up runs of an experiment, for tests of tables and reports."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from sdmlm.estimator.layer import ALPHA_GRID
from sdmlm.evaluation.lm_evaluation import Evaluation
from sdmlm.experiments.runs import Run

CALIBRATION = {
    "sdm_loss": 0.3, "q_min": 12.5, "psi_0": 0.96, "psi_1": 0.97, "mean_q_0": 40.25, "mean_q_1": 30.5,
    "sdm_loss_0": 0.25, "sdm_loss_1": 0.35, "sdm_accuracy_0": 0.9, "sdm_accuracy_1": 0.8, "admitted": 0.4,
}  # fmt: skip


def evaluation(seed: int, n: int = 200, admit: float = 0.4, right: float = 0.9, alpha: float = 0.95) -> Evaluation:
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < 0.7).astype(np.int64)
    y_hat = np.where(rng.random(n) < right, y, 1 - y)
    accepted = rng.random(n) < admit
    lower = accepted & (rng.random(n) < 0.7)
    answer = rng.random(n) < 0.8
    exact = answer & (rng.random(n) < 0.9)
    q = rng.integers(0, 50, n)
    return Evaluation(
        y, y_hat, accepted, lower, rng.uniform(0.5, 1, n), q, rng.random(n), q * 0.5, answer, exact, ["text"] * n, alpha,
        dict(CALIBRATION), regions(),
    )  # fmt: skip


def regions() -> list[tuple[float, float, float, float]]:
    """Narrower with alpha, with thresholds that differ between the classes; none at 0.95 and above."""
    found = [(a, 20 * (a - 0.5), a - 0.1, a - 0.2) for a in ALPHA_GRID if a < 0.95]
    return [*found, *((a, math.inf, math.inf, math.inf) for a in ALPHA_GRID if a >= 0.95)]


def run(setting: str, seed: int, family: str = "fam", admit: float = 0.4, **changes: Any) -> Run:
    names = {"sdm_hn": "SDM + HN", "ce_hn": "CE + HN", "none": "No fine-tuning"}
    found = {
        name: evaluation(1000 * seed + 10 * len(setting) + k, admit=admit, **changes)
        for k, name in enumerate(["test", "harvard"])
    }
    return Run(family, setting, names.get(setting, setting), seed, found)


def some_runs() -> list[Run]:
    """Two settings with three seeds and one with a single seed, out of order; one run admits nothing."""
    empty = run("none", 7, admit=0.0)
    nothing = {**CALIBRATION, "q_min": math.inf, "psi_0": math.inf, "psi_1": math.inf}
    found = {name: dataclasses.replace(e, calibration=nothing) for name, e in empty.evaluations.items()}
    runs = [run("sdm_hn", s, admit=0.6) for s in (2, 0, 1)] + [run("ce_hn", s) for s in (1, 0, 2)]
    return [*runs, dataclasses.replace(empty, evaluations=found)]


def scripted(setting: str, seed: int, accepted: list[bool], right: list[bool]) -> Run:
    e = evaluation(0, n=len(accepted))
    y = np.ones(len(accepted), dtype=np.int64)
    e = dataclasses.replace(e, y=y, prediction=np.array(right, dtype=np.int64), accepted=np.array(accepted))
    return Run("fam", setting, setting, seed, {"test": e})
