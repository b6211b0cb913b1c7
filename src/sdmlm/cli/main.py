"""The `sdmlm` command: the parser, and exit codes for errors. Each subcommand is a module of `sdmlm.cli.commands`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from sdmlm import __version__
from sdmlm.cli.commands import (
    calibrate,
    calibrate_search,
    certify,
    chat,
    compare,
    compare_answers,
    data,
    demo,
    explain,
    fit,
    generate,
    replicate,
    report,
    score,
    serve,
    train,
    verify,
)
from sdmlm.storage.text_files import visible

EXAMPLES = """\
examples:
  sdmlm demo                                        a first look, nothing to download
  sdmlm fit train.npz --output runs/estimator       fit and save
  sdmlm score runs/estimator test.npz               accept or reject
  sdmlm explain runs/estimator test.npz --rows 0-3  why
  sdmlm compare train.npz --output runs/compare     against softmax, temperature, APS, RAPS
  sdmlm certify runs/estimator fresh.npz            a guarantee, from fresh points
  sdmlm data word-ordering --sentences F --output DIR        rows for a task
  sdmlm train --model M --data rows.jsonl --output runs/lm   fine-tune a language model
  sdmlm calibrate runs/lm --data rows.jsonl         give a language model an SDM layer
  sdmlm calibrate-search runs/lm --data rows.jsonl --search resample   further tries, calibrated
  sdmlm replicate recipes/demo --output runs/replica         the paper's experiments and tables
  sdmlm generate runs/lm --prompts prompts.txt      answers with verdicts
  sdmlm certify runs/lm --data fresh.jsonl          which answers are verified, with a promise
  sdmlm compare-answers runs/lm --data fresh.jsonl  the SDM layer against likelihoods and other scores
  sdmlm verify runs/lm --data answers.jsonl         verdicts on answers that others wrote
  sdmlm chat runs/lm                                ask in the terminal
  sdmlm serve runs/lm                               OpenAI's API with verdicts, and a page

`sdmlm COMMAND --help` shows the options and examples of a command."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="sdmlm",
        description="Know which predictions can be accepted without a person looking.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sdmlm {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in (
        fit,
        score,
        explain,
        compare,
        compare_answers,
        certify,
        demo,
        data,
        train,
        calibrate,
        calibrate_search,
        generate,
        verify,
        chat,
        replicate,
        report,
        serve,
    ):
        command.add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: done. 1: part of the input was refused, the rest was done. 2: bad input, a file error or an interruption, with one
    sentence on stderr. 141: stdout was closed by its reader. Any other exception is a bug and shows its traceback.
    """
    args = build_parser().parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has closed stdout. Python would raise again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the exit code of SIGPIPE in a shell
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "interrupted; nothing was left half-written.")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}.")
    except MemoryError:
        return _fail("not enough memory: try fewer rows at once.")
    except ValueError as error:
        return _fail(str(error))
    return int(status or 0)


def _fail(message: str) -> int:
    print(f"sdmlm: {visible(' '.join(message.split()))}", file=sys.stderr)
    return 2
