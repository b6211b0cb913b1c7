"""Settings of the fine-tuning commands: options made from `SDMConfig`, YAML recipes, and values of the right type.

A recipe is a flat YAML file. Its keys are the options of `sdmlm train` and the fields of `SDMConfig`, which include those
of `transformers.TrainingArguments`; what stands on the command line wins over it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Container, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from sdmlm.storage.text_files import decode

# Settings that have an option of another name.
_ELSEWHERE = {"output_dir": "--output", "resume_from_checkpoint": "--resume"}
_USUAL = {"epochs": "num_train_epochs", "lr": "learning_rate", "batch_size": "per_device_train_batch_size"}  # elsewhere
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "JSON"}


# Options


class OwnField(NamedTuple):
    """A field that SDMConfig adds or gives another default."""

    name: str
    kind: str
    default: Any
    help: str


def own_fields() -> list[OwnField]:
    """The fields that SDMConfig itself declares.

    Read from its source, not from the class: that would import torch and transformers, and help must come at once.
    """
    tree = ast.parse(files("sdmlm").joinpath("finetuning", "config.py").read_text(encoding="utf-8"))
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SDMConfig")
    found = []
    for node in config.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            given = {k.arg: ast.literal_eval(k.value) for k in node.value.keywords}
            kind = ast.unparse(node.annotation).removesuffix(" | None")
            found.append(OwnField(node.target.id, kind, given["default"], given["metadata"]["help"]))
    return found


def add_fields(parser: argparse.ArgumentParser, title: str, only: Container[str] | None = None) -> None:
    """An option for each of our fields (or `only` those), absent from the namespace unless given; all values as text."""
    group = parser.add_argument_group(title)
    for field in own_fields():
        if only is not None and field.name not in only:
            continue
        option = "--" + field.name.replace("_", "-")
        default = (
            ""
            if field.default is None
            else f" ({str(field.default).lower() if field.kind == 'bool' else field.default})"
        )
        help = (field.help + default).replace("%", "%%")
        if field.kind == "bool":  # the bare option means true
            group.add_argument(
                option, nargs="?", const="true", default=argparse.SUPPRESS, metavar="true|false", help=help
            )
        else:
            metavar = {"int": "N", "float": "X"}.get(field.kind, "TEXT")
            group.add_argument(option, default=argparse.SUPPRESS, metavar=metavar, help=help)


def accept_any_option(parser: argparse.ArgumentParser) -> None:
    """Leave options that the parser does not know in `namespace.more`, for `TrainingArguments` has a hundred of them."""
    plain = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        found, more = plain([_dashed(a) for a in args], namespace)
        found.more = more
        return found, []

    parser.allow_abbrev = False  # --eval must not be taken for one of many
    parser.parse_known_args = parse  # type: ignore[assignment, method-assign]


def _dashed(argument: str) -> str:
    """--learning_rate, as Hugging Face's scripts have it, is --learning-rate."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if argument.startswith("--") else argument


def read_options(arguments: list[str]) -> dict[str, str]:
    """`--name value`, `--name=value` and bare `--name` (true) as a dictionary of texts."""
    given: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise ValueError(f"{name!r} belongs to no option: give options as --name value.")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        given[name[2:].replace("-", "_")] = value
    return given


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
    return {f.name: hints[f.name] for f in dataclasses.fields(SDMConfig) if f.init and f.name not in _ELSEWHERE}


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
    """The given settings with values of the types in `kinds`; a name that is not there, or a value that does not fit,
    is refused. `where` is the recipe they come from, None for the command line."""
    start = f"{where}: " if where else ""
    for name in given:
        if name not in kinds:
            shown = name if where else "--" + name.replace("_", "-")
            raise ValueError(f"{start}there is no setting {shown}{_hint(name, kinds, bool(where))}.")
    return {name: _value(start + name, kinds[name], value) for name, value in given.items()}


def _hint(name: str, known: Iterable[str], in_recipe: bool) -> str:
    if name in _ELSEWHERE:
        return f": use {_ELSEWHERE[name]}"
    close = [_USUAL[name]] if name in _USUAL else difflib.get_close_matches(name, known, n=1)
    if not close:
        return " (`sdmlm train --help` lists them)"
    return f" (nearest: {close[0] if in_recipe else '--' + close[0].replace('_', '-')})"


def _value(name: str, annotation: Any, value: Any) -> Any:
    """A text of the command line, or a value that YAML has read, as what the annotation wants."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = {typing.get_origin(k) or k for k in (typing.get_args(annotation) if union else (annotation,))}
    optional = types.NoneType in kinds
    if optional and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    if isinstance(value, str):
        found = _from_text(value, kinds)
        if found is not None:
            return found
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
    """The first reading of the text that is among the kinds, None if there is none."""
    if bool in kinds and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    for number in (int, float):
        if number in kinds:
            try:
                if math.isfinite(found := number(text)):
                    return found
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
