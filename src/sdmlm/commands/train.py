"""`sdmlm train`: from rows of prompt, chosen and rejected to an SDM language model."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm import __version__, recipe
from sdmlm.commands import calibrate, common

if TYPE_CHECKING:
    from rich.text import Text

    from sdmlm.config import SDMConfig
    from sdmlm.encoding import Encoded, Encoder
    from sdmlm.preference_files import PreferenceRows, Row

EXAMPLES = """\
  sdmlm train --model microsoft/Phi-3.5-mini-instruct --data rows.jsonl --output runs/phi --dry-run
  sdmlm train --model models/tiny --data train.jsonl --calibration calibration.jsonl --output runs/tiny --loss ce
  sdmlm train --recipe recipes/phi-3.5-mini/sdm_hn.yaml --output runs/phi --resume
  accelerate launch --num_processes 4 -m sdmlm.cli train --recipe recipes/phi-3.5-mini/sdm_hn.yaml"""

RECORD = "training.json"  # in the output folder, from the start of a run: says that the folder is ours
OPTIONS = {
    "model": str,
    "data": str,
    "calibration": str,
    "output": str,
    "reward": str,
    "lora_r": int,
    "lora_alpha": float,
}
# Settings that a resumed run may change: they do not touch the weights.
_FREE = (
    "output",
    "data",
    "calibration",
    "logging_",
    "log_",
    "report_to",
    "run_name",
    "disable_tqdm",
    "save_total_limit",
    "hub_",
)


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = common.add_command(subparsers, "train", "fine-tune a causal language model into an SDM LM", EXAMPLES)
    parser.usage = "sdmlm train --model M --data ROWS [--calibration ROWS] --output DIR [options]"
    parser.add_argument("--model", metavar="M", help="model folder, or a name on the Hub")
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
    with calibrate.one_voice():
        calibrate.require_transformers()
        record = _record(args)
        settings, config = _settings(args, record)
        if record is not None and record["status"] == "finished" and not args.dry_run:
            _tell(args, record["summary"], f"{settings['output']} is finished already: nothing was done.")
            return
        plan = _plan(settings, config, record)
        if args.dry_run:
            _rehearse(args, plan)
        else:
            _train(args, plan)


# Settings


def _settings(args: argparse.Namespace, record: dict[str, Any] | None) -> tuple[dict[str, Any], SDMConfig]:
    """All that was asked for (of the command line, else of the recipe, else of the run to resume), and the config."""
    from sdmlm.config import SDMConfig

    kinds = {**{name: kind | None for name, kind in OPTIONS.items()}, **recipe.field_types()}
    own = {name: value for name, value in vars(args).items() if name in kinds and value is not None}
    given = recipe.typed({**own, **recipe.read_options(args.more)}, kinds)
    if args.recipe:
        given = recipe.typed(recipe.read_recipe(args.recipe), kinds, args.recipe) | given
    before: dict[str, Any] = record["settings"] if record else {}
    for name, value in given.items():
        old = before.get(name, recipe.field_default(name))
        if record and value != old and not name.startswith(_FREE):
            raise ValueError(f"{name} was {old!r} and is now {value!r}: --resume goes on with the settings of the run.")
    settings = before | given
    for name in ("model", "data", "output"):
        if settings.get(name) is None and not (name == "output" and args.dry_run):
            raise ValueError(f"--{name} is missing: give it, or a recipe that has it.")
    if settings.get("lora_r") is not None and settings["lora_r"] < 1:
        raise ValueError(f"lora_r is {settings['lora_r']} but must be at least 1.")
    fields = {name: value for name, value in settings.items() if name not in OPTIONS}
    return settings, SDMConfig(**{"report_to": "none", **fields, "output_dir": settings.get("output")})


def _record(args: argparse.Namespace) -> dict[str, Any] | None:
    """The record of the run to resume; refuses an output folder that is not to be written to."""
    output = args.output
    if output is None and args.recipe:
        output = recipe.read_recipe(args.recipe).get("output")
    if output is None or (args.dry_run and not args.resume):
        return None
    folder = Path(str(output))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder to train into.")
    common.check_output_file(str(folder / RECORD))
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        ours = isinstance(record["settings"], dict) and record["status"] in ("started", "finished")
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise ValueError(f"{folder} holds something else than a training run of sdmlm: name another folder.")
    if not args.resume:
        raise ValueError(
            f"{folder} already holds a training run ({record['status']}): give --resume or another folder."
        )
    return record  # type: ignore[no-any-return]


# Rows


@dataclass
class Plan:
    """What is known before any weights are loaded."""

    settings: dict[str, Any]
    config: SDMConfig
    tokenizer: Any
    skeleton: Any  # the model without memory for its weights
    encoder: Encoder
    sources: list[PreferenceRows]
    train: list[Row]
    calibration: list[Row]
    data: dict[str, Any]  # about the rows, for the record
    resumed: bool


def _plan(settings: dict[str, Any], config: SDMConfig, record: dict[str, Any] | None) -> Plan:
    from sdmlm.encoding import Encoder
    from sdmlm.final_layer import position_limit
    from sdmlm.preference_files import read_preferences
    from sdmlm.rewards import load_reward

    load_reward(settings.get("reward"))
    sources = [read_preferences(settings["data"], config.tags())]
    if settings.get("calibration") is not None:
        sources.append(read_preferences(settings["calibration"], config.tags()))
        train, held = (source.rows for source in sources)
    else:
        train, held = _halves(sources[0].rows, config.seed)
    data = {
        name: {"source": source.source, "sha256": source.sha256, "rows": len(source), "used": len(rows)}
        for name, source, rows in (("train", sources[0], train), ("calibration", sources[-1], held))
    }
    for name, facts in record["data"].items() if record else ():
        if (facts["sha256"], facts["used"]) != (data[name]["sha256"], data[name]["used"]):
            raise ValueError(
                f"The {name} rows ({data[name]['source']}) have changed since this run began: --resume needs the same."
            )
    tokenizer = calibrate.load_tokenizer(settings["model"])
    skeleton = _skeleton(settings)
    limit = position_limit(skeleton, config.max_length)
    encoder = Encoder(tokenizer, config.tags(), limit, config.truncate_prompt)
    return Plan(settings, config, tokenizer, skeleton, encoder, sources, train, held, data, record is not None)


def _announce(plan: Plan) -> None:
    """What a person should know about the rows."""
    if not calibrate.is_main():
        return
    if len(plan.sources) == 1:
        common.warn(
            f"no --calibration: {plan.sources[0].source} is split at random (seed {plan.config.seed}), {len(plan.train)} "
            f"rows for training and {len(plan.calibration)} for calibration."
        )
    shared = len({_key(row) for row in plan.train} & {_key(row) for row in plan.calibration})
    if shared:
        common.warn(
            f"{shared} prompts stand both in the training and in the calibration rows: the calibration will look too good."
        )


def _halves(rows: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Two random halves, each in the order of the file; the odd row is trained on."""
    import numpy as np

    order = np.random.default_rng([seed, 5]).permutation(len(rows))
    cut = (len(rows) + 1) // 2
    first, second = ([rows[i] for i in sorted(part.tolist())] for part in (order[:cut], order[cut:]))
    return first, second


