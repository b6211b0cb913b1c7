"""The reward r: does a completion follow the instructions of its prompt?

A reward is a callable with TRL's signature, `(prompts, completions, **columns) -> list`, that answers 0 or 1 for each
completion. It is given the bodies, without verification tags, in the format of the row (text or one assistant message),
and every other column of the data set, `chosen` and `rejected` among them, as lists, with None for a row that lacks it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sdmlm.language_model.encoding import VerificationTags, completion_text

Reward = Callable[..., Sequence[Any]]
_ARGUMENTS = ("prompt", "prompts", "completion", "completions")


def exact_match(prompts: Sequence[Any], completions: Sequence[Any], chosen: Sequence[Any], **columns: Any) -> list[int]:
    """1 where a completion equals the text of `chosen`, apart from white space at its ends.

    >>> exact_match(["Say hi.", "Say hi."], [" hi", "ho"], chosen=["hi", "hi"])
    [1, 0]
    """
    return [
        int(completion_text(completion).strip() == completion_text(reference).strip())
        for completion, reference in zip(completions, chosen, strict=True)
    ]


def load_reward(reward: str | Reward | None) -> Reward:
    """A reward from a callable, from `"module:function"`, or (None) `exact_match`.

    Modules are found as `python -m` finds them, the working directory included.
    """
    if reward is None:
        return exact_match
    if not isinstance(reward, str):
        if not callable(reward):
            raise ValueError(f"A reward is a function or 'module:function', not {type(reward).__name__}.")
        return reward
    module_name, colon, function_name = reward.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"Reward {reward!r} is not of the form 'module:function'.")
    function = load_module(module_name, f"Reward {reward!r}")
    for name in function_name.split("."):
        function = getattr(function, name, None)
    if not callable(function):
        raise ValueError(f"Reward {reward!r}: module {module_name!r} has no function {function_name!r}.")
    return function  # type: ignore[no-any-return]


def single_reward(given: Reward | str | Sequence[Reward | str] | None) -> Reward:
    """The reward as a callable; like TRL's trainers, this also takes a list, but only of one."""
    if isinstance(given, (list, tuple)):
        if len(given) != 1:
            raise ValueError(f"SDMTrainer takes one reward, got {len(given)}: combine them in one function.")
        given = given[0]
    return load_reward(given)  # type: ignore[arg-type]


def load_module(name: str, what: str) -> Any:
    """Import a module by name as `python -m` does; `what` begins the error message."""
    if os.getcwd() not in sys.path and "" not in sys.path:  # a console script does not search it by default
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{what}: there is no module {error.name!r} to import.") from error
    except Exception as error:  # the module may raise anything
        raise ValueError(f"{what}: importing {name!r} fails ({type(error).__name__}: {error}).") from error


def reward_name(reward: Reward) -> str | None:
    """`module:function` of a reward, None for one that cannot be imported by name."""
    name = f"{getattr(reward, '__module__', '')}:{getattr(reward, '__qualname__', '')}"
    try:
        return name if not name.startswith("__main__") and load_reward(name) is reward else None
    except ValueError:
        return None


def reward_as_fitted(given: Reward | str | None, metadata: Mapping[str, Any]) -> Reward:
    """The reward that is given, or else the one of an SDM layer with this metadata (`sdm/lm.json`)."""
    named = metadata.get("reward", "sdmlm.rewards:exact_match") if given is None else given
    if named is None:
        raise ValueError("This SDM layer was fitted with a reward that has no name: give one (--reward).")
    return load_reward(named)


def check_reward(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a reward that cannot be called with the columns of these rows, instead of failing after the first epoch."""
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some callables have no signature
        return
    names = dict.fromkeys(["chosen", "rejected", *(name for row in rows for name in row)])
    columns: dict[str, list[Any]] = {name: [] for name in names if name not in _ARGUMENTS}
    try:
        signature.bind(prompts=[], completions=[], **columns)
    except TypeError as error:
        name = getattr(reward, "__name__", type(reward).__name__)
        raise ValueError(
            f"Reward {name} cannot be called with the columns of the rows ({error}): it must take prompts, completions and "
            "**columns."
        ) from error


def apply_reward(
    reward: Reward,
    rows: Sequence[Mapping[str, Any]],
    bodies: Sequence[str],
    tags: VerificationTags | None = None,
    columns_of_all: Iterable[str] = (),
) -> list[int]:
    """The reward of one body per row. Raises if the reward returns a wrong number of values, or values other than 0 and 1.

    `columns_of_all` names the columns of the whole data set where `rows` are a part of it: a reward is always given
    the same columns, whichever rows are judged.
    """
    tags = tags or VerificationTags()
    if not rows:
        return []
    names = dict.fromkeys([*columns_of_all, *(name for row in rows for name in row)])
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names if name not in _ARGUMENTS}
    for name in ("chosen", "rejected"):  # sdmlm adds the tags; a reward never sees them
        if name in columns:
            columns[name] = [_like(row[name], tags.strip_suffix(completion_text(row[name]))) for row in rows]
    completions = [_like(row.get("chosen", body), body) for row, body in zip(rows, bodies, strict=True)]
    name = getattr(reward, "__name__", type(reward).__name__)
    answers = reward(prompts=[row["prompt"] for row in rows], completions=completions, **columns)
    try:
        answers = list(answers)
    except TypeError:
        raise ValueError(
            f"Reward {name} returned {type(answers).__name__}: it must return a list of 0 and 1."
        ) from None
    if len(answers) != len(rows):
        raise ValueError(
            f"Reward {name} returned {len(answers)} values for {len(rows)} completions: one each is needed."
        )
    for n, answer in enumerate(answers):
        # == also accepts True, 1.0 and scalars of NumPy or torch.
        if isinstance(answer, str) or not (answer == 0 or answer == 1):
            raise ValueError(f"Reward {name} returned {answer!r} for completion {n}: only 0 and 1 are allowed.")
    return [int(answer) for answer in answers]


def _like(completion: Any, text: str) -> Any:
    """`text` in the format of `completion`."""
    return text if isinstance(completion, str) else [{"role": "assistant", "content": text}]
