"""Let an SDM language model answer the prompts of a test set, and collect the decisions of its SDM layer."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sdmlm.evaluation.lm_evaluation import Evaluation

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel
    from sdmlm.rewards import Reward

TASK_PARTS = ("reward", "answer", "REFERENCE")  # what every task has


def load_task(name: str) -> Any:
    """A task: a module of `sdmlm.tasks` by its name, or one of the user's own (with `reward`, `answer`, REFERENCE)."""
    import sdmlm.tasks
    from sdmlm.rewards import load_module

    ours = {
        m.name: importlib.import_module(f"sdmlm.tasks.{m.name}") for m in pkgutil.iter_modules(sdmlm.tasks.__path__)
    }
    # Not every module there is a task: warmup only has exercises.
    known = {short: module for short, module in ours.items() if all(hasattr(module, part) for part in TASK_PARTS)}
    if name in known:
        return known[name]
    what = f"Task {name!r} (known here: {', '.join(known)})"
    task = load_module(name, what)
    for part in TASK_PARTS:
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

    Generations may be as long as the longest reference, even if that is longer than every calibration document.
    y = r(s+, generation) with `reward` (default: the task's), which sees the body without the verification tags. Exact
    match looks at what the LM wrote itself, its own verdict included, and not at the SDM layer.
    """
    from sdmlm.estimator.calibration_summary import summarize_calibration
    from sdmlm.estimator.layer import ALPHA_GRID
    from sdmlm.language_model.encoding import completion_text
    from sdmlm.rewards import apply_reward, load_reward

    judge = load_reward(reward or task.reward)
    check_test_rows(task, judge, rows)
    length = generation_length(lm, rows)
    answers = lm.generate([row["prompt"] for row in rows], max_new_tokens=length, neighbors=0, progress=progress)
    tags = lm.encoder.tags
    y = apply_reward(judge, rows, [v.text for v in answers], tags)
    texts = [v.generated or "" for v in answers]
    wanted = [tags.strip_suffix(completion_text(row["chosen"])) + tags.suffix(True) for row in rows]
    regions = [(r.alpha, r.q_min, r.psi[0], r.psi[1]) for r in map(lm.region, ALPHA_GRID)]
    return Evaluation(
        y=np.array(y, dtype=np.int64),
        prediction=np.array([v.verdict == tags.yes for v in answers], dtype=np.int64),
        accepted=np.array([v.accepted for v in answers], dtype=bool),
        accepted_lower=np.array([v.accepted_lower for v in answers], dtype=bool),
        probability=np.array([v.probability for v in answers], dtype=np.float64),
        q=np.array([v.q for v in answers], dtype=np.int64),
        d=np.array([v.d for v in answers], dtype=np.float64),
        q_prime=np.array([v.q_prime for v in answers], dtype=np.float64),
        answer_right=np.array([task.answer(t) == row[task.REFERENCE] for t, row in zip(texts, rows, strict=True)]),
        exact_match=np.array([t.strip() == w.strip() for t, w in zip(texts, wanted, strict=True)]),
        generated=texts,
        alpha=lm.alpha,
        calibration=summarize_calibration(lm.estimator).metrics(),
        regions=regions,
    )


def generation_length(lm: SDMLanguageModel, rows: Sequence[Mapping[str, Any]]) -> int:
    """max_new_tokens for a test set: the model's own, or more where a reference is longer."""
    from sdmlm.finetuning.training_rows import completion_room

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