def _key(row: Row) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def _skeleton(settings: dict[str, Any]) -> Any:
    """The model on the meta device: its configuration and the shapes of its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(settings["model"])
    if folder.is_dir() and not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds an adapter: merge it into its model first (peft: merge_and_unload).")
    config = calibrate.loaded(AutoConfig, settings["model"], "configuration")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ValueError(f"{settings['model']} is no causal language model that transformers knows.") from error
    if peft := _lora(settings):
        from peft import get_peft_model

        model = get_peft_model(model, peft)
    return model


def _lora(settings: dict[str, Any]) -> Any:
    """PEFT's configuration, if adapters are asked for. No dropout: it would cost a second pass each step."""
    if settings.get("lora_r") is None:
        return None
    from peft import LoraConfig

    rank = settings["lora_r"]
    scale = settings.get("lora_alpha") or 2 * rank
    return LoraConfig(r=rank, lora_alpha=scale, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


# Training


def _train(args: argparse.Namespace, plan: Plan) -> None:
    import torch

    from sdmlm.trainer import SDMTrainer

    settings, config = plan.settings, plan.config
    output = Path(settings["output"])
    for source in plan.sources:
        calibrate.check_lengths(plan.encoder, source.rows, source.source)
    plan.skeleton = None
    trainer = SDMTrainer(
        calibrate.load_model(settings["model"], torch.float32),
        config,
        plan.train,
        plan.calibration,
        plan.tokenizer,
        settings.get("reward"),
        _lora(settings),
    )
    _announce(plan)
    trainer.accelerator.wait_for_everyone()  # all have looked at the folder: from here on it is ours
    if calibrate.is_main() and not plan.resumed:
        _write_record(output, plan, "started", trainer.args, [], None)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # logs, and whatever a reward prints: stdout is for the summary
            trainer.train(resume_from_checkpoint=args.resume)
            trainer.save_model(str(output))
    except KeyboardInterrupt:
        if calibrate.is_main():
            common.warn(f"stopped; sdmlm train --output {output} --resume goes on from the last checkpoint.")
        raise
    assert trainer.estimator is not None
    if not calibrate.is_main():
        return
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
    _write_record(output, plan, "finished", trainer.args, state.log_history, summary)
    _tell(args, summary)


def _write_record(
    output: Path, plan: Plan, status: str, config: SDMConfig, history: list[Any], summary: dict[str, Any] | None
) -> None:
    """training.json: what was asked for, on which rows, and what came of it; no tokens, no NaN."""
    from sdmlm.artifacts import write_text_atomically

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


def _say(args: argparse.Namespace, message: str) -> None:
    if calibrate.is_main():
        common.console(args).print(message, markup=False, soft_wrap=True)


def _tell(args: argparse.Namespace, summary: dict[str, Any], first: str | None = None) -> None:
    """The summary of a finished run."""
    if not calibrate.is_main():
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


# Rehearsal


def _rehearse(args: argparse.Namespace, plan: Plan) -> None:
    """Everything but training: lengths, classes, memory, steps, and three documents as the loss sees them."""
    from sdmlm.final_layer import check_halves

    encoded, lengths = _encode_all(plan)
    positive = {name: _drawn(plan, name) for name in ("train", "calibration")}
    facts = {
        "model": plan.settings["model"],
        "data": plan.data,
        "lengths": lengths,
        "documents": {name: {"positive": sum(p), "negative": len(p) - sum(p)} for name, p in positive.items()},
        "memory": _memory(plan, encoded),
        "steps": _steps(plan),
    }
    if calibrate.is_main():
        out = common.console(args)
        _announce(plan)
        _show_examples(out, plan, encoded, positive["train"])
        _show_facts(out, facts)
        if args.json:
            common.print_json(facts)
    if lengths["refused"]:
        # Nothing would be trained: say so as training would.
        for source in plan.sources:
            calibrate.check_lengths(plan.encoder, source.rows, source.source)
    for name, p in positive.items():
        check_halves(p, name)
    _say(args, "Dry run: nothing was trained or written.")


def _drawn(plan: Plan, name: str) -> list[bool]:
    """Which rows stand with their positive: of the training rows in the first epoch, of the calibration rows always."""
    from sdmlm.negatives import NegativePolicy

    policy = NegativePolicy(plan.config.gamma_plus, 0.0, 0.0, seed=plan.config.seed)
    rows, epoch = (plan.train, 1) if name == "train" else (plan.calibration, 0)
    return [policy.draw(i, epoch).positive for i in range(len(rows))]


def _encode_all(plan: Plan) -> tuple[list[tuple[Encoded, Encoded] | None], dict[str, Any]]:
    """(positive, negative) of every training row, None for a row that is refused; and how long documents are."""
    from dataclasses import replace

    from sdmlm.progress import track

    encoder, unbounded = plan.encoder, replace(plan.encoder, max_length=None)
    limit = encoder.max_length
    lengths, over, refused = [], 0, 0
    encoded: list[tuple[Encoded, Encoded] | None] = []
    for row in track([*plan.train, *plan.calibration], "Encoding", calibrate.is_main()):
        pair = _pair(unbounded, row)
        longest = max(len(e.input_ids) for e in pair)
        lengths.append(longest)
        kept: tuple[Encoded, Encoded] | None = pair
        if limit is not None and longest > limit:
            over += 1
            try:
                kept = _pair(encoder, row)
            except ValueError:
                kept, refused = None, refused + 1
        encoded.append(kept)
    ordered = sorted(lengths)
    facts = {
        "longest": ordered[-1],
        "median": ordered[len(ordered) // 2],
        "limit": limit,
        "over": over,
        "refused": refused,
    }
    return encoded[: len(plan.train)], facts


def _pair(encoder: Encoder, row: Row) -> tuple[Encoded, Encoded]:
    return encoder.encode(row["prompt"], row["chosen"], True), encoder.encode(row["prompt"], row["rejected"], False)


def _memory(plan: Plan, encoded: list[tuple[Encoded, Encoded] | None]) -> dict[str, int]:
    """Bytes on one device without sharding; activations, which depend on the attention used, come on top."""
    from sdmlm.encoding import IGNORED
    from sdmlm.loss import CHUNK_NUMEL

    parameters = list(plan.skeleton.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    vocabulary = plan.skeleton.config.get_text_config().vocab_size
    counted = sorted((sum(label != IGNORED for label in pair[0].labels) for pair in encoded if pair), reverse=True)
    tokens = min(max(1, CHUNK_NUMEL // vocabulary), sum(counted[: plan.config.per_device_train_batch_size]))
    total = sum(p.numel() for p in parameters)
    sizes = {
        "weights": 4 * total,  # float32, whatever autocast computes in
        "gradients": 4 * trainable,
        "optimizer": 8 * trainable,  # AdamW's two moments
        "logits": 4 * tokens * vocabulary,
    }
    return {"parameters": total, "trainable": trainable, **sizes, "total": sum(sizes.values())}


def _steps(plan: Plan) -> dict[str, int]:
    """As SDMTrainer counts them."""
    config, n = plan.config, len(plan.train)
    documents = config.train_batch_size * config.world_size
    batches = n // documents if config.dataloader_drop_last else -(-n // documents)
    epoch = max(1, -(-batches // config.gradient_accumulation_steps))
    total = config.max_steps if config.max_steps > 0 else -(-epoch * config.num_train_epochs // 1)
    chance = (1 - config.gamma_plus) * config.gamma_gen * config.gamma_diversity * config.hard_negatives
    return {
        "batch": documents * config.gradient_accumulation_steps,
        "per_epoch": epoch,
        "total": int(total),
        "generations_per_epoch": round(n * chance),
    }


def _show_examples(out: Any, plan: Plan, encoded: list[tuple[Encoded, Encoded] | None], positive: list[bool]) -> None:
    from rich.text import Text

    whole = [i for i, pair in enumerate(encoded) if pair]
    if not whole:
        return
    longest = max((len(pair[0].input_ids), i) for i, pair in enumerate(encoded) if pair)[1]
    out.print(Text.assemble(
        "Three documents. ", ("Dim", "dim"), " is masked, ",
        (f"{_COUNTED[0]}underlined{_COUNTED[1]}", _COUNTED_STYLE), " counts in the loss, ", (_MARK, "reverse"),
        " is where the SDM layer reads.",
    ))  # fmt: skip
    for i, verified in ((whole[0], True), (whole[0], False), (longest, positive[longest])):
        pair = encoded[i]
        assert pair is not None
        document = pair[0 if verified else 1]
        kind = "positive" if verified else "negative"
        out.rule(Text(f"training row {i}, {kind}, {len(document.input_ids)} tokens"), align="left", characters="-")
        out.print(example_text(plan.encoder, document), soft_wrap=True)


_COUNTED, _COUNTED_STYLE, _MARK = ("[[", "]]"), "bold underline green", "<-h"


def example_text(encoder: Encoder, document: Encoded) -> Text:
    """A document with its mask: brackets and underlining, so that neither colour nor a terminal is needed."""
    from rich.text import Text

    from sdmlm.encoding import IGNORED

    ids, at = document.input_ids, document.verified_at + 1
    masked = next(i for i, label in enumerate(document.labels) if label != IGNORED)
    first, second, third = (_legible(encoder.decode(ids[a:b])) for a, b in ((0, masked), (masked, at), (at, len(ids))))
    if len(first) > 600:
        first = f"{first[:300]} [... {len(first) - 600} characters ...] {first[-300:]}"
    return Text.assemble(
        (first, "dim"), _COUNTED[0], (second, _COUNTED_STYLE), (_MARK, "reverse"), (third, _COUNTED_STYLE), _COUNTED[1]
    )


def _legible(text: str) -> str:
    """Without characters that a terminal would act on."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def _show_facts(out: Any, facts: dict[str, Any]) -> None:
    lengths, memory, steps = facts["lengths"], facts["memory"], facts["steps"]
    table = common.rich_table("Rows", ("rows", "source", "used", "positive", "negative"), left=["rows", "source"])
    for name, documents in facts["documents"].items():
        row = facts["data"][name]
        table.add_row(name, row["source"], str(row["used"]), str(documents["positive"]), str(documents["negative"]))
    out.print(table)
    limit = "no limit" if lengths["limit"] is None else f"limit {lengths['limit']}"
    out.print(f"Lengths: longest {lengths['longest']} tokens, median {lengths['median']}, {limit}; "
              f"{lengths['over']} rows over it, {lengths['refused']} of them refused.")  # fmt: skip
    parts = ", ".join(f"{name} {_size(memory[name])}" for name in ("weights", "gradients", "optimizer"))
    out.print(f"Memory: {memory['parameters']:,} parameters, {memory['trainable']:,} trained; {parts}, largest chunk of "
              f"logits {_size(memory['logits'])}: {_size(memory['total'])} and the activations, without sharding.")  # fmt: skip
    out.print(f"Steps: {steps['per_epoch']} an epoch with batches of {steps['batch']}, {steps['total']} in all; about "
              f"{steps['generations_per_epoch']} generations an epoch from the second on.")  # fmt: skip


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
