"""`sdmlm generate`: answers of an SDM language model with their verdicts."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.storage.text_files import decode, json_lines, visible

if TYPE_CHECKING:
    from sdmlm.errors import SDMError
    from sdmlm.generation.language_model import SDMLanguageModel
    from sdmlm.generation.search import SearchPolicy
    from sdmlm.generation.verification import Verification

EXAMPLES = """\
  sdmlm generate runs/lm --prompts prompts.txt
  sdmlm generate runs/lm --prompts prompts.jsonl --alpha 0.9 --search resample --budget 4 --output answers.jsonl
  echo "Say hello." | sdmlm generate runs/lm --prompts - --json | jq 'select(.verified) | .text'"""

_SHOWN = 20  # answers in the table; all of them go to --output


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "answer prompts, each answer with its verdict"
    parser = common.add_command(subparsers, "generate", help, EXAMPLES)
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="F",
        help=".txt (one prompt per line), .jsonl (objects with `prompt`: text or a conversation), or - for stdin (both)",
    )
    add_model(parser)
    add_writing(parser)
    add_output(parser)
    parser.set_defaults(run=run)


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model and how it judges."""
    parser.add_argument("model", metavar="DIR", help="folder of an SDM language model, or its name on the Hub")
    parser.add_argument("--alpha", type=float, metavar="A", help="another alpha than the model's")
    parser.add_argument("--device", metavar="D", help="torch device, e.g. cpu or cuda (a GPU where there is one)")
    parser.epilog = f"{common.THREADS}\n\n{parser.epilog}"


def add_writing(parser: argparse.ArgumentParser, preparing: bool = False, required: bool = False) -> None:
    """Sampling options. To calibrate or certify a search there is no --seed. `required`: whether --search is."""
    if preparing and not required:
        what = "certify the final answers of a search, for the same options of sdmlm generate"
        group = parser.add_argument_group("search, of a language model", what)
    else:
        group = parser.add_argument_group("generation")
    group.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (as the SDM layer was fitted)"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample among the likeliest tokens (1)")
    if not preparing:
        group.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same answers (0)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends an answer; may be given again")
    group.add_argument(
        "--search",
        choices=("resample", "reprompt", "continue"),
        required=required,
        help="how to try again if an answer is not verified (in our measurements none verified more answers: docs/results.md)",
    )
    group.add_argument("--budget", type=int, default=4, metavar="N", help="with --search: further tries per prompt (4)")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Options about the output."""
    parser.add_argument("--output", metavar="FILE.jsonl", help="write one JSON object per prompt")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    parser.add_argument(
        "--neighbors", type=int, default=3, metavar="N", help="similar known documents to list in the JSON (3)"
    )


def run(args: argparse.Namespace) -> int:
    """Generate, write, show; prompts that are too long are listed, with exit status 1."""
    from sdmlm.generation.prompts import find_too_long

    common.check_output_file(args.output, ".jsonl")
    rows = read_prompts(args.prompts)
    options = writing(args)
    with opened(args) as lm:
        too_long = find_too_long(lm.encoder, [row["prompt"] for row in rows])
        prompts = [row["prompt"] for n, row in enumerate(rows) if n not in too_long]
        judged = lm.generate(prompts, alpha=args.alpha, neighbors=args.neighbors, **options)
    return show(args, rows, judged, too_long)


def writing(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_writing`, checked, as options of SDMLanguageModel.generate."""
    from sdmlm.estimator.region import check_alpha
    from sdmlm.generation.answers import Sampling, check_whole

    Sampling(
        1 if args.max_new_tokens is None else args.max_new_tokens, args.temperature, args.top_p, tuple(args.stop or ())
    )
    check_whole("seed", args.seed, 0)
    if args.alpha is not None:
        check_alpha(args.alpha)
    names = ("max_new_tokens", "temperature", "top_p", "seed", "stop")
    return {**{name: getattr(args, name) for name in names}, "search": policy(args)}


def policy(args: argparse.Namespace) -> SearchPolicy | None:
    """The search that was asked for."""
    if args.search is None:
        return None
    from sdmlm.generation.search import SearchPolicy

    return SearchPolicy(args.search, args.budget)


@contextlib.contextmanager
def opened(args: argparse.Namespace) -> Iterator[SDMLanguageModel]:
    """The model, while the number of threads is right for its size."""
    from sdmlm.language_model.loading import require_transformers

    require_transformers()
    from sdmlm.finetuning.threads import threads_for
    from sdmlm.generation.language_model import SDMLanguageModel

    lm = SDMLanguageModel.from_pretrained(args.model, device=common.checked_device(args.device))
    with threads_for(lm.model.num_parameters()):
        yield lm


# In


