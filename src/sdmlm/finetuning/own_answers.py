"""The final SDM layer over documents as they occur in use: the LM's own answers, and a certificate for them (docs/method.md, 9).

The calibration rows are parted. Over one part the SDM layer is fitted: the LM's greedy answers and sampled ones, labelled by the
reward, static negatives, and right answers to other prompts, which are wrong here. With the other part, whose prompts the layer
has not seen, the rule of acceptance is certified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning.config import SDMConfig
from sdmlm.language_model.answer_rule import (
    AnswerCertificate,
    JudgedAnswers,
    UsualLikelihood,
    certify_answers,
    right_of,
)
from sdmlm.language_model.decoding import generate
from sdmlm.language_model.encoding import Encoder, completion_text
from sdmlm.language_model.forward import inner_lm
from sdmlm.language_model.likelihood import LIKELIHOOD, VerdictTokens, answer_summaries
from sdmlm.language_model.reading import embed_sequences
from sdmlm.rewards import Reward, apply_reward

Rows = Sequence[Mapping[str, Any]]
Source = Literal["greedy", "sampled", "reference", "static", "other"]
LEAST_HELD_OUT, LEAST_WRONG = 20, 10
STATIC_SHARE = OTHER_SHARE = 0.5  # of the rows that stand with a static negative, and with the answer to another prompt


@dataclass(frozen=True)
class OwnDocument:
    """An answer to the prompt of a row, where it comes from and whether it is right."""

    row: int
    source: Source
    body: str
    right: bool

    @property
    def name(self) -> str:
        """Its id in the SDM layer; a row has at most one document of a source, but several sampled ones."""
        return f"{self.row} {self.source}"


@dataclass(frozen=True)
class OwnLayer:
    """The SDM layer, its certificate, and how the LM answered the calibration prompts."""

    estimator: SDMEstimator
    certificate: AnswerCertificate
    prompts: int
    right: int
    held_out: tuple[int, ...]  # the rows of the certificate
    warning: str | None  # where there was too little to learn from


def part_rows(n: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Rows to fit over, and rows held out for the certificate; the same for the same seed."""
    order = np.random.default_rng([seed, 5]).permutation(n).tolist()
    held_out = round(n * share)
    return sorted(order[held_out:]), sorted(order[:held_out])


def fit_over_own_answers(
    model: Any, encoder: Encoder, rows: Rows, args: SDMConfig, reward: Reward, room: int, progress: bool = True
) -> OwnLayer:
    """Fit the SDM layer over own answers to some of the rows, and certify it with the others."""
    fitted, held_out = part_rows(len(rows), args.certificate_share, args.seed)
    answers = _greedy(model, encoder, rows, args, reward, room, progress)
    known = [answers[i] for i in fitted]
    documents = [*known, *_more_documents(model, encoder, rows, known, args, reward, room, progress)]
    fresh = [answers[i] for i in held_out]
    summaries = _summaries(model, encoder, rows, [*documents, *fresh], args, progress)
    h, h_fresh = summaries[: len(documents)], summaries[len(documents) :]

    first = {row for n, row in enumerate(np.random.default_rng([args.seed, 6]).permutation(fitted).tolist()) if n % 2}
    support = np.array([document.row in first for document in documents])
    estimator = _fit(encoder, rows, documents, h, support, args, progress)
    greedy = np.array([document.source == "greedy" for document in documents])
    usual = UsualLikelihood.fit(h.numpy()[greedy]) if args.summary == LIKELIHOOD else None
    # Only answers to prompts outside the support look like answers to new prompts.
    outside = np.flatnonzero(greedy & ~support)
    certificate = certify_answers(
        judged(estimator, h[outside], [documents[i].right for i in outside], usual),
        judged(estimator, h_fresh, [document.right for document in fresh], usual),
        alpha=args.alpha,
        delta=args.certificate_delta,
        epsilon=args.certificate_epsilon,
        usual=usual,
        estimator=estimator.digest(),
    )
    right = sum(document.right for document in answers)
    return OwnLayer(estimator, certificate, len(rows), right, tuple(held_out), _too_little(documents, right, len(rows)))


def judged(
    estimator: SDMEstimator, h: Tensor, right: Sequence[bool | int], usual: UsualLikelihood | None
) -> JudgedAnswers:
    """Answers with what the rule of acceptance looks at."""
    scores = estimator.score(h)
    distance = scores.d if usual is None else usual.d(h.numpy())
    return JudgedAnswers(scores.prediction == 1, scores.p[:, 1], distance, right_of([int(r) for r in right]))


def _greedy(
    model: Any, encoder: Encoder, rows: Rows, args: SDMConfig, reward: Reward, room: int, progress: bool
) -> list[OwnDocument]:
    prompts = [row["prompt"] for row in rows]
    ids = generate(model, encoder, prompts, room, tokens_per_batch=args.tokens_per_batch, progress=progress)
    bodies = [encoder.read(answer)[0] for answer in ids]
    labels = apply_reward(reward, rows, bodies, encoder.tags)
    return [OwnDocument(i, "greedy", bodies[i], labels[i] == 1) for i in range(len(rows))]


