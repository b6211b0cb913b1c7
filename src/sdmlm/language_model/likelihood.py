"""How likely an answer is under the LM that judges it: a few figures of its tokens, beside the states (docs/method.md, 9).

The summary "states+likelihood" of a document is [state at the tag ; mean of all states ; mean of the answer's states ;
figures]. The figures come last, in the order of `FIGURES`. The answer's tokens are all that follow the prompt, up to and
including `<verified>`: if an answer stops too early, the tag is unlikely there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdmlm.language_model.encoding import Encoder
from sdmlm.language_model.forward import inner_lm
from sdmlm.language_model.summary import GenerationReader, batches_by_length
from sdmlm.storage.progress import track

FIGURES = (
    "mean_log_probability",
    "least_log_probability",
    "summed_log_probability",
    "yes_minus_no",  # logit of Yes minus logit of No after the tag
    "length",  # tokens of the answer, the tag included
)
STATES, LIKELIHOOD = "states", "states+likelihood"  # the kinds of summary: the paper's, and the one of this module
_MOST_LOGITS = 2**26  # entries of one tensor of logits: 256 MB in float32


def default_summary(documents: str) -> str:
    """What the final SDM layer reads if nothing is said about it: the paper's summary goes with the paper's documents."""
    return STATES if documents == "paper" else LIKELIHOOD


def summary_width(kind: str, hidden_size: int) -> int:
    """The length of a summary of this kind."""
    if kind not in (STATES, LIKELIHOOD):
        raise ValueError(f'summary is {kind!r} but must be "{STATES}" or "{LIKELIHOOD}".')
    return 2 * hidden_size if kind == STATES else 3 * hidden_size + len(FIGURES)


@dataclass(frozen=True)
class VerdictTokens:
    """The first tokens of the two verdicts, whose logits after the tag are compared."""

    yes: int
    no: int

    @classmethod
    def of(cls, encoder: Encoder) -> VerdictTokens:
        """The tokens of an encoder's verdicts."""
        return cls(encoder.answer_ids[True][0], encoder.answer_ids[False][0])

    def compare(self, logits: Tensor) -> Tensor:
        """Logit of Yes minus logit of No, over the last dimension."""
        return logits[..., self.yes].float() - logits[..., self.no].float()


def token_log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """log P(target) for logits (..., V) and targets (...), in float32."""
    logits = logits.float()
    chosen = logits.gather(-1, targets[..., None]).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


def figures_of(log_probabilities: Tensor, yes_minus_no: Tensor) -> Tensor:
    """The figures of one answer, from the log-probabilities of its tokens (T,)."""
    tokens = log_probabilities.float()
    total = tokens.sum()
    length = total.new_tensor(float(len(tokens)))
    return torch.stack([total / length, tokens.min(), total, yes_minus_no.float(), length])


def answer_summaries(
    model: Any,
    documents: Sequence[Sequence[int]],
    starts: Sequence[int],
    verdicts: VerdictTokens,
    tokens_per_batch: int = 4096,
    progress: bool = True,
) -> Tensor:
    """h of documents that end with `<verified>`, (N, 3H + 5) float32 on the CPU, from one pass over each.

    `starts[i]` is the number of prompt tokens of document i. The output embedding is applied from the first answer token of a
    batch on, not to the prompts.
    """
    if any(not 0 < start < len(ids) for ids, start in zip(documents, starts, strict=True)):
        raise ValueError("Every document needs a prompt and an answer that ends with the verification tag.")
    lm = inner_lm(model)
    vocabulary = lm.get_output_embeddings().weight.shape[0]
    budget = max(1, min(tokens_per_batch, _MOST_LOGITS // vocabulary))
    was_training = model.training
    model.eval()
    out: Tensor | None = None
    try:
        with torch.no_grad():
            for rows in track(batches_by_length([len(ids) for ids in documents], budget), "Reading answers", progress):
                h = _batch_summaries(lm, [documents[i] for i in rows], [starts[i] for i in rows], verdicts).cpu()
                out = torch.empty(len(documents), h.shape[1]) if out is None else out
                out[rows] = h
    finally:
        model.train(was_training)
    return torch.empty(0, 0) if out is None else out


def _batch_summaries(
    lm: Any, documents: Sequence[Sequence[int]], starts: Sequence[int], verdicts: VerdictTokens
) -> Tensor:
    lengths = [len(ids) for ids in documents]
    longest, first = max(lengths), min(starts) - 1  # the state before the first answer token predicts it
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in documents], device=lm.device)
    mask = torch.tensor([[1] * n + [0] * (longest - n) for n in lengths], device=lm.device)
    kept: list[Tensor] = []
    handle = lm.get_decoder().register_forward_hook(lambda module, args, output: kept.append(output.last_hidden_state))
    try:
        # The forward of the class: `allow_inside` may have replaced that of this object.
        logits = (
            type(lm)
            .forward(lm, input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=longest - first)
            .logits
        )
    finally:
        handle.remove()
    states = kept[0].float()
    log_probabilities = token_log_probabilities(logits[:, :-1], ids[:, first + 1 :])
    summaries = []
    for n, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tokens = log_probabilities[n, start - 1 - first : length - 1 - first]
        figures = figures_of(tokens, verdicts.compare(logits[n, length - 1 - first]))
        document = states[n, :length]
        parts = document[-1], document.mean(dim=0), document[start:].mean(dim=0), figures
        summaries.append(torch.cat(parts))
    return torch.stack(summaries)


