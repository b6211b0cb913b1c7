"""`sdmlm verify`: verdicts on given answers."""

from __future__ import annotations

import argparse
from typing import Any

from sdmlm.cli import common
from sdmlm.cli.commands import generate

EXAMPLES = """\
  sdmlm verify runs/lm --data answers.jsonl
  sdmlm verify runs/lm --data answers.jsonl --alpha 0.9 --output verdicts.jsonl
  other-model | sdmlm verify runs/lm --data - --json | jq 'select(.verified) | .text'"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "judge answers written by anyone: a person, another model, an API"
    parser = common.add_command(subparsers, "verify", help, EXAMPLES)
    parser.add_argument(
        "--data", required=True, metavar="F", help=".jsonl (or - for stdin) of objects with `prompt` and `completion`"
    )
    generate.add_model(parser)
    generate.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Judge, write, show; answers that are too long are listed, with exit status 1."""
    from sdmlm.generation.prompts import find_too_long

    common.check_output_file(args.output, ".jsonl")
    if args.data != "-" and not args.data.endswith(".jsonl"):
        raise ValueError(f"{args.data} is of an unknown kind: answers are read from .jsonl files, or from -.")
    rows = generate.parse_objects(generate.read_text(args.data), args.data, ("prompt", "completion"))
    prompts, completions = ([row[name] for row in rows] for name in ("prompt", "completion"))
    with generate.opened(args) as lm:
        too_long = find_too_long(lm.encoder, prompts, completions)
        fitting = [n for n in range(len(rows)) if n not in too_long]
        asked, given = ([values[n] for n in fitting] for values in (prompts, completions))
        judged = lm.verify(asked, given, alpha=args.alpha, neighbors=args.neighbors)
    return generate.show(args, rows, judged, too_long)