def _more_documents(
    model: Any,
    encoder: Encoder,
    rows: Rows,
    greedy: Sequence[OwnDocument],
    args: SDMConfig,
    reward: Reward,
    room: int,
    progress: bool,
) -> list[OwnDocument]:
    """Sampled answers, static negatives, answers to other prompts, and references where no own answer is right."""
    rng = np.random.default_rng([args.seed, 7])
    tags = encoder.tags
    candidates: list[tuple[int, Source, str]] = []
    for attempt in range(args.own_samples):
        some = [document.row for document in greedy]
        seeds = [[args.seed, 8, attempt, i] for i in some]
        ids = generate(
            model,
            encoder,
            [rows[i]["prompt"] for i in some],
            room,
            args.own_temperature,
            seeds,
            args.tokens_per_batch,
            progress,
        )
        candidates += [(i, "sampled", encoder.read(answer)[0]) for i, answer in zip(some, ids, strict=True)]
    own = [document.row for document in greedy]
    for i, other, static_draw, other_draw in zip(
        own, np.roll(rng.permutation(own), 1).tolist(), rng.random(len(own)), rng.random(len(own)), strict=True
    ):
        if static_draw < STATIC_SHARE:
            candidates.append((i, "static", tags.strip_suffix(completion_text(rows[i]["rejected"]))))
        if other_draw < OTHER_SHARE and other != i:
            candidates.append((i, "other", tags.strip_suffix(completion_text(rows[other]["chosen"]))))
    right = {document.row for document in greedy if document.right}
    candidates += [
        (i, "reference", tags.strip_suffix(completion_text(rows[i]["chosen"]))) for i in own if i not in right
    ]
    labels = apply_reward(reward, [rows[i] for i, _, _ in candidates], [body for _, _, body in candidates], tags)
    taken = {(document.row, document.body) for document in greedy}
    documents: list[OwnDocument] = []
    for (i, source, body), label in zip(candidates, labels, strict=True):
        # What stands there already teaches nothing; a static negative that the reward calls right is none.
        wanted = label == 1 if source == "reference" else source == "sampled" or label == 0
        if wanted and (i, body) not in taken and _fits(encoder, rows[i]["prompt"], body):
            taken.add((i, body))
            documents.append(OwnDocument(i, source, body, label == 1))
    return documents


def _fits(encoder: Encoder, prompt: Any, body: str) -> bool:
    try:
        encoder.encode_for_judging(prompt, body)
    except ValueError:  # too long when it is encoded again, or for this prompt
        return False
    return True


def _summaries(
    model: Any, encoder: Encoder, rows: Rows, documents: Sequence[OwnDocument], args: SDMConfig, progress: bool
) -> Tensor:
    encoded = [encoder.judged_document(rows[d.row]["prompt"], d.body, row=d.row) for d in documents]
    ids, starts, lm = [ids for ids, _ in encoded], [start for _, start in encoded], inner_lm(model)
    if args.summary == LIKELIHOOD:
        return answer_summaries(lm, ids, starts, VerdictTokens.of(encoder), args.tokens_per_batch, progress)
    return embed_sequences(lm, ids, tokens_per_batch=args.tokens_per_batch, progress=progress)


def _fit(
    encoder: Encoder,
    rows: Rows,
    documents: Sequence[OwnDocument],
    h: Tensor,
    support: NDArray[np.bool_],
    args: SDMConfig,
    progress: bool,
) -> SDMEstimator:
    """The SDM layer. All documents of a prompt are on the same side: near copies must not vouch for each other."""
    names = _unique_names(documents)
    labels = torch.tensor([int(document.right) for document in documents])
    for side in (support, ~support):
        for label, word in ((1, "right"), (0, "wrong")):
            if int((labels[torch.from_numpy(side)] == label).sum()) < 2:
                raise ValueError(
                    f"The calibration rows give too few {word} answers for an SDM layer: give more rows (hundreds are a "
                    'start), or set documents="paper".'
                )
    texts: dict[int | str, str] = {
        name: encoder.decode(encoder.encode_for_judging(rows[d.row]["prompt"], d.body))
        for name, d in zip(names, documents, strict=True)
    }
    seed = int(np.random.default_rng([args.seed, 4]).integers(2**31))
    parameters = args.estimator_parameters()
    if args.summary == LIKELIHOOD:
        parameters["center"] = "feature"  # one scale for all columns would let the length outweigh the rest
    estimator = SDMEstimator.published(**parameters, seed=seed, device=args.device, progress=progress)
    here, there = np.flatnonzero(support), np.flatnonzero(~support)
    calibration = h[there], labels[there], [names[i] for i in there]
    return estimator.fit(h[here], labels[here], [names[i] for i in here], calibration=calibration, documents=texts)


def _unique_names(documents: Sequence[OwnDocument]) -> list[str]:
    counts: dict[str, int] = {}
    names = []
    for document in documents:
        n = counts[document.name] = counts.get(document.name, 0) + 1
        names.append(document.name if n == 1 else f"{document.name} {n}")
    return names


def _too_little(documents: Sequence[OwnDocument], right: int, prompts: int) -> str | None:
    """What to say where the LM is nearly always right or wrong, so that its errors teach the SDM layer little."""
    own = [document for document in documents if document.source in ("greedy", "sampled")]
    wrong = sum(not document.right for document in own)
    answered = f"The language model answered {right} of {prompts} calibration prompts rightly"
    if len(own) - wrong < LEAST_WRONG:
        return (
            f"{answered}: it is the language model that needs work, before its SDM layer. The layer had to learn what is right "
            "from the reference answers."
        )
    if wrong < LEAST_WRONG:
        return (
            f"{answered}, and only {wrong} of its own answers are wrong: too few to learn its errors from. The SDM layer rests "
            "on static negatives and answers to other prompts; the certificate still holds."
        )
    return None
