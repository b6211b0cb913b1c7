"""Experiments in several settings and seeds: one model on one test set, and the runs below a folder.

`evaluate` lets an SDM language model answer the prompts of a test set and keeps what the final SDM layer said about each
generation; a `Run` is one model with its evaluations. `sdmlm.experiments.tables` makes the paper's tables of them.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import pkgutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdmlm.estimator.region import HighReliabilityRegion, membership
from sdmlm.storage.artifacts import SDM_FOLDER, finite_or_none, none_as_infinity, write_text_atomically
from sdmlm.storage.record import RECORD, read_record

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel
    from sdmlm.rewards import Reward

SETTINGS = ("none", "ce", "ce_hn", "sdm", "sdm_hn", "sdm_hn_rerun")  # the paper's, in its order
DATASETS = ("harvard", "test", "shifted")  # likewise
_COLUMNS = {  # of an evaluation, in the order of its file
    "y": np.int64, "prediction": np.int64, "accepted": np.bool_, "accepted_lower": np.bool_, "probability": np.float64,
    "q": np.int64, "d": np.float64, "q_prime": np.float64, "answer_right": np.bool_, "exact_match": np.bool_,
}  # fmt: skip


# One model on one test set


@dataclass(frozen=True)
class Evaluation:
    """What a model did on a test set: one entry for each prompt in every array, and the SDM layer that judged.

    `regions` are (alpha, q'_min, psi_0, psi_1) for a grid of alphas: with q', y_hat and the output they give the
    decisions at each of them, hence curves, without the model.
    """

    y: NDArray[np.int64]  # r(s+, generation)
    prediction: NDArray[np.int64]  # y_hat, the verdict of the SDM layer
    accepted: NDArray[np.bool_]  # in the high-reliability region
    accepted_lower: NDArray[np.bool_]  # also by the lower estimate
    probability: NDArray[np.float64]  # SDM(z') of y_hat
    q: NDArray[np.int64]
    d: NDArray[np.float64]
    q_prime: NDArray[np.float64]
    answer_right: NDArray[np.bool_]  # the answer that can be read is the reference, whatever is around it
    exact_match: NDArray[np.bool_]  # verbatim: body, formatting, and the LM's own verdict Yes
    generated: list[str]  # what the LM wrote
    alpha: float
    calibration: dict[str, float]  # `sdmlm.finetuning.final_layer.layer_metrics` of the SDM layer
    regions: list[tuple[float, float, float, float]]

    def __len__(self) -> int:
        return len(self.y)

    def accepted_by_alpha(self) -> NDArray[np.bool_]:
        """Which generations would have been accepted at each alpha of `regions`, (N, number of regions)."""
        p = np.where(np.arange(2) == self.prediction[:, None], self.probability[:, None], 1 - self.probability[:, None])
        regions = [HighReliabilityRegion(alpha, q_min, tuple(psi)) for alpha, q_min, *psi in self.regions]
        return membership(regions, self.q_prime, p, self.prediction)

    def accepted_at(self, alpha: float) -> NDArray[np.bool_]:
        """The same at one of them."""
        return self.accepted_by_alpha()[:, [region[0] for region in self.regions].index(alpha)]

    def estimators(self) -> dict[str, NDArray[np.bool_]]:
        """Who admits what: everything, the high-reliability region, the same by the lower estimate."""
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
        """What `to_json` gave."""
        rows = content["rows"]
        arrays: dict[str, Any] = {n: np.array([row[n] for row in rows], dtype=kind) for n, kind in _COLUMNS.items()}
        calibration = {name: none_as_infinity(value) for name, value in content["calibration"].items()}
        regions = [(r[0], *(none_as_infinity(value) for value in r[1:4])) for r in content["regions"]]
        generated = [str(row["generated"]) for row in rows]
        return cls(**arrays, generated=generated, alpha=content["alpha"], calibration=calibration, regions=regions)


def load_task(name: str) -> Any:
    """A task: a module of `sdmlm.tasks` by its name, or one of the user's own (`reward`, `answer` and REFERENCE in it)."""
    import sdmlm.tasks
    from sdmlm.rewards import load_module

    known = [module.name for module in pkgutil.iter_modules(sdmlm.tasks.__path__)]
    if name in known:
        return importlib.import_module(f"sdmlm.tasks.{name}")
    what = f"Task {name!r} (known here: {', '.join(known)})"
    task = load_module(name, what)
    for part in ("reward", "answer", "REFERENCE"):
        if not hasattr(task, part):
            raise ValueError(f"{what}: the module has no {part}.")
    return task


def evaluate(
    lm: SDMLanguageModel,
    task: Any,
    rows: Sequence[Mapping[str, Any]],
    reward: Reward | str | None = None,
    progress: bool = True,
) -> Evaluation:
    """Greedy generations for all prompts, judged by the final SDM layer; `task` is a module of `sdmlm.tasks`.

    There is room for the longest reference, even where it is longer than all that the model was fitted over.
    y = r(s+, generation) with `reward` (default: the task's), which sees the body without our tags. Exact match looks at
    what the LM wrote itself, its own verdict included, and not at the SDM layer.
    """
    from sdmlm.estimator.layer import ALPHA_GRID
    from sdmlm.finetuning.final_layer import layer_metrics
    from sdmlm.language_model.encoding import completion_text
    from sdmlm.rewards import apply_reward, load_reward

    judge = load_reward(reward or task.reward)
    check_test_rows(task, judge, rows)
    room = generation_room(lm, rows)
    found = lm.generate([row["prompt"] for row in rows], max_new_tokens=room, neighbors=0, progress=progress)
    tags = lm.encoder.tags
    y = apply_reward(judge, rows, [v.text for v in found], tags)
    texts = [v.generated or "" for v in found]
    wanted = [tags.strip_suffix(completion_text(row["chosen"])) + tags.suffix(True) for row in rows]
    regions = [(r.alpha, r.q_min, r.psi[0], r.psi[1]) for r in map(lm.region, ALPHA_GRID)]
    return Evaluation(
        y=np.array(y, dtype=np.int64),
        prediction=np.array([v.verdict == tags.yes for v in found], dtype=np.int64),
        accepted=np.array([v.accepted for v in found], dtype=bool),
        accepted_lower=np.array([v.accepted_lower for v in found], dtype=bool),
        probability=np.array([v.probability for v in found], dtype=np.float64),
        q=np.array([v.q for v in found], dtype=np.int64),
        d=np.array([v.d for v in found], dtype=np.float64),
        q_prime=np.array([v.q_prime for v in found], dtype=np.float64),
        answer_right=np.array([task.answer(t) == row[task.REFERENCE] for t, row in zip(texts, rows, strict=True)]),
        exact_match=np.array([t.strip() == w.strip() for t, w in zip(texts, wanted, strict=True)]),
        generated=texts,
        alpha=lm.alpha,
        calibration=layer_metrics(lm.estimator),
        regions=regions,
    )


def generation_room(lm: SDMLanguageModel, rows: Sequence[Mapping[str, Any]]) -> int:
    """max_new_tokens for a test set: the model's own, or more where a reference is longer."""
    from sdmlm.finetuning.final_layer import completion_room

    return max(lm.sampling().max_new_tokens, completion_room(lm.encoder, rows))


def check_test_rows(task: Any, reward: Reward, rows: Sequence[Mapping[str, Any]], source: str = "The test set") -> None:
    """Refuse rows without the column that the task's answers are compared with, or without those of the reward."""
    from sdmlm.rewards import check_reward

    for n, row in enumerate(rows):
        if not isinstance(row.get(task.REFERENCE), str):
            raise ValueError(f"{source}: row {n} has no text in its column {task.REFERENCE!r}, the right answer.")
    try:
        check_reward(reward, rows)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def setting_order(setting: str) -> tuple[int, str]:
    """A key to sort by: the paper's settings in its order, then others by name."""
    return (SETTINGS.index(setting) if setting in SETTINGS else len(SETTINGS), setting)


def dataset_order(dataset: str) -> tuple[int, str]:
    """The same for test sets."""
    return (DATASETS.index(dataset) if dataset in DATASETS else len(DATASETS), dataset)


# Runs on disk

EVALUATIONS = "evaluations"  # in the folder of a run: a file for each test set


@dataclass(frozen=True)
class Run:
    """One model, fine-tuned in one setting with one seed, and what it did on each test set."""

    family: str
    setting: str  # the name of the recipe: sdm_hn
    label: str  # the name to show: SDM + HN
    seed: int
    evaluations: dict[str, Evaluation]
    history: list[dict[str, Any]] = field(default_factory=list)  # log_history of the training
    task: str = "word_ordering"

    @property
    def calibration(self) -> dict[str, float]:
        """Of the final SDM layer, which is the same for every test set."""
        return next(iter(self.evaluations.values())).calibration

    @property
    def alpha(self) -> float:
        return next(iter(self.evaluations.values())).alpha


def evaluation_file(folder: str | Path, test: str) -> Path:
    """Where the evaluation of the run in `folder` on a test set is kept."""
    return Path(folder) / EVALUATIONS / f"{test}.json"


def write_evaluation(path: Path, evaluation: Evaluation, facts: Mapping[str, Any]) -> None:
    """In one step; one line for each prompt, for those who look into the file."""
    content = {"format_version": 1, **facts, **evaluation.to_json()}
    rows = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in content.pop("rows"))
    head = json.dumps(content, ensure_ascii=False, allow_nan=False)
    write_text_atomically(path, f'{head[:-1]}, "rows": [\n{rows}\n]}}\n')


