"""The documents on which an SDM layer is fitted: mainly the LM's own answers to calibration prompts (docs/method.md, 9).

Greedy and sampled answers, labelled by the reward, show what right and wrong answers of the LM look like. For a share of the
rows there is also the right answer to another prompt, which is wrong here. If the LM gives hardly any wrong answers, the static
negatives of the rows are added; if it gives hardly any right ones, the reference answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sdmlm.finetuning.config import SDMConfig
from sdmlm.language_model.decoding import answer_room, generate
from sdmlm.language_model.encoding import Encoder, completion_text
from sdmlm.rewards import Reward, apply_reward

Rows = Sequence[Mapping[str, Any]]
Source = Literal["greedy", "sampled", "reference", "static", "other"]
OTHER_SHARE = 0.3  # of the rows get a document with the answer to another prompt
FEW = 30  # with fewer prompts that have a right (wrong) own answer, references (static negatives) are added


@dataclass(frozen=True)
class OwnDocument:
    """An answer to the prompt of a row, where it comes from and whether it is right.

    `ids` is the document that the SDM layer reads, up to and including `<verified>`; `start` of them are the prompt's.
    """

    row: int
    source: Source
    body: str
    right: bool
    ids: Sequence[int] = ()
    start: int = 0

    @property
    def name(self) -> str:
        """Its id in the SDM layer; a row has at most one document of a source, but several sampled ones."""
        return f"{self.row} {self.source}"


def unique_names(documents: Sequence[OwnDocument]) -> list[str]:
    """The ids of documents in an SDM layer."""
    counts: dict[str, int] = {}
    names = []
    for document in documents:
        n = counts[document.name] = counts.get(document.name, 0) + 1
        names.append(document.name if n == 1 else f"{document.name} {n}")
    return names


def greedy_answers(
    model: Any,
    encoder: Encoder,
    rows: Rows,
    numbers: Sequence[int],
    args: SDMConfig,
    reward: Reward,
    room: int,
    progress: bool,
) -> list[OwnDocument]:
    """The greedy answers to the rows of these numbers, none left out: a certificate must not depend on which are easy to read."""
    prompts = [rows[i]["prompt"] for i in numbers]
    ids = generate(model, encoder, prompts, room, tokens_per_batch=args.tokens_per_batch, progress=progress)
    texts = [encoder.read(answer)[0] for answer in ids]
    labelled = _labelled(encoder, rows, [(i, "greedy", text) for i, text in zip(numbers, texts, strict=True)], reward)
    left = answer_room(encoder, room)
    read = [encoder.written_document(*one, left) for one in zip(prompts, texts, ids, strict=True)]
    return [dataclasses.replace(a, ids=b, start=start) for a, (b, start) in zip(labelled, read, strict=True)]


def more_documents(
    model: Any,
    encoder: Encoder,
    rows: Rows,
    greedy: Sequence[OwnDocument],
    args: SDMConfig,
    reward: Reward,
    room: int,
    progress: bool,
) -> list[OwnDocument]:
    """The documents to fit on besides the greedy answers, for the same rows."""
    sampled: list[tuple[int, Source, str]] = []
    at = [document.row for document in greedy]
    prompts = [rows[i]["prompt"] for i in at]
    for attempt in range(args.own_samples):
        seeds = [[args.seed, 8, attempt, i] for i in at]
        how = room, args.own_temperature, seeds, args.tokens_per_batch, progress
        drawn = generate(model, encoder, prompts, *how)
        sampled += [(i, "sampled", encoder.read(answer)[0]) for i, answer in zip(at, drawn, strict=True)]
    own = _new(encoder, rows, _labelled(encoder, rows, sampled, reward), greedy)
    made_up = _labelled(encoder, rows, _made_up(encoder, rows, [*greedy, *own], at, args.seed), reward)
    # Drop references that the reward labels as wrong and negatives that it labels as right.
    fitting = [document for document in made_up if document.right == (document.source == "reference")]
    return [*own, *_new(encoder, rows, fitting, [*greedy, *own])]


def _made_up(
    encoder: Encoder, rows: Rows, own: Sequence[OwnDocument], at: Sequence[int], seed: int
) -> list[tuple[int, Source, str]]:
    """Documents that the LM did not write."""

    def text(i: int, column: str) -> str:
        return encoder.tags.strip_suffix(completion_text(rows[i][column]))

    rng = np.random.default_rng([seed, 7])
    others = zip(at, np.roll(rng.permutation(at), 1).tolist(), rng.random(len(at)), strict=True)
    made_up: list[tuple[int, Source, str]] = [
        (i, "other", text(other, "chosen")) for i, other, draw in others if draw < OTHER_SHARE and other != i
    ]
    if len({document.row for document in own if not document.right}) < FEW:
        made_up += [(i, "static", text(i, "rejected")) for i in at]
    if len({document.row for document in own if document.right}) < FEW:
        made_up += [(i, "reference", text(i, "chosen")) for i in at]
    return made_up


def _labelled(
    encoder: Encoder, rows: Rows, sourced: Sequence[tuple[int, Source, str]], reward: Reward
) -> list[OwnDocument]:
    if not sourced:
        return []
    labels = apply_reward(reward, [rows[i] for i, _, _ in sourced], [body for _, _, body in sourced], encoder.tags)
    return [OwnDocument(*one, label == 1) for one, label in zip(sourced, labels, strict=True)]


def _new(
    encoder: Encoder, rows: Rows, documents: Sequence[OwnDocument], known: Sequence[OwnDocument]
) -> list[OwnDocument]:
    """The documents, encoded, without duplicates (of each other or of `known`) and without those too long for the LM."""
    taken = {(document.row, document.body) for document in known}
    kept = []
    for document in documents:
        if (document.row, document.body) in taken:
            continue
        try:
            ids, start = encoder.judged_document(rows[document.row]["prompt"], document.body)
        except ValueError:  # too long when it is encoded again, or for this prompt
            continue
        taken.add((document.row, document.body))
        kept.append(dataclasses.replace(document, ids=ids, start=start))
    return kept
