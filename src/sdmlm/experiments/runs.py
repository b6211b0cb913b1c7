"""The runs below a folder of `sdmlm replicate`: one model each, with its evaluations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdmlm.evaluation.lm_evaluation import EVALUATIONS, Evaluation, read_with_metadata
from sdmlm.evaluation.tables import csv_text
from sdmlm.experiments.answer_runs import StoredComparison, read_comparison
from sdmlm.storage.artifacts import SDM_FOLDER
from sdmlm.storage.record import RECORD, read_record

SETTINGS = ("none", "ce", "ce_hn", "sdm", "sdm_hn", "sdm_hn_rerun")  # the paper's, in its order
DATASETS = ("harvard", "test", "shifted")  # likewise


def setting_order(setting: str) -> tuple[int, str]:
    """A sort key: the paper's settings in its order, then others by name."""
    return (SETTINGS.index(setting) if setting in SETTINGS else len(SETTINGS), setting)


def dataset_order(dataset: str) -> tuple[int, str]:
    """A sort key: the paper's test sets in its order, then others by name."""
    return (DATASETS.index(dataset) if dataset in DATASETS else len(DATASETS), dataset)


@dataclass(frozen=True)
class Run:
    """One model, fine-tuned in one setting with one seed, and its evaluation on each test set."""

    family: str
    setting: str  # the name of the recipe: sdm_hn
    label: str  # the name to show: SDM + HN
    seed: int
    evaluations: dict[str, Evaluation]
    history: list[dict[str, Any]] = field(default_factory=list)  # log_history of the training
    task: str = "word_ordering"
    answers: StoredComparison | None = None  # the scores of its own answers to "test", and their rivals

    @property
    def calibration(self) -> dict[str, float]:
        """Metrics of the final SDM layer, which is the same for every test set."""
        return next(iter(self.evaluations.values())).calibration

    @property
    def alpha(self) -> float:
        return next(iter(self.evaluations.values())).alpha


def read_runs(folder: str | Path) -> list[Run]:
    """All runs below a folder of `sdmlm replicate` that were evaluated with their present SDM layer."""
    from sdmlm.language_model.sdm_folder import layer_sha256

    runs = []
    sources: dict[tuple[str, str], tuple[str, Path]] = {}
    for home in sorted(Path(folder).glob("*/seed-*")):
        if not any((home / EVALUATIONS).glob("*.json")):
            continue  # another process may still be training it
        layer = layer_sha256(home / SDM_FOLDER) if (home / SDM_FOLDER).exists() else None
        evaluated, others = read_with_metadata(home, layer)
        for path in others:
            warnings.warn(
                f"{path} is left out: it was made with another SDM layer than the present one. Run its recipe again.",
                stacklevel=1,
            )
        if not evaluated:
            continue
        for test, (_, own) in evaluated.items():
            rows = str(own.get("rows_sha256"))
            known, where = sources.setdefault((str(own.get("family")), test), (rows, home))
            if known != rows:
                raise ValueError(
                    f"{where} and {home} were evaluated on different rows of {test}: keep them in two folders."
                )
        metadata = next(iter(evaluated.values()))[1]
        try:
            names = {name: metadata[name] for name in ("family", "setting", "label", "seed")}
        except KeyError as error:
            raise ValueError(f"{home} is damaged: its evaluations lack {error}.") from error
        record = read_record(home)
        if record is None:
            raise ValueError(f"{home} is damaged: it has evaluations but no {RECORD}.")
        evaluations = {test: evaluation for test, (evaluation, _) in evaluated.items()}
        task = evaluated_task(metadata, record)
        answers = read_comparison(home, layer)
        runs.append(Run(**names, evaluations=evaluations, history=record["log_history"], task=task, answers=answers))
    return runs


def evaluated_task(metadata: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The task of an evaluation; in older files, which do not name it, that of the training."""
    return str(metadata.get("task") or record["settings"].get("task"))


def training_csv(runs: Sequence[Run]) -> str:
    """The training logs of all runs: one line per log entry, one column per number."""
    logs = [(run, row) for run in runs for row in run.history]
    names = sorted({name for _, row in logs for name in row} - {"step", "epoch"})
    return csv_text(
        ["family", "model", "seed", "step", "epoch", *names],
        [
            [run.family, run.label, run.seed, *(row.get(name) for name in ("step", "epoch", *names))]
            for run, row in logs
        ],
    )