def read_evaluation(path: Path) -> tuple[Evaluation, dict[str, Any]]:
    """The evaluation in a file, and the facts written with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Evaluation.from_json(content), {k: v for k, v in content.items() if k != "rows"}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is damaged: remove it, and the evaluation will be made again.") from error


def read_evaluations(folder: str | Path, layer: str) -> tuple[dict[str, Evaluation], list[Path]]:
    """Evaluations in the folder of a model whose SDM layer has the SHA-256 `layer`, by test set, and files of other layers."""
    found, others = _with_facts(Path(folder), layer)
    return {test: evaluation for test, (evaluation, _) in found.items()}, others


def _with_facts(folder: Path, layer: str | None) -> tuple[dict[str, tuple[Evaluation, dict[str, Any]]], list[Path]]:
    """The same with the facts of each; `layer` None takes all."""
    found, others = {}, []
    for path in sorted((folder / EVALUATIONS).glob("*.json")):
        evaluation, facts = read_evaluation(path)
        if layer is None or facts.get("sdm_sha256") == layer:
            found[path.stem] = evaluation, facts
        else:
            others.append(path)
    return found, others


def read_runs(folder: str | Path) -> list[Run]:
    """All runs below a folder of `sdmlm replicate` that have been evaluated on something, by the SDM layer that they have now."""
    from sdmlm.language_model.sdm_folder import layer_sha256

    runs = []
    sources: dict[tuple[str, str], tuple[str, Path]] = {}
    for home in sorted(Path(folder).glob("*/seed-*")):
        if not any((home / EVALUATIONS).glob("*.json")):
            continue  # perhaps another process is at work on it
        layer = layer_sha256(home / SDM_FOLDER) if (home / SDM_FOLDER).exists() else None
        found, others = _with_facts(home, layer)
        for path in others:
            warnings.warn(
                f"{path} is left out: it was made with another SDM layer than the present one. Run its recipe again.",
                stacklevel=1,
            )
        if not found:
            continue
        facts = next(iter(found.values()))[1]
        for test, (_, own) in found.items():
            rows = str(own.get("rows_sha256"))
            known, where = sources.setdefault((str(own.get("family")), test), (rows, home))
            if known != rows:
                raise ValueError(
                    f"{where} and {home} were evaluated on different rows of {test}: keep them in two folders."
                )
        try:
            names = {name: facts[name] for name in ("family", "setting", "label", "seed")}
        except KeyError as error:
            raise ValueError(f"{home} is damaged: its evaluations lack {error}.") from error
        record = read_record(home)
        if record is None:
            raise ValueError(f"{home} is damaged: it has evaluations but no {RECORD}.")
        evaluations = {test: one for test, (one, _) in found.items()}
        task = evaluated_task(facts, record)
        runs.append(Run(**names, evaluations=evaluations, history=record["log_history"], task=task))
    return runs


def evaluated_task(facts: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The task of an evaluation: the training's, where its file is older than that fact."""
    return str(facts.get("task") or record["settings"].get("task"))


def training_csv(runs: Sequence[Run]) -> str:
    """What was logged while the runs were trained: a line for each log, a column for each number."""
    logs = [(run, row) for run in runs for row in run.history]
    names = sorted({name for _, row in logs for name in row} - {"step", "epoch"})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["family", "model", "seed", "step", "epoch", *names])
    for run, row in logs:
        writer.writerow([run.family, run.label, run.seed, *(row.get(name) for name in ("step", "epoch", *names))])
    return out.getvalue()
