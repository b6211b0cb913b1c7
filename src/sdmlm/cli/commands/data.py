"""`sdmlm data`: rows for the tasks that come with sdmlm."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdmlm.cli import common
from sdmlm.demo import SENTENCES, SENTENCES_SEED
from sdmlm.storage.text_files import decode

WORD_ORDERING = """\
  sdmlm data word-ordering --sentences wikipedia.txt --harvard harvard.txt --output data/word_ordering
  sdmlm data word-ordering --sentences sentence-transformers/wikipedia-en-sentences --output data/word_ordering"""
SMALL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # in the suggested command: any causal LM will do
ARITHMETIC = "  sdmlm data arithmetic --output data/arithmetic --train 2000 --calibration 2000"


def add(subparsers: Any) -> None:
    """Declare the command and the task below it."""
    help, examples = "make rows of prompt, chosen and rejected for a task", f"{WORD_ORDERING}\n{ARITHMETIC}"
    parser = common.add_command(subparsers, "data", help, examples)
    tasks = parser.add_subparsers(required=True, metavar="TASK", title="tasks")
    ordering = common.add_command(
        tasks,
        "word-ordering",
        "the paper's task: put the last words of a sentence back into order",
        WORD_ORDERING,
    )
    ordering.add_argument(
        "--sentences",
        required=True,
        nargs="+",
        metavar="F",
        help='text files with one sentence per line, or a data set of the Hub, or "demo" (sentences of the demo)',
    )
    ordering.add_argument("--harvard", metavar="H", help="sentences of a further test set, harvard.jsonl")
    ordering.add_argument("--suffix", type=int, default=3, metavar="N", help="words to put back into order (3)")
    ordering.add_argument("--min-words", type=int, default=5, metavar="N", help="shortest sentence (5)")
    ordering.add_argument("--max-words", type=int, default=60, metavar="N", help="longest sentence (60)")
    ordering.add_argument(
        "--prompt",
        metavar="T",
        help="another prompt than the paper's, with {start} and {end} in it; it should ask for <sentence> </sentence>",
    )
    _add_common(ordering)
    ordering.set_defaults(run=word_ordering)
    sums = common.add_command(
        tasks,
        "arithmetic",
        "sums of whole numbers with their working, another task that can be checked",
        ARITHMETIC,
    )
    _add_common(sums)
    sums.set_defaults(run=arithmetic)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder for the .jsonl files")
    for name, size in (("train", 5000), ("calibration", 5000), ("test", 2000), ("shifted", 2000)):  # the paper's
        what = f"rows of the {'shifted test' if name == 'shifted' else name} set ({size})"
        parser.add_argument(f"--{name}", type=int, default=size, metavar="N", help=what)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same rows (0)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def word_ordering(args: argparse.Namespace) -> None:
    """Rows from sentences."""
    from sdmlm.tasks.word_ordering import PROMPT, make_splits

    output = _new_folder(args.output)
    sentences = [sentence for source in args.sentences for sentence in read_sentences(source)]
    splits = make_splits(
        sentences,
        None if args.harvard is None else read_sentences(args.harvard),
        **_sizes(args),
        suffix=args.suffix,
        min_words=args.min_words,
        max_words=args.max_words,
        prompt=PROMPT if args.prompt is None else args.prompt,
    )
    model = "demo" if args.sentences == ["demo"] else SMALL_MODEL
    _write(args, output, splits.rows, splits.left_out, model, "sdmlm.tasks.word_ordering:reward")


def arithmetic(args: argparse.Namespace) -> None:
    """Rows from a generator of sums."""
    from sdmlm.tasks.arithmetic import make_splits

    output = _new_folder(args.output)
    _write(args, output, make_splits(**_sizes(args)), {}, SMALL_MODEL, "sdmlm.tasks.arithmetic:reward")


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in ("train", "calibration", "test", "shifted", "seed")}


def read_sentences(source: str) -> list[str]:
    """Sentences from a text file (one per line), the demo's grammar ("demo"), or a data set of the Hub.

    A data set is given as name, name:split (also train[:9]) or name:configuration:split. Its column `sentence` or `text` is
    read; every line of a cell is a sentence.
    """
    if source == "demo":
        from sdmlm.demo.sentences import settled_sentences

        return settled_sentences(SENTENCES, seed=SENTENCES_SEED)
    path = Path(source)
    if path.is_file():
        lines = _sentences_in(decode(path.read_bytes(), source))
        if not lines:
            raise ValueError(f"{source} is empty: it holds no sentences.")
        return lines
    if path.exists() or source.startswith((".", "/", "~")) or path.suffix == ".txt":
        raise ValueError(f"{source} is no file: give a text file with one sentence a line, or a data set of the Hub.")
    parts = re.split(r":(?![^\[]*\])", source)  # not at the colon inside train[:9]
    name, *config, split = parts if len(parts) > 1 else (source, "train")
    if len(config) > 1 or not all((name, *config, split)):
        raise ValueError(f"{source} is no name of a data set: give name, name:split or name:configuration:split.")
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source} is no file here; to look on the Hub, install the extra lm (in a clone: pip install -e '.[lm]')."
        ) from error
    try:
        rows = datasets.load_dataset(name, *config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip().split("\n")[0] or type(error).__name__).rstrip(".")
        raise ValueError(f"{source} is no file here, and the Hub gave no such data set: {reason}.") from error
    column = next((c for c in ("sentence", "text") if c in rows.column_names), None)
    if column is None:
        raise ValueError(f"{source} has no column `sentence` or `text` (found: {', '.join(rows.column_names)}).")
    lines = [line for cell in rows[column] if isinstance(cell, str) for line in _sentences_in(cell)]
    if not lines:
        raise ValueError(f"{source} has no text in its column {column}: it holds no sentences.")
    return lines


def _sentences_in(text: str) -> list[str]:
    return [line for each in text.split("\n") if (line := each.strip())]


def _new_folder(output: str) -> Path:
    folder = Path(output)
    if folder.is_file():
        raise ValueError(f"{output} is a file: name a new folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{output} is not empty: name a new folder, nothing there was changed.")
    common.check_output_file(str(folder / "train.jsonl"))
    return folder


def _write(
    args: argparse.Namespace,
    output: Path,
    splits: Mapping[str, Sequence[dict[str, Any]]],
    left_out: Mapping[str, int],
    model: str,
    reward: str,
) -> None:
    from sdmlm.storage.artifacts import write_text_atomically

    if not splits:
        raise ValueError("All sizes are 0: ask for at least one row.")
    output.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text_atomically(output / f"{name}.jsonl", text)
    result = {
        "output": str(output),
        "rows": {name: len(rows) for name, rows in splits.items()},
        "left_out": {why: n for why, n in left_out.items() if n},
        "seed": args.seed,
    }
    if args.json:
        common.print_json(result)
        return
    out = common.console(args)
    table = common.rich_table(f"Rows written to {output}", ("file", "rows", "words in a prompt"), left=["file"])
    for name, rows in splits.items():
        words = sum(len(row["prompt"].split()) for row in rows) / len(rows)
        table.add_row(f"{name}.jsonl", str(len(rows)), f"{words:.1f}")
    out.print(table)
    if result["left_out"]:
        out.print("Left out: " + ", ".join(f"{n} {why}" for why, n in result["left_out"].items()) + ".")
    if {"train", "calibration"} <= splits.keys():
        rows_of = f"--data {output}/train.jsonl --calibration {output}/calibration.jsonl"
        train = f"sdmlm train --model {model} {rows_of} --reward {reward} --output runs/lm"
        out.print(f"Next: {train}", markup=False, soft_wrap=True)
        out.print("(--dry-run at its end checks and shows everything first; --model may be any causal language model.)")
