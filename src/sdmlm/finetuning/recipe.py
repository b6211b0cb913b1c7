"""Settings of fine-tuning from YAML recipes and the command line, converted to the right types.

A recipe is a flat YAML file. Its keys are the options of `sdmlm train` and the fields of `SDMConfig`, which include those
of `transformers.TrainingArguments`; options on the command line win over it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from sdmlm.storage.text_files import decode

# Settings whose option has another name.
_OTHER_OPTION = {"output_dir": "--output", "resume_from_checkpoint": "--resume"}
_NAMES_ELSEWHERE = {  # names of settings in other tools
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
}
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "JSON"}


# Recipes


def read_recipe(path: str) -> dict[str, Any]:
    """The settings in a YAML file, with underscores in their names."""
    import yaml

    try:
        content = yaml.safe_load(decode(Path(path).read_bytes(), path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else path
        raise ValueError(f"{where}: not YAML ({getattr(error, 'problem', None) or 'unreadable'}).") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path} must hold settings, one `name: value` a line.")
    return {key.replace("-", "_"): value for key, value in content.items()}


# Values


def field_types() -> dict[str, Any]:
    """The type of every SDMConfig field that can be set."""
    from sdmlm.finetuning.config import SDMConfig

    hints = typing.get_type_hints(SDMConfig)
    return {f.name: hints[f.name] for f in dataclasses.fields(SDMConfig) if f.init and f.name not in _OTHER_OPTION}


def field_default(name: str) -> Any:
    """The default of an SDMConfig field; None for anything else."""
    from sdmlm.finetuning.config import SDMConfig

    field = next((f for f in dataclasses.fields(SDMConfig) if f.name == name), None)
    if field is None:
        return None
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def typed(given: Mapping[str, Any], kinds: Mapping[str, Any], where: str | None = None) -> dict[str, Any]:
    """The given settings with values of the types in `kinds`. Unknown names and values of another type are refused.

    `where` is the recipe that the settings come from, None for the command line.
    """
    start = f"{where}: " if where else ""
    for name in given:
        if name not in kinds:
            shown = name if where else "--" + name.replace("_", "-")
            raise ValueError(f"{start}there is no setting {shown}{_hint(name, kinds, bool(where))}.")
    return {name: _value(start + name, kinds[name], value) for name, value in given.items()}


def _hint(name: str, known: Iterable[str], in_recipe: bool) -> str:
    if name in _OTHER_OPTION:
        return f": use {_OTHER_OPTION[name]}"
    close = [_NAMES_ELSEWHERE[name]] if name in _NAMES_ELSEWHERE else difflib.get_close_matches(name, known, n=1)
    if not close:
        return " (`sdmlm train --help` lists them)"
    return f" (nearest: {close[0] if in_recipe else '--' + close[0].replace('_', '-')})"


def _value(name: str, annotation: Any, value: Any) -> Any:
    """Convert text of the command line, or a value from YAML, to the type that the annotation names."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = {typing.get_origin(k) or k for k in (typing.get_args(annotation) if union else (annotation,))}
    optional = types.NoneType in kinds
    if optional and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    if isinstance(value, str):
        parsed = _from_text(value, kinds)
        if parsed is not None:
            return parsed
    elif isinstance(value, bool):
        if bool in kinds:
            return value
    elif isinstance(value, (int, float)) and math.isfinite(value):
        if isinstance(value, int) and int in kinds:
            return value
        if float in kinds:
            return float(value)
    elif isinstance(value, (list, dict)) and type(value) in kinds:
        return value
    wanted = [word for kind, word in _WORDS.items() if kind in kinds]
    quote = " (in YAML, yes, no, on and off need quotes to be text)" if isinstance(value, bool) and str in kinds else ""
    if not wanted:
        raise ValueError(f"{name} cannot be set here.")
    raise ValueError(f"{name} is {value!r} but must be {' or '.join(wanted)}{' or none' if optional else ''}{quote}.")


def _from_text(text: str, kinds: Container[Any]) -> Any:
    """The text as the first of the kinds that it can be read as; None if there is none."""
    if bool in kinds and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    for number in (int, float):
        if number in kinds:
            try:
                if math.isfinite(parsed := number(text)):
                    return parsed
            except (ValueError, OverflowError):
                pass
    for structure, first in ((dict, "{"), (list, "[")):
        if structure in kinds and text.lstrip().startswith(first):
            try:
                return json.loads(text)
            except json.JSONDecodeError:
                return None
    if list in kinds and (str not in kinds or "," in text):
        return [part.strip() for part in text.split(",")]
    return text if str in kinds else None
