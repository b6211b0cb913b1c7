"""`sdmlm demo`: a first look, without data of your own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sdmlm.cli import common

EXAMPLES = """\
  sdmlm demo
  sdmlm demo --fast --output runs/first-look
  sdmlm demo --digits"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = common.add_command(subparsers, "demo", "train a small SDM language model and ask it", EXAMPLES)
    parser.add_argument("--output", metavar="DIR", help="folder to write into (runs/demo; runs/digits with --digits)")
    parser.add_argument("--fast", action="store_true", help="less data and training: about 80 seconds")
    parser.add_argument("--digits", action="store_true", help="the estimator by itself, on scikit-learn's digits")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run one of the demos."""
    if args.output is not None and Path(args.output).is_file():
        raise ValueError(f"{args.output} is a file: give a folder with --output.")
    if args.digits:
        from sdmlm.demo.estimator import run_demo as run_digits

        run_digits(args.output or "runs/digits", args.fast, common.console(args))
        return
    from sdmlm.language_model.loading import require_transformers

    require_transformers()
    from sdmlm.demo.word_ordering import run_demo

    run_demo(args.output or "runs/demo", args.fast, common.console(args))