def read_prompts(source: str) -> list[dict[str, Any]]:
    """Rows with a prompt from a .txt or .jsonl file, or from stdin, which is read as JSON lines if it begins with a brace."""
    text = read_text(source)
    if source.endswith(".jsonl") or (source == "-" and text.lstrip().startswith("{")):
        return parse_objects(text, source, ("prompt",))
    if source != "-" and not source.endswith(".txt"):
        raise ValueError(f"{source} is of an unknown kind: prompts are read from .txt or .jsonl files, or from -.")
    prompts = [{"prompt": line} for each in text.split("\n") if (line := each.removesuffix("\r")).strip()]
    if not prompts:
        raise ValueError(f"{name_of(source)} is empty: it holds no prompts.")
    return prompts


def read_text(source: str) -> str:
    """The text of a file, or of stdin (-)."""
    if source != "-" and Path(source).is_dir():
        raise ValueError(f"{source} is a folder: name a file.")
    content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    return decode(content, name_of(source))


def parse_objects(text: str, source: str, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Objects of JSON lines that have all these fields."""
    rows = []
    for where, row in json_lines(text, name_of(source)):
        missing = [field for field in fields if field not in row]
        if missing:
            raise ValueError(f"{where}: {missing[0]!r} is missing.")
        rows.append(row)
    if not rows:
        raise ValueError(f"{name_of(source)} is empty: it holds no rows.")
    return rows


def name_of(source: str) -> str:
    return "stdin" if source == "-" else source


# Out


def show(
    args: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
    judged: Sequence[Verification],
    refused: Mapping[int, SDMError],
) -> int:
    """Write and print answers, then list the rows that were refused; the exit status.

    Each JSON object has the fields of its row, then those of the answer, which win. A refused row has `error` instead.
    """
    from sdmlm.storage.artifacts import write_text_atomically

    answers = iter(judged)
    by_row = [None if n in refused else next(answers) for n in range(len(rows))]
    lines = [
        common.to_json({**row, **({"verified": False, "error": str(refused[n])} if v is None else v.to_dict())})
        for n, (row, v) in enumerate(zip(rows, by_row, strict=True))
    ]
    if args.output:
        write_text_atomically(args.output, "".join(line + "\n" for line in lines))
    if not all(v.calibrated for v in judged):
        common.warn(
            "this search is neither certified nor calibrated with these settings, so answers may be accepted too easily."
        )
    if args.json:
        for line in lines:
            print(line)
    else:
        _show_answers(args, rows, by_row)
    if refused:
        common.warn(f"{len(refused)} of {len(rows)} rows were not judged:")
        for error in refused.values():
            common.warn(f"  {error}")
    return 1 if refused else 0


def _show_answers(
    args: argparse.Namespace, rows: Sequence[dict[str, Any]], by_row: Sequence[Verification | None]
) -> None:
    """The first answers, and how many are verified."""
    out = common.console(args)
    for n, (row, v) in enumerate(zip(rows[:_SHOWN], by_row, strict=False)):
        if v is not None:
            _show_one(out, n, row["prompt"], v)
    if len(rows) > _SHOWN:
        out.print(f"... and {len(rows) - _SHOWN} more" + ("." if args.output else ": give --output to see all."))
    judged = [v for v in by_row if v is not None]
    if judged:
        verified, wrong = (sum(v.outcome == name for v in judged) for name in ("verified", "judged wrong"))
        rule = _rule({v.certified for v in judged})
        also = f" {wrong} are judged wrong." if wrong else ""
        out.print(
            f"{verified} of {len(judged)} answers ({common.percent(verified, len(judged))}) are verified: judged "
            f'"{judged[0].yes}" {rule}, at alpha {judged[0].alpha:g}.{also} {len(judged) - verified - wrong} are not '
            "verified: a person should look, which does not mean that they are wrong.",
            markup=False,
        )
    if args.output:
        out.print(f"Written: {args.output}.", markup=False)


def _rule(certified: Set[bool | None]) -> str:
    """Which rule decided about answers, from their `certified`; None where a certificate promises nothing, or there is none."""
    if None not in certified:
        return "under the model's certificate"
    return "in the high-reliability region" + (", and not rejected by the certificate" if False in certified else "")


def _show_one(out: Any, n: int, prompt: Any, v: Verification) -> None:
    """Print the decision in colour, the prompt, the answer, and the reason."""
    from rich.padding import Padding
    from rich.text import Text

    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    out.print(Text.assemble(f"{n}  ", (decision(v), colour(v))))
    asked, answer = (text.strip() if len(text) <= 300 else text[:300].strip() + "..." for text in (asked, v.text))
    for name, text in (("asked:  ", asked), ("answer: ", answer), ("why:    ", v.reason)):
        out.print(Padding(Text.assemble((name, "dim"), visible(text)), (0, 0, 0, 3)))


def decision(v: Verification) -> str:
    """What to do with an answer, and the verdict."""
    if v.outcome in ("verified", "judged wrong"):
        return f"{v.outcome.capitalize()} (verdict {v.verdict})"
    where = ", out of distribution" if v.out_of_distribution else ""
    return f"Not verified{where}: a person should look (verdict {v.verdict})"


def colour(v: Verification) -> str:
    """Green for answers that may be used, red for those judged wrong, yellow for those that a person should look at."""
    return {"verified": "green", "judged wrong": "red"}.get(v.outcome, "yellow")
