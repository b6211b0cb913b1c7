"""`sdmlm train`: from rows of prompt, chosen and rejected to an SDM language model."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm import __version__
from sdmlm.cli import common
from sdmlm.cli.commands import calibrate, dry_run
from sdmlm.cli.commands.plan import Plan, announce, lora, make_plan, read_settings, record_to_resume
from sdmlm.finetuning import recipe
from sdmlm.finetuning.processes import is_main_process
from sdmlm.language_model.loading import load_lm, require_transformers
from sdmlm.storage.record import RECORD

if TYPE_CHECKING:
    from sdmlm.finetuning.config import SDMConfig

EXAMPLES = """\
  sdmlm train --model microsoft/Phi-3.5-mini-instruct --data rows.jsonl --output runs/phi --dry-run
  sdmlm train --model models/tiny --data train.jsonl --calibration calibration.jsonl --output runs/tiny --loss ce
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
    parser.add_argument("--data", metavar="ROWS", help=calibrate.ROWS_HELP)
    parser.add_argument("--calibration", metavar="ROWS", help="calibration rows D_ca (default: half of --data)")
    parser.add_argument("--output", metavar="DIR", help="new folder for the SDM LM and its checkpoints")
    parser.add_argument("--recipe", metavar="FILE.yaml", help="settings, one `name: value` a line; options win over it")
    parser.add_argument("--reward", metavar="M:F", help=calibrate.REWARD_HELP)
    parser.add_argument("--lora-r", metavar="N", help="train LoRA adapters of this rank instead of all weights")
    parser.add_argument("--lora-alpha", metavar="X", help="their scale (twice the rank)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR, or begin where there is none")
    parser.add_argument("--dry-run", action="store_true", help="encode and check everything, show examples, stop")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    recipe.add_fields(
        parser, "SDMConfig (every field of transformers.TrainingArguments works too: --seed, --optim, ...)"
    )
    recipe.accept_any_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Gather the settings, read the rows, train or rehearse."""
    with common.main_process_errors():
        require_transformers()
        record = record_to_resume(args)
        settings, config = read_settings(args, record)
        if record is not None and record["status"] == "finished" and not args.dry_run:
            if args.data is not None or args.calibration is not None:
                make_plan(settings, config, record)  # refuses other rows than those of the run
            _tell_finished(args, record, settings["output"])
            return
        plan = make_plan(settings, config, record)
        if args.dry_run:
            dry_run.rehearse(args, plan)
            return
        try:
            _tell(args, train(plan, args.resume))
        except KeyboardInterrupt:
            goes_on = f"sdmlm train --output {settings['output']} --resume goes on from the last checkpoint"
            raise KeyboardInterrupt(f"stopped; {goes_on}.") from None


def train(plan: Plan, resume: bool) -> dict[str, Any]:
    """Train, save model and record, and give the summary."""
    import torch

    from sdmlm.finetuning.trainer import SDMTrainer

    settings, config = plan.settings, plan.config
    output = Path(settings["output"])
    for source in plan.sources:
        calibrate.check_lengths(plan.encoder, source.rows, source.source)
    plan.skeleton = None
    model = load_lm(settings["model"], torch.float32)
    try:
        trainer = SDMTrainer(
            model, config, plan.train, plan.calibration, plan.tokenizer, settings.get("reward"), lora(settings)
        )
    except (RuntimeError, ImportError) as error:  # of transformers: a logger that is not installed, say
        raise ValueError(
            f"Training cannot begin: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error
    announce(plan)
    trainer.accelerator.wait_for_everyone()  # all have looked at the folder: from here on it is ours
    if is_main_process() and not plan.resumed:
        _write_record(output, plan, "started", trainer.args, [], None)
    with contextlib.redirect_stdout(sys.stderr):  # logs, and whatever a reward prints: stdout is for the summary
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(output))
    assert trainer.estimator is not None
    state = trainer.state
    at_best = [r for r in state.log_history if r["step"] == state.best_global_step and "eval_loss" in r]
    best: dict[str, Any] = at_best[-1] if at_best else {}
    summary = {
        "output": str(output),
        "model": settings["model"],
        "steps": state.global_step,
        "best": {"loss": best.get("eval_loss"), "step": best.get("step"), "epoch": best.get("epoch")},
        "data": plan.data,
        **calibrate.layer_facts(trainer.estimator, config),
    }
    if is_main_process():
        _write_record(output, plan, "finished", trainer.args, state.log_history, summary)
    return summary


def _write_record(
    output: Path, plan: Plan, status: str, config: SDMConfig, history: list[Any], summary: dict[str, Any] | None
) -> None:
    """training.json: what was asked for, on which rows, and what came of it; no tokens, no NaN."""
    from sdmlm.storage.artifacts import write_text_atomically

    record = {
        "format_version": 1,
        "sdmlm_version": __version__,
        "status": status,
        "settings": {name: value for name, value in plan.settings.items() if not name.endswith("_token")},
        "data": plan.data,
        "config": config.to_dict(),
        "summary": summary,
        "log_history": history,
    }
    text = json.dumps(json.loads(common.to_json(record)), indent=1, ensure_ascii=False, allow_nan=False)
    write_text_atomically(output / RECORD, text + "\n")


def _tell_finished(args: argparse.Namespace, record: dict[str, Any], output: str) -> None:
    """The summary that was recorded, with the SDM layer that is there now: `sdmlm calibrate` may have been run since."""
    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.finetuning.config import SDMConfig
    from sdmlm.storage.artifacts import SDM_FOLDER

    config = SDMConfig(output_dir=None, report_to="none", verification_tags=record["config"]["verification_tags"])
    now = calibrate.layer_facts(SDMEstimator.from_pretrained(Path(output) / SDM_FOLDER), config)
    _tell(args, {**record["summary"], **now}, f"{output} is finished already: nothing was done.")


def _tell(args: argparse.Namespace, summary: dict[str, Any], first: str | None = None) -> None:
    """The summary of a finished run."""
    if not is_main_process():
        return
    if args.json:
        common.print_json(summary)
        return
    out, best, data = common.console(args), summary["best"], summary["data"]
    if first:
        out.print(first, markup=False)
    out.print(f"{summary['steps']} steps on {data['train']['used']} rows, calibrated on {data['calibration']['used']}.")
    if best["loss"] is not None:
        where = f"at step {best['step']} (epoch {best['epoch']:.3g})"
        out.print(f"Best evaluation: next-token loss {best['loss']:.4f} over the calibration rows, {where}.")
    calibrate.show_layer(out, summary)
    out.print(f"Written: {summary['output']} (model, tokenizer, sdm/, {RECORD}).", markup=False, soft_wrap=True)
    calibrate.show_next(out, summary["output"], summary)
