"""Answers of the demo, with their verdicts, reasons and most similar known answers."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from sdmlm.evaluation.lm_evaluation import Evaluation
from sdmlm.experiments.evaluate import generation_length

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel
    from sdmlm.generation.verification import Verification

LOOKED_AT = 300  # certified examples are chosen among this many answers
Rows = Sequence[Mapping[str, str]]
Example = tuple[str, Mapping[str, str], "Verification"]  # title, row, answer


def certified_examples(lm: SDMLanguageModel, splits: Mapping[str, Rows]) -> list[Example]:
    """The first answer of each kind by the certificate, not picked by hand; a kind without an answer is left out."""
    wanted = {
        "test": {
            "A verified answer": lambda right, verified: right and verified,
            "A right answer that is not verified": lambda right, verified: right and not verified,
            "An error that was caught": lambda right, verified: not right and not verified,
        },
        "shifted": {
            "An error in a much longer sentence, unlike all known ones, that was caught": lambda right, verified: (
                not right and not verified
            )
        },
    }
    shown: list[Example] = []
    for name, kinds in wanted.items():
        rows = splits[name][:LOOKED_AT]
        length = generation_length(lm, splits[name])
        prompts = [row["prompt"] for row in rows]
        answers = lm.generate(prompts, max_new_tokens=length, neighbors=2, progress=False)
        for title, fits in kinds.items():
            pairs = zip(rows, answers, strict=True)
            example = next(((row, a) for row, a in pairs if fits(a.text.strip() == row["chosen"], a.verified)), None)
            if example is not None:
                shown.append((title, *example))
    return shown


def pick_examples(
    lm: SDMLanguageModel, evaluations: Mapping[str, Evaluation], splits: Mapping[str, Rows]
) -> list[Example]:
    """The first answer of each kind by the region of the papers, not picked by hand."""
    shown = []
    for name, e in evaluations.items():
        yes, right = e.prediction == 1, e.prediction == e.y
        kinds = {
            "verified: accepted as Yes": e.accepted & yes & right,
            "accepted as No": e.accepted & ~yes & right,
            "rejected (not verified: a person should look)": ~e.accepted,
            "accepted although its verdict is wrong": e.accepted & ~right,
        }
        if name == "shifted":
            kinds = {"rejected (not verified: a person should look)": ~e.accepted}
        picked = {kind: splits[name][int(mask.argmax())] for kind, mask in kinds.items() if mask.any()}
        room = generation_length(lm, splits[name])  # as in the evaluation, so that long answers are the same
        prompts = [row["prompt"] for row in picked.values()]
        answers = lm.generate(prompts, max_new_tokens=room, neighbors=2, progress=False)
        shown += [
            (f"The first of the {name} answers that is {kind}", row, answer)
            for (kind, row), answer in zip(picked.items(), answers, strict=True)
        ]
    return shown


def _asked(prompt: str) -> str:
    """The part of a prompt that differs between rows, without the fixed instructions."""
    start, end = re.findall(r"'(.*?)'(?= by reordering|\. Only)", prompt)
    return f"{start} ... ({end})"


def _lines_of(row: Mapping[str, str], verification: Verification) -> Iterator[str]:
    yield f"Asked:  {_asked(row['prompt'])}"
    yield f"Answer: {verification.text}"
    right = verification.text.strip() == row["chosen"]
    truth = "It is right." if right else f"It is wrong; the sentence was: {row['sentence']}"
    yield f"The verdict on it is {verification.verdict}. {truth}"
    yield verification.reason
    for exemplar in verification.exemplars:
        prompt, _, document = re.sub(r"<\|.*?\|>", "", exemplar.text or "").rpartition(" if it did not.")
        what = "right" if exemplar.label == 1 else "wrong"
        said = document.strip().removesuffix("<verified>").strip()
        yield f"  similar, at distance {exemplar.distance:.2f}: {said}, which is {what} for {_asked(prompt)}"


def show_examples(out: Console, examples: Sequence[Example]) -> None:
    """Print them."""
    for title, row, verification in examples:
        out.print(Text(f"\n{title}", style="bold"))
        for line in _lines_of(row, verification):
            out.print(Padding(Text(line.strip()), (0, 0, 0, len(line) - len(line.lstrip()))))


def examples_html(examples: Sequence[Example]) -> str:
    """The same for a report."""
    parts = []
    for title, row, verification in examples:
        lines = "".join(f"<li>{html.escape(line.strip())}</li>" for line in _lines_of(row, verification))
        parts.append(f"<h3>{html.escape(title)}</h3><ul>{lines}</ul>")
    return "".join(parts)
