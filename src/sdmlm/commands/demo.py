"""`sdmlm demo`: a first look, without data of your own."""

from __future__ import annotations

import argparse
from typing import Any

from sdmlm.commands import common

EXAMPLES = """\
  sdmlm demo
  sdmlm demo --fast --output runs/first-look"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = common.add_command(subparsers, "demo", "show what the estimator does, on scikit-learn's digits", EXAMPLES)
    parser.add_argument("--output", default="runs/demo", metavar="DIR", help="folder to write into (runs/demo)")
    parser.add_argument("--fast", action="store_true", help="train less: seconds instead of up to a minute")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the estimator demo."""
    from sdmlm.demo.estimator import run_demo

    run_demo(args.output, args.fast, common.console(args))
