"""`sdmlm replicate`: fine-tune in several settings, evaluate, and make the paper's tables. A second call continues."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.finetuning.processes import is_main_process
from sdmlm.language_model.loading import require_transformers

if TYPE_CHECKING:
    from sdmlm.experiments.planning import PlannedRun

EXAMPLES = """\
  sdmlm replicate recipes/stories15m --output runs/stories15m --dry-run
  sdmlm replicate recipes/stories15m/ce_hn.yaml recipes/stories15m/sdm_hn.yaml --output runs/stories15m --seeds 0 1 2
  accelerate launch --num_processes 4 -m sdmlm.cli replicate recipes/phi-3.5-mini --output runs/phi-3.5-mini"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "run recipes with all their seeds and test sets, and make the paper's tables"
    parser = common.add_command(subparsers, "replicate", help, EXAMPLES)
    parser.usage = "sdmlm replicate RECIPES... --output DIR [--seeds N ...] [--json] [--dry-run]"
    parser.add_argument("recipes", nargs="+", metavar="RECIPES", help="recipes (.yaml), or folders of them")
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="runs go to DIR/FOLDER-FILE/seed-N (of the recipe), tables to DIR",
    )
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="seeds of each recipe (default: its own)")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check recipes and rows, show what is left to do, stop")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Check everything, run what is left, write and show the tables."""
    with common.main_process_errors():
        require_transformers()
        from sdmlm.experiments.runner import checked_runs, run_all

        planned = checked_runs(args.recipes, args.output, args.seeds)
        if args.dry_run:
            _show_plan(args, planned)
            return
        run_all(planned, common.warn)
        if is_main_process():
            _report(args)


def _show_plan(args: argparse.Namespace, planned: list[PlannedRun]) -> None:
    rows = [one.status() for one in planned]
    if args.json:
        common.print_json({"runs": rows})
        return
    table = common.rich_table(
        "Runs", ("folder", "seed", "model", "tests to do"), left=["folder", "model", "tests to do"]
    )
    for row in rows:
        table.add_row(row["folder"], str(row["seed"]), row["model"], ", ".join(row["tests"]) or "none")
    common.console(args).print(table)


def _report(args: argparse.Namespace) -> None:
    """The tables over all finished runs in DIR, those of earlier calls and other processes included."""
    from sdmlm.experiments.planning import WRITTEN
    from sdmlm.experiments.runner import write_tables
    from sdmlm.experiments.runs import read_runs
    from sdmlm.experiments.tables import tables
    from sdmlm.report.replication import write_report

    folder = Path(args.output)
    runs = read_runs(folder)
    if not runs:
        common.warn(f"{folder} has no finished run yet: other processes are working on all of them.")
        if args.json:
            common.print_json({})
        return
    results = tables(runs)
    write_tables(folder, runs, results)
    write_report(folder / "report.html", runs, results)
    if args.json:
        common.print_json(results.json())
        return
    out = common.console(args)
    for table in results.rich():
        out.print(table)
    for comparison in results.comparisons:
        out.print(comparison.statement(), markup=False)
    out.print(
        f"Written: {folder}/{', '.join(WRITTEN)} (every number by seed in the first two).", markup=False, soft_wrap=True
    )
