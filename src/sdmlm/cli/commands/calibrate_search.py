"""`sdmlm calibrate-search`: find the region in which the final answers of a search can be accepted."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.cli.commands.generate import add_model, add_writing, opened, policy
from sdmlm.cli.layer_tables import REWARD_HELP
from sdmlm.storage.record import held_out

if TYPE_CHECKING:
    from sdmlm.generation.search_calibration import SearchCalibration

EXAMPLES = """\
  sdmlm calibrate-search runs/lm --data calibration.jsonl --search resample --budget 4
  sdmlm calibrate-search runs/lm --data calibration.jsonl --search continue --budget 2 --reward rewards:check --json"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "calibrate a search as a whole, for sdmlm generate --search and sdmlm serve"
    parser = common.add_command(subparsers, "calibrate-search", help, EXAMPLES)
    parser.add_argument(
        "--data", required=True, metavar="ROWS", help="the rows that the model's SDM layer was fitted over (D_ca)"
    )
    parser.add_argument("--reward", metavar="M:F", help=REWARD_HELP)
    add_model(parser)
    add_writing(parser, preparing=True, required=True)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Search on the calibration prompts, find the region, save it with the model."""
    with common.main_process_errors():
        _run(args)


def _run(args: argparse.Namespace) -> None:
    from sdmlm.generation.search_calibration import calibrate_search
    from sdmlm.language_model.rows import read_preferences

    search = policy(args)
    assert search is not None  # the option is required
    with (
        opened(args) as lm,
        contextlib.redirect_stdout(sys.stderr),
    ):  # a reward may print, and stdout is for the result
        data = read_preferences(args.data, lm.tags)
        rows = held_out(data.rows, data.sha256, Path(args.model))
        calibration = calibrate_search(
            lm,
            rows,
            search,
            args.reward,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            stop=args.stop,
            alpha=args.alpha,
        )
    result = {"model": args.model, **summary(calibration)}
    if args.json:
        common.print_json(result)
        return
    out = common.console(args)
    share = common.percent(result["verified"], result["prompts"])
    out.print(
        f"{args.search} with a budget of {args.budget}, over {result['prompts']} calibration prompts: "
        f"{result['tries']:.2f} tries per prompt, {common.percent(result['right'], result['prompts'])} of the final answers right.",
        markup=False,
    )
    q_min = common.number(calibration.region().q_min)
    out.print(f"alpha {calibration.alpha:g}: q'min {q_min}, {share} of the final answers verified.")
    if not result["verified"]:
        common.warn(
            "no final answer lies in the region, so this search will have none verified: look at the SDM layer first "
            "(sdmlm report), and try a lower --alpha."
        )
    out.print(f"Written: {args.model}/sdm/search.json. sdmlm generate --search and sdmlm serve use it.", markup=False)


def summary(calibration: SearchCalibration) -> dict[str, Any]:
    """The results of a calibrated search on its calibration prompts."""
    return {
        "policy": calibration.to_dict()["policy"],
        "alpha": calibration.alpha,
        "prompts": len(calibration),
        "tries": sum(calibration.tries) / len(calibration),
        "right": sum(calibration.labels),
        "verified": int(calibration.accepted.sum()),
        "verified_right": calibration.accepted_right,
        "q_min": calibration.region().q_min,
        "psi": calibration.region().psi[1],
    }
