"""`sdmlm calibrate`: fit the SDM layer of an existing language model, fine-tuned or not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sdmlm.cli import common, config_options
from sdmlm.cli.layer_tables import REWARD_HELP, ROWS_HELP, show_answers, show_layer, show_next
from sdmlm.finetuning.processes import is_main_process
from sdmlm.language_model.loading import require_transformers

EXAMPLES = """\
  sdmlm calibrate runs/copy --data calibration.jsonl --force
  sdmlm calibrate microsoft/Phi-3.5-mini-instruct --data calibration.jsonl --output runs/phi --alpha 0.9
  sdmlm calibrate models/base --data org/preferences:validation --reward rewards:check --json"""

FIELDS = (
    "gamma_plus", "max_new_tokens", "max_length", "truncate_prompt", "verification_tags", "tokens_per_batch", "alpha",
    "exemplar_dim", "sdm_epochs", "sdm_batch_size", "sdm_learning_rate", "sdm_rounds", "sdm_center", "summary",
    "documents", "own_samples", "own_temperature", "certificate_share", "certificate_delta", "certificate_epsilon",
)  # fmt: skip


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "fit the SDM layer of a language model, fine-tuned or not"
    parser = common.add_command(subparsers, "calibrate", help, EXAMPLES)
    parser.usage = "sdmlm calibrate DIR --data ROWS [--output DIR2] [options]"
    parser.add_argument("model", metavar="DIR", help="model folder, or a name on the Hub together with --output")
    parser.add_argument("--data", required=True, metavar="ROWS", help=ROWS_HELP)
    parser.add_argument("--output", metavar="DIR2", help="new folder for model and sdm/ (default: write DIR/sdm)")
    parser.add_argument("--force", action="store_true", help="replace the SDM layer already in DIR/sdm")
    parser.add_argument("--reward", metavar="M:F", help=REWARD_HELP)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    config_options.add_fields(parser, "the SDM layer and its documents", FIELDS)
    parser.add_argument(
        "--seed",
        default=argparse.SUPPRESS,
        metavar="N",
        help="the same seed gives the same layer (default: that of training, or 42)",
    )
    parser.epilog = f"{common.THREADS}\n\n{parser.epilog}"
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Fit, save, summarise."""
    with common.main_process_errors():
        require_transformers()
        from sdmlm.finetuning import recipe
        from sdmlm.finetuning.calibration import CalibrationRun, calibrate

        given = {name: value for name, value in vars(args).items() if name in (*FIELDS, "seed")}
        changes = recipe.typed(given, recipe.field_types())
        summary = calibrate(CalibrationRun(args.model, args.data, args.output, args.force, args.reward, changes))
        if is_main_process():
            _show(args, summary)


def _show(args: argparse.Namespace, summary: dict[str, Any]) -> None:
    if args.json:
        common.print_json(summary)
        return
    from sdmlm.storage.artifacts import SDM_FOLDER

    out, folder = common.console(args), Path(summary["output"])
    show_answers(out, summary)
    show_layer(out, summary)
    out.print(f"Written: {folder / SDM_FOLDER}.", markup=False)
    show_next(out, str(folder), summary)
