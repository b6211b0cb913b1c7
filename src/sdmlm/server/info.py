"""The information about the model that clients can request, and that the page at `/` shows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from sdmlm.estimator.layer import ALPHA_GRID
from sdmlm.estimator.region import HighReliabilityRegion
from sdmlm.generation.language_model import SDMLanguageModel
from sdmlm.generation.measured import measured
from sdmlm.language_model.encoding import Encoder

MAX_POINTS = 2000  # calibration points that are sent
EXAMPLES = 6
PAPER = "paper"  # documents that the SDM layer was fitted over, where its folder does not say


def describe(lm: SDMLanguageModel, name: str) -> dict[str, Any]:
    """The answer of GET /v1/sdm. The model must not change during the call."""
    estimator, tags = lm.estimator, lm.tags
    region = estimator.region(lm.alpha)
    return {
        "model": name,
        "alpha": lm.alpha,
        "tags": {part: getattr(tags, part) for part in ("open", "close", "yes", "no", "separator")},
        "classes": [tags.no, tags.yes],
        "region": region.to_dict(),
        "regions": [estimator.region(alpha).to_dict() for alpha in sorted({*ALPHA_GRID, lm.alpha})],
        "calibration": _calibration(lm, region),
        "support_size": len(estimator.support_ids_),
        "max_new_tokens": lm.sampling().max_new_tokens,
        "max_length": lm.encoder.max_length,
        "chat": bool(lm.tokenizer.chat_template),
        "examples": examples(lm),
        "control_tokens": control_tokens(lm),
        # Evaluations count what the region accepts; a model with a certificate, applying or not, verifies less.
        "measured": [dataclasses.asdict(each) for each in measured(lm)] if lm.answer_certificate is None else [],
        "certificate": _certificate(lm),
        "documents": lm.metadata.get("documents", PAPER),
    }


def _calibration(lm: SDMLanguageModel, region: HighReliabilityRegion) -> dict[str, list[Any]]:
    """The calibration points as columns; a fixed random sample if there are many."""
    ca = lm.estimator.calibration_
    predictions = ca.predictions
    columns = {
        "label": ca.labels,
        "prediction": predictions,
        "q": ca.q,
        "d": ca.d,
        "q_prime": ca.q_prime,
        "probability": ca.p.gather(1, predictions[:, None]).squeeze(1),
        "accepted": region.contains(ca.q_prime, ca.p, predictions),
    }
    some = np.arange(len(ca.labels))
    if len(some) > MAX_POINTS:
        some = np.sort(np.random.default_rng(0).choice(some, MAX_POINTS, replace=False))
    return {name: values[some].tolist() for name, values in columns.items()}


def _certificate(lm: SDMLanguageModel) -> dict[str, Any] | None:
    """The certificate that decides which answers are verified, if the model has one for alpha."""
    certificate = lm.certificate()
    return None if certificate is None else certificate.figures()


def control_tokens(lm: SDMLanguageModel) -> list[str]:
    """The control tokens as text, longest first; the page removes them from documents."""
    spelled = {lm.encoder.decode([i]).strip() for i in lm.encoder.control_ids} - {""}
    return sorted(spelled, key=lambda token: (-len(token), token))


def examples(lm: SDMLanguageModel, count: int = EXAMPLES) -> list[str]:
    """Prompts of some documents of the support; none without a chat template, which shows where a prompt ends."""
    if not lm.tokenizer.chat_template:
        return []
    shell = _shell(lm.encoder)
    prompts: list[str] = []
    for id in lm.estimator.support_ids_:
        document = lm.estimator.documents_.get(id, "")
        if shell is not None and document.startswith(shell[0]):
            prompt, after, _ = document[len(shell[0]) :].partition(shell[1])
            if after and prompt.strip() and prompt not in prompts:
                prompts.append(prompt)
        if len(prompts) == count:
            break
    return prompts


def _shell(encoder: Encoder) -> tuple[str, str] | None:
    """The decoded text before and after a single user message: what the prompts of two messages have in common."""
    one, other = (encoder.decode(encoder.encode_prompt([{"role": "user", "content": c}])) for c in ("a", "b"))
    at = next((n for n, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), None)
    return None if at is None or one[at + 1 :] != other[at + 1 :] else (one[:at], one[at + 1 :])
