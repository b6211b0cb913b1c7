"""`sdmlm train`: fine-tune a language model on rows of prompt, chosen and rejected."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sdmlm.cli import common, config_options
from sdmlm.cli.commands import dry_run
from sdmlm.cli.layer_tables import REWARD_HELP, ROWS_HELP, show_answers, show_layer, show_next
from sdmlm.finetuning.processes import is_main_process
from sdmlm.language_model.loading import require_transformers
from sdmlm.storage.record import RECORD

EXAMPLES = """\
  sdmlm train --model microsoft/Phi-3.5-mini-instruct --data rows.jsonl --output runs/phi --dry-run
  sdmlm train --model models/tiny --data train.jsonl --calibration calibration.jsonl --output runs/tiny --loss sdm
  sdmlm train --recipe recipes/phi-3.5-mini/sdm_hn.yaml --output runs/phi --resume
  accelerate launch --num_processes 4 -m sdmlm.cli train --recipe recipes/phi-3.5-mini/sdm_hn.yaml"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = common.add_command(subparsers, "train", "fine-tune a causal language model into an SDM LM", EXAMPLES)
    parser.usage = (
        "sdmlm train --model M --data ROWS [--calibration ROWS] --output DIR [options]\n"
        "       sdmlm train --recipe FILE.yaml [options]\n"
        "       sdmlm train --output DIR --resume"
    )
    parser.add_argument(
        "--model", metavar="M", help="model folder, a name on the Hub, or demo: the small model that is included"
    )
    parser.add_argument("--data", metavar="ROWS", help=ROWS_HELP)
    parser.add_argument("--calibration", metavar="ROWS", help="calibration rows D_ca (default: half of --data)")
    parser.add_argument("--output", metavar="DIR", help="new folder for the SDM LM and its checkpoints")
    parser.add_argument(
        "--recipe", metavar="FILE.yaml", help="settings, one `name: value` per line; options win over it"
    )
    parser.add_argument("--reward", metavar="M:F", help=REWARD_HELP)
    parser.add_argument("--lora-r", metavar="N", help="train LoRA adapters of this rank instead of all weights")
    parser.add_argument("--lora-alpha", metavar="X", help="their scale (twice the rank)")
    parser.add_argument("--resume", action="store_true", help="continue the run in DIR, or start one if there is none")
    parser.add_argument("--dry-run", action="store_true", help="encode and check everything, show examples, stop")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    config_options.add_fields(
        parser, "SDMConfig (every field of transformers.TrainingArguments works too: --seed, --optim, ...)"
    )
    config_options.accept_any_option(parser)
    parser.epilog = f"{common.THREADS}\n\n{parser.epilog}"
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Collect the settings, read the rows, train or make a dry run."""
    with common.main_process_errors():
        require_transformers()
        from sdmlm.finetuning import recipe, run, settings, threads

        output = args.output or (recipe.read_recipe(args.recipe).get("output") if args.recipe else None)
        only_checks = args.dry_run and not args.resume
        record = None if only_checks else settings.record_to_resume(output, args.resume)
        asked = settings.read_settings(
            _given(args), args.recipe, record, resume=args.resume, needs_output=not args.dry_run
        )
        if record is not None and record["status"] == "finished" and not args.dry_run:
            if args.data is not None or args.calibration is not None:
                run.prepare_run(asked, record)  # refuses other rows than those of the run
            first = f"{asked.output} is finished already: nothing was done."
            _show(args, run.finished_summary(record, asked.output), first)
            return
        prepared = run.prepare_run(asked, record)
        if args.dry_run:
            dry_run.show(args, prepared)
            return
        try:
            with threads.threads_for(prepared.parameters()):
                summary = run.train(prepared, args.resume)
        except KeyboardInterrupt:
            command = f"sdmlm train --output {asked.output} --resume"
            raise KeyboardInterrupt(f"stopped; {command} goes on from the last checkpoint.") from None
        _show(args, summary)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings on the command line, as text."""
    from sdmlm.finetuning.settings import setting_types

    known = setting_types()
    named = {name: value for name, value in vars(args).items() if name in known and value is not None}
    return {**named, **config_options.read_options(args.more)}


def _show(args: argparse.Namespace, summary: dict[str, Any], first: str | None = None) -> None:
    """Print the summary of a finished run."""
    if not is_main_process():
        return
    if args.json:
        common.print_json(summary)
        return
    out, best, data = common.console(args), summary["best"], summary["data"]
    if first:
        out.print(first, markup=False)
    show_answers(out, summary)
    out.print(f"{summary['steps']} steps on {data['train']['used']} rows, calibrated on {data['calibration']['used']}.")
    if best["loss"] is not None:
        where = f"at step {best['step']} (epoch {best['epoch']:.3g})"
        rows = "calibration rows that are not held out" if summary.get("certificate") else "calibration rows"
        out.print(f"Best evaluation: next-token loss {best['loss']:.4f} over the {rows}, {where}.")
    show_layer(out, summary)
    folder = Path(summary["output"])
    out.print(f"Written: {folder} (model, tokenizer, sdm/, {RECORD}).", markup=False, soft_wrap=True)
    show_next(out, str(folder), summary)
