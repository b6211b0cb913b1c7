"""`sdmlm chat`: ask an SDM language model, and see its answer, the verdict and the reason."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.cli.commands import generate
from sdmlm.errors import BadPrompt
from sdmlm.storage.text_files import visible

if TYPE_CHECKING:
    from rich.console import Console

    from sdmlm.generation.language_model import SDMLanguageModel
    from sdmlm.generation.verification import Verification

EXAMPLES = """\
  sdmlm chat runs/lm
  sdmlm chat runs/lm --alpha 0.9 --search resample
  echo "Say hello." | sdmlm chat runs/lm"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "ask in the terminal, and see answers with verdict and reason"
    parser = common.add_command(subparsers, "chat", help, EXAMPLES)
    generate.add_model(parser)
    generate.add_writing(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Read lines until the end of input (Ctrl-D)."""
    options = generate.writing(args)
    with generate.opened(args) as lm:
        _talk(lm, args, options)


def _talk(lm: SDMLanguageModel, args: argparse.Namespace, options: dict[str, Any]) -> None:
    """A turn for each line of input."""
    out = common.console(args)
    person = sys.stdin.isatty()
    if person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  arrow keys and history
        # The SDM layer was usually fitted over documents of one turn.
        out.print(
            "One question per line, each on its own. Ctrl-D ends." if not lm.tokenizer.chat_template else
            "One line per turn; an empty line starts a new conversation. Ctrl-D ends.",
            style="dim",
        )  # fmt: skip
    turns: list[dict[str, str]] = []
    while True:
        try:
            line = input("> " if person else "")
        except (EOFError, KeyboardInterrupt):
            break
        except UnicodeDecodeError as error:
            raise ValueError(f"stdin is not UTF-8 text (byte {error.start}): convert it to UTF-8.") from error
        if not line.strip():
            turns = []
            continue
        turns = [*turns, {"role": "user", "content": line}] if lm.tokenizer.chat_template else []
        try:
            answer = _answer(lm, turns or line, args, options, out)
        except ValueError as error:  # a prompt that cannot be answered does not end the conversation
            common.warn(str(error))
            turns = turns[:-1]
            continue
        turns = [*turns, {"role": "assistant", "content": answer.text}] if turns else []
    if person:
        out.print()


def _answer(lm: Any, prompt: Any, args: argparse.Namespace, options: dict[str, Any], out: Console) -> Verification:
    """Print an answer while it is generated, then the decision and the reason."""

    def write(_: int, piece: str) -> None:
        out.print(visible(piece), end="", markup=False, soft_wrap=True)

    streamed = options["search"] is None  # the answer of a search is known only at its end
    more = {"on_text": write} if streamed else {}
    try:
        (v,) = lm.generate([prompt], alpha=args.alpha, neighbors=0, progress=not streamed, **more, **options)
    except BadPrompt as error:
        raise ValueError(error.named("This")) from error
    if not streamed:
        write(0, v.text)
    out.print()
    tries = f", {v.tries} tries" if v.tries > 1 else ""
    out.print(f"{generate.decision(v)}{tries}.", style=generate.colour(v), markup=False, end=" ")
    out.print(v.reason, style="dim", markup=False, soft_wrap=True)
    answer: Verification = v
    return answer
