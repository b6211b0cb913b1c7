"""`sdmlm calibrate`: the final SDM layer over a language model that is there already, fine-tuned or not."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.finetuning import recipe
from sdmlm.finetuning.processes import is_main_process
from sdmlm.language_model.loading import require_transformers
from sdmlm.storage.record import copy_record, held_out

if TYPE_CHECKING:
    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.finetuning.config import SDMConfig

EXAMPLES = """\
  sdmlm calibrate runs/copy --data calibration.jsonl --force
  sdmlm calibrate microsoft/Phi-3.5-mini-instruct --data calibration.jsonl --output runs/phi --alpha 0.9
  sdmlm calibrate models/base --data org/preferences:validation --reward rewards:check --json"""

FIELDS = (
    "gamma_plus", "max_new_tokens", "max_length", "truncate_prompt", "verification_tags", "tokens_per_batch", "alpha",
    "exemplar_dim", "sdm_epochs", "sdm_batch_size", "sdm_learning_rate", "sdm_rounds", "sdm_center",
)  # fmt: skip
ROWS_HELP = "rows of prompt, chosen, rejected: .jsonl, .json, .parquet, or a data set of the Hub (org/name:split)"
REWARD_HELP = "r, as module:function (default: the completion equals chosen)"


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "fit the final SDM layer over a language model, fine-tuned or not"
    parser = common.add_command(subparsers, "calibrate", help, EXAMPLES)
    parser.usage = "sdmlm calibrate DIR --data ROWS [--output DIR2] [options]"
    parser.add_argument("model", metavar="DIR", help="model folder, or a name on the Hub together with --output")
    parser.add_argument("--data", required=True, metavar="ROWS", help=ROWS_HELP)
    parser.add_argument("--output", metavar="DIR2", help="new folder for model and sdm/ (default: write DIR/sdm)")
    parser.add_argument("--force", action="store_true", help="replace the SDM layer already in DIR/sdm")
    parser.add_argument("--reward", metavar="M:F", help=REWARD_HELP)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    recipe.add_fields(parser, "the SDM layer and its documents", FIELDS)
    parser.add_argument(
        "--seed",
        default=argparse.SUPPRESS,
        metavar="N",
        help="the same seed gives the same layer (that of training, or 42)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Fit, save, summarise."""
    with common.main_process_errors():
        _calibrate(args)


def _calibrate(args: argparse.Namespace) -> None:
    require_transformers()
    from sdmlm.finetuning.config import SDMConfig
    from sdmlm.finetuning.final_layer import completion_room, fit_final_layer, position_limit, save_final_layer
    from sdmlm.language_model.encoding import Encoder
    from sdmlm.language_model.forward import inner_lm
    from sdmlm.language_model.loading import load_lm, load_tokenizer
    from sdmlm.language_model.rows import read_preferences
    from sdmlm.rewards import reward_as_fitted
    from sdmlm.storage.artifacts import SDM_FOLDER

    given = recipe.typed({k: v for k, v in vars(args).items() if k in (*FIELDS, "seed")}, recipe.field_types())
    before = _as_before(args.model)
    fitted = {"reward": before.pop("reward")} if "reward" in before else {}
    config = SDMConfig(**{"output_dir": None, "report_to": "none", **before, **given})
    target = _target(args)
    data = read_preferences(args.data, config.tags())
    rows = held_out(data.rows, data.sha256, args.model)
    reward = reward_as_fitted(args.reward, fitted)
    tokenizer = load_tokenizer(args.model)
    if len(rows) < len(data) and is_main_process():
        common.warn(f"{data.source} was split for training: only the {len(rows)} rows are used that were held out.")
    model = load_lm(args.model, "auto").to(config.device)
    encoder = Encoder(tokenizer, config.tags(), position_limit(model, config.max_length), config.truncate_prompt)
    check_lengths(encoder, rows, data.source)
    config.max_new_tokens = config.max_new_tokens or completion_room(encoder, rows)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a reward prints: stdout is for the summary
        estimator = fit_final_layer(model, encoder, rows, config, reward)
    if not is_main_process():
        return
    weights = inner_lm(model).state_dict()
    source = {"source": data.source, "sha256": data.sha256, "rows": len(rows)}
    if args.output is None:
        save_final_layer(target / SDM_FOLDER, estimator, weights, encoder, config, reward, False, source)
    else:
        with whole_folder(target) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            copy_record(args.model, partial)
            save_final_layer(partial / SDM_FOLDER, estimator, weights, encoder, config, reward, False, source)
    facts = {"output": str(target), "model": args.model, "data": source, **layer_facts(estimator, config)}
    if args.json:
        common.print_json(facts)
        return
    out = common.console(args)
    show_layer(out, facts)
    out.print(f"Written: {target / SDM_FOLDER}.", markup=False)
    show_next(out, str(target), facts)


