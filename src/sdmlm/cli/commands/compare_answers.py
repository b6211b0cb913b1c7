"""`sdmlm compare-answers`: the SDM layer of a language model and its rivals on the model's own answers."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from sdmlm.cli import common
from sdmlm.cli.commands.generate import opened
from sdmlm.cli.layer_tables import REWARD_HELP, ROWS_HELP

EXAMPLES = """\
  sdmlm compare-answers runs/demo/verified --data runs/demo/data/test.jsonl --shifted runs/demo/data/shifted.jsonl
  sdmlm compare-answers runs/lm --data fresh.jsonl --samples 0 --plot risk.png --json"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "compare scores of a language model's own answers: likelihoods, P(Yes), self-consistency, a probe, SDM"
    parser = common.add_command(subparsers, "compare-answers", help, EXAMPLES)
    parser.add_argument("model", metavar="DIR", help="folder of an SDM language model")
    parser.add_argument("--data", required=True, metavar="ROWS", help=f"{ROWS_HELP}; new to the model")
    parser.add_argument("--shifted", metavar="ROWS", help="rows of another kind, of which little should be accepted")
    parser.add_argument("--samples", type=int, default=5, metavar="N", help="answers for self-consistency (5; 0: none)")
    parser.add_argument("--plot", metavar="FILE.png", help="write the risk-coverage plot of the test answers")
    parser.add_argument("--reward", metavar="M:F", help=REWARD_HELP)
    parser.add_argument("--json", action="store_true", help="print all measures as JSON")
    parser.add_argument("--device", metavar="D", help="torch device, e.g. cpu or cuda (a GPU where there is one)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Answer, score, certify, show."""
    from sdmlm.experiments.answer_comparison import compare_answers
    from sdmlm.experiments.answer_runs import TEST
    from sdmlm.language_model.rows import read_preferences

    if args.samples < 0:
        raise ValueError(f"--samples is {args.samples} but must be at least 0.")
    if args.plot is not None:
        common.check_output_file(args.plot, ".png")
    with (
        opened(args) as lm,
        contextlib.redirect_stdout(sys.stderr),
    ):  # a reward may print, and stdout is for the result
        rows = read_preferences(args.data, lm.tags).rows
        shifted = None if args.shifted is None else read_preferences(args.shifted, lm.tags).rows
        comparison = compare_answers(lm, rows, shifted, args.reward, samples=args.samples)
    if args.plot is not None:
        from sdmlm.report.plots import risk_coverage

        shown = [row for row in comparison.table.rows if row.dataset == TEST]
        risk_coverage(shown, lm.alpha).savefig(args.plot, dpi=150)
    if args.json:
        common.print_json(comparison.json())
        return
    out = common.console(args)
    out.print(comparison.table.rich())
    for name, share in comparison.right.items():
        out.print(f"{name}: {comparison.rows[name]} answers, {share:.1%} of them right.", markup=False)
    if comparison.samples:
        out.print(
            f"Self-consistency generates {comparison.samples} more answers for every prompt; the other scores need none."
        )
    certificate = lm.certificate()
    if certificate is not None:
        out.print(certificate.sentence(), markup=False, soft_wrap=True)
    if args.plot is not None:
        out.print(f"Written: {Path(args.plot)}.", markup=False)
