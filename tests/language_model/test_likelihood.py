"""Likelihood figures: right by hand, and the same from a generation's own logits as from one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_lm import tiny_lm, tiny_tokenizer

from sdmlm.language_model.decoding import generate
from sdmlm.language_model.encoding import Encoder
from sdmlm.language_model.likelihood import (
    FIGURES,
    LikelihoodReader,
    VerdictTokens,
    answer_summaries,
    figures_of,
    summary_width,
    token_log_probabilities,
)


@pytest.fixture(scope="module")
def lm() -> Any:
    torch.manual_seed(0)
    return tiny_lm(max_position_embeddings=96).eval()


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(tiny_tokenizer(), max_length=96)


PROMPTS = ["ab=", "abcdefgh=", "c=", "hgfedcba="]


def test_figures_of_one_answer() -> None:
    figures = figures_of(torch.tensor([-0.5, -2.0, -0.5]), torch.tensor(1.5))
    assert dict(zip(FIGURES, figures.tolist(), strict=True)) == {
        "mean_log_probability": -1.0,
        "least_log_probability": -2.0,
        "summed_log_probability": -3.0,
        "yes_minus_no": 1.5,
        "length": 3.0,
    }


def test_log_probabilities_are_those_of_the_softmax() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 6, 3, 3])
    expected = torch.log_softmax(logits, -1)[torch.arange(4), targets]
    torch.testing.assert_close(token_log_probabilities(logits, targets), expected)


def test_summary_of_a_document_by_hand(lm: Any, encoder: Encoder) -> None:
    verdicts = VerdictTokens.of(encoder)
    encoded = [
        encoder.judged_document(prompt, body) for prompt, body in zip(PROMPTS, ["ab", "b", "c", "gg"], strict=True)
    ]
    ids, starts = [i for i, _ in encoded], [s for _, s in encoded]
    h = answer_summaries(lm, ids, starts, verdicts, tokens_per_batch=64, progress=False)
    width = lm.config.hidden_size
    assert h.shape == (4, summary_width("states+likelihood", width))
    for row, document, start in zip(h, ids, starts, strict=True):
        with torch.no_grad():
            out = lm(torch.tensor([document]), output_hidden_states=True)
        states, scores = out.hidden_states[-1][0], torch.log_softmax(out.logits[0], -1)
        tokens = np.array([float(scores[n - 1, document[n]]) for n in range(start, len(document))])
        end = out.logits[0, -1]
        yes_minus_no = float(end[verdicts.yes] - end[verdicts.no])
        expected = [tokens.mean(), tokens.min(), tokens.sum(), yes_minus_no, len(tokens)]
        np.testing.assert_allclose(row[-5:], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(row[:width], states[-1], atol=1e-5)
        np.testing.assert_allclose(row[width : 2 * width], states.mean(0), atol=1e-5)
        np.testing.assert_allclose(row[2 * width : 3 * width], states[start:].mean(0), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_generation_gives_the_same_summary_as_one_pass(lm: Any, encoder: Encoder, temperature: float) -> None:
    verdicts, documents, starts = VerdictTokens.of(encoder), {}, {}

    def finish(n: int, ids: list[int]) -> list[int]:
        documents[n], starts[n] = encoder.judged_document(PROMPTS[n], encoder.read(ids)[0])
        return documents[n]

    reader = LikelihoodReader(encoder.open_ids, finish, verdicts)
    seeds = [[n] for n in range(len(PROMPTS))]
    generate(lm, encoder, PROMPTS, 12, temperature, seeds, 8192, False, reader=reader)
    assert reader.h, "no summary was read while generating"
    rows = sorted(reader.h)
    expected = answer_summaries(lm, [documents[n] for n in rows], [starts[n] for n in rows], verdicts, progress=False)
    np.testing.assert_allclose(torch.stack([reader.h[n] for n in rows]), expected, rtol=1e-4, atol=1e-4)


def test_a_document_without_an_answer_is_refused(lm: Any, encoder: Encoder) -> None:
    with pytest.raises(ValueError, match="needs a prompt and an answer"):
        answer_summaries(lm, [[1, 2]], [2], VerdictTokens.of(encoder), progress=False)


def test_an_unknown_summary_is_refused() -> None:
    with pytest.raises(ValueError, match="summary is 'all'"):
        summary_width("all", 16)