def _as_before(model: str) -> dict[str, Any]:
    """How documents were put to this model when its SDM layer was fitted: a new layer must see them likewise. And the settings
    of that layer.

    Not by `read_lm_metadata`: where a save was cut off, this command is the repair, and the older facts are right.
    """
    from sdmlm.finetuning.config import LAYER_FIELDS
    from sdmlm.storage.artifacts import CONFIG, SDM_FOLDER

    sdm, before = Path(model) / SDM_FOLDER, {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads((sdm / "lm.json").read_text(encoding="utf-8"))
        names = ("max_length", "truncate_prompt", "max_new_tokens")
        before = {"verification_tags": facts["tags"], **{name: facts[name] for name in names}}
        before |= {"reward": facts["reward"]} if "reward" in facts else {}
        if facts["training"] is not None:
            before |= {name: facts["training"][name] for name in ("gamma_plus", "seed")}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        old = json.loads((sdm / CONFIG).read_text(encoding="utf-8"))["parameters"]
        before |= {field: old[parameter] for parameter, field in LAYER_FIELDS.items()}
    return before


def _target(args: argparse.Namespace) -> Path:
    """The folder that `sdm/` goes into, refused if that would replace something."""
    from sdmlm.storage.artifacts import SDM_FOLDER

    if args.output is not None:
        folder = Path(args.output)
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            raise ValueError(f"{args.output} is not empty: name a new folder (or leave --output out to write DIR/sdm).")
        common.check_output_file(str(folder / "x"))
        return folder
    if not Path(args.model).is_dir():
        raise ValueError(f"{args.model} is not a folder here: give --output, a new folder for the model with its sdm/.")
    common.check_output_folder(str(Path(args.model) / SDM_FOLDER), args.force)
    return Path(args.model)


# What `sdmlm train` needs too


def check_lengths(encoder: Any, rows: list[dict[str, Any]], source: str) -> None:
    """Refuse a row that is too long by its number in its source, before any weights are touched."""
    for i, row in enumerate(rows):
        for column, verified in (("chosen", True), ("rejected", False)):
            encoder.encode(row["prompt"], row[column], verified, row=f"{i} of {source}")


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder that appears with all its contents or not at all."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, target)  # over an empty folder too
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def layer_facts(estimator: SDMEstimator, config: SDMConfig) -> dict[str, Any]:
    """What `sdmlm fit` says of an estimator, with the mean q of each class, which is named by its verdict."""
    from sdmlm.cli.commands import fit

    tags = config.tags()
    facts = fit.summary(estimator, [tags.no, tags.yes])
    ca = estimator.layers_[0].calibration
    for c, row in enumerate(facts["calibration"]["classes"].values()):
        row["mean_q"] = float(ca.q[ca.labels == c].double().mean())
    return facts


def show_layer(out: Any, facts: dict[str, Any]) -> None:
    """The final SDM layer in a table and two sentences."""
    from rich.text import Text

    ca = facts["calibration"]
    columns = ("verified", "points", "mean q", "accuracy", "psi", "accepted", "accuracy accepted")
    table = common.rich_table("The final SDM layer over its calibration half", columns, left=["verified"])
    for name, row in ca["classes"].items():
        accuracy = "-" if row["accuracy_accepted"] is None else f"{row['accuracy_accepted']:.1%}"
        numbers = f"{row['mean_q']:.1f}", f"{row['accuracy']:.1%}", _number(row["psi"])
        accepted = common.percent(row["accepted"], row["points"])
        table.add_row(Text(name), str(row["points"]), *numbers, accepted, accuracy)
    out.print(table)
    share = common.percent(ca["accepted"], ca["points"])
    out.print(f"alpha {facts['alpha']:g}: q'min {_number(facts['q_min'])}, balanced loss {facts['loss']:.4f}")
    out.print(f"{ca['accepted']} of {ca['points']} calibration points ({share}) lie in the high-reliability region.")


def _number(value: float | None) -> str:
    return "none" if value is None else common.number(value)  # None where it comes from JSON, which has no infinity


def show_next(out: Any, folder: str, facts: dict[str, Any]) -> None:
    """What a person may do with an SDM LM."""
    out.print(
        f"Next: sdmlm report {folder}, sdmlm chat {folder}, sdmlm serve {folder}, or in Python "
        f'SDMLanguageModel.from_pretrained("{folder}").',
        markup=False,
        soft_wrap=True,
    )
    if not facts["calibration"]["accepted"]:
        common.warn(
            f"{common.nothing_accepted(facts)} or another --sdm-learning-rate (small models need more) with sdmlm calibrate "
            f"{folder} --data ROWS --force, more rows, or longer training."
        )