class LikelihoodReader(GenerationReader):
    """The summary "states+likelihood" from the states and logits of an answer's own generation, without a second pass."""

    reads_logits = True

    def __init__(
        self,
        open_ids: Sequence[int],
        document: Callable[[int, list[int]], Sequence[int] | None],
        verdicts: VerdictTokens,
    ) -> None:
        super().__init__(open_ids, document)
        self._verdicts = verdicts
        self._starts: dict[int, int] = {}  # row -> tokens of its prompt
        self._before: Tensor | None = None  # (B, V): the logits of the last pass, for the next token
        self._answer_sums: Tensor | None = None  # (B, H): summed states of the answer so far
        self._totals: Tensor | None = None  # (B,): summed log-probabilities of the answer so far
        self._leasts: Tensor | None = None  # (B,): the least of them
        # row -> summed states of the answer, and (sum, least, logit of Yes minus No) of its tokens
        self._answer_at_tag: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, rows: Sequence[int], prompts: Sequence[list[int]], mask: Tensor) -> None:
        """As in the base class; nothing of the answers has been read yet."""
        assert self._states is not None
        assert self._logits is not None
        self._starts |= {r: len(prompts[r]) for r in rows}
        self._before = self._logits[:, -1]
        self._answer_sums = self._states.new_zeros(len(rows), self._states.shape[-1], dtype=torch.float32)
        self._totals = self._answer_sums.new_zeros(len(rows))
        self._leasts = torch.full_like(self._totals, torch.inf)
        super().begin(rows, prompts, mask)

    def step(self, rows: Sequence[int], newest: Sequence[list[int]], ids: Tensor) -> None:
        """As in the base class, with the log-probabilities of the new ids."""
        assert self._states is not None
        assert self._logits is not None
        assert self._before is not None
        assert self._answer_sums is not None
        assert self._totals is not None
        assert self._leasts is not None
        logits = self._before[:, None]
        if ids.shape[1] > 1:
            logits = torch.cat([logits, self._logits[:, :-1]], dim=1)
        tokens = token_log_probabilities(logits, ids)
        self._totals = self._totals + tokens.sum(dim=1)
        self._leasts = torch.minimum(self._leasts, tokens.amin(dim=1))
        self._answer_sums = self._answer_sums + self._states.float().sum(dim=1)
        self._before = self._logits[:, -1]
        super().step(rows, newest, ids)

    def keep(self, index: Tensor) -> None:
        """Keep only these rows of the batch."""
        assert self._before is not None
        assert self._answer_sums is not None
        assert self._totals is not None
        assert self._leasts is not None
        self._before, self._answer_sums = self._before[index], self._answer_sums[index]
        self._totals, self._leasts = self._totals[index], self._leasts[index]
        super().keep(index)

    def _note_tag(self, row: int, place: int) -> None:
        assert self._before is not None
        assert self._answer_sums is not None
        super()._note_tag(row, place)
        assert self._totals is not None
        assert self._leasts is not None
        compared = self._verdicts.compare(self._before[place])
        figures = torch.stack([self._totals[place], self._leasts[place], compared])
        self._answer_at_tag[row] = self._answer_sums[place], figures

    def _summary(self, row: int, length: int, total: Tensor, last: Tensor) -> Tensor:
        answer, (summed, least, yes_minus_no) = self._answer_at_tag[row]
        written = length - self._starts[row]
        states = super()._summary(row, length, total, last)
        figures = torch.stack([summed / written, least, summed, yes_minus_no, summed.new_tensor(float(written))])
        return torch.cat([states, answer / written, figures])
