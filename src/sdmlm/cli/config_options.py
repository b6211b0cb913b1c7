"""Command-line options for the fields of `SDMConfig`, without importing it: `--help` must not wait for torch."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Container
from importlib.resources import files
from typing import Any, NamedTuple


class ConfigField(NamedTuple):
    """A field that SDMConfig adds, or for which it changes the default."""

    name: str
    kind: str
    default: Any
    help: str


def own_fields() -> list[ConfigField]:
    """The fields that SDMConfig itself declares.

    They are read from its source, because importing the class would import torch and transformers.
    """
    tree = ast.parse(files("sdmlm").joinpath("finetuning", "config.py").read_text(encoding="utf-8"))
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SDMConfig")
    fields = []
    for node in config.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            given = {k.arg: ast.literal_eval(k.value) for k in node.value.keywords}
            kind = ast.unparse(node.annotation).removesuffix(" | None")
            fields.append(ConfigField(node.target.id, kind, given["default"], given["metadata"]["help"]))
    return fields


def add_fields(parser: argparse.ArgumentParser, title: str, only: Container[str] | None = None) -> None:
    """Add an option for each field of SDMConfig (or `only` those). The namespace has those that were given, as text."""
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
    """Collect options that the parser does not know in `namespace.more`: `TrainingArguments` has a hundred of them."""
    plain = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        known, unknown = plain([_dashed(a) for a in args], namespace)
        known.more = unknown
        return known, []

    parser.allow_abbrev = False  # --eval would match many
    parser.parse_known_args = parse  # type: ignore[assignment, method-assign]


def _dashed(argument: str) -> str:
    """Read --learning_rate, as in Hugging Face's scripts, as --learning-rate."""
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
