"""Search under a budget: further answers if the first is not verified.

The paper proposes it in its section on limitations: continue after `<verified>No</verified>`, or start over with the refused
answer in the prompt; the SDM layer decides when to try again. Every candidate is judged as an answer to the original prompt.
Accepting answers of a search needs a certificate of its own (`sdmlm.generation.search_certificate`), or, for a model without a
certificate, a calibration (`sdmlm.generation.search_calibration`); without one they have `calibrated=False`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sdmlm.estimator.scores import Scores
from sdmlm.generation.answers import Answer, Sampling, check_whole
from sdmlm.generation.judging import by_certificate, decided, guarded
from sdmlm.generation.verification import Verification
from sdmlm.language_model.answer_rule import AnswerCertificate
from sdmlm.language_model.encoding import Encoder, Prompt, PromptIds

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel

KINDS = ("resample", "reprompt", "continue")
AGAIN = "That answer was not verified. Answer the same instructions again."
TIE = 1e-6  # outputs this close count as equal: for the same answer they may differ in the last bits
NOT_CALIBRATED = " The search that chose this answer was not calibrated, so it may be accepted too easily."


@dataclass(frozen=True)
class SearchPolicy:
    """What to try when an answer is not verified.

    The search stops at the first verified answer. If there is none, it returns the answer that the SDM layer is surest of, the
    earliest of equals; in a model with a certificate, unusual answers come after all others. What "verified" means for the answer
    of a search has to be found for the search as a whole: see `certify_search`, or `calibrate_search` for a model without a
    certificate.

    Parameters
    ----------
    kind : str
        "resample" draws another answer. "reprompt" starts over with the refused answer in the prompt. "continue" continues
        generating after the refused answer and `<verified>No</verified>`.
    budget : int
        The largest number of further answers per prompt.
    temperature : float
        Temperature of the further answers; their random numbers come from the seed of the call.

    Examples
    --------
    >>> from sdmlm import SDMLanguageModel, SearchPolicy
    >>> policy = SearchPolicy("resample", budget=2, temperature=1.0)
    >>> lm = SDMLanguageModel.from_pretrained("runs/lm")
    >>> answer = lm.generate("abc=", search=policy)
    >>> answer.verified, answer.tries
    (True, 1)
    """

    kind: str = "resample"
    budget: int = 4
    temperature: float = 0.7

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"A search is one of {', '.join(KINDS)}, not {self.kind!r}.")
        check_whole("budget", self.budget, 0)
        Sampling(1, self.temperature)
        if self.kind == "resample" and self.temperature == 0:
            raise ValueError("resample needs a temperature above 0: greedy answers to a prompt are all the same.")


@dataclass(frozen=True)
class Searched:
    """The final answer for each prompt."""

    answers: list[Answer]
    scores: Scores
    tries: list[int]
    verifications: list[Verification]


def as_policy(search: SearchPolicy | str) -> SearchPolicy:
    """The policy, or the policy of this kind with default settings."""
    return SearchPolicy(search) if isinstance(search, str) else search


def run_search(
    lm: SDMLanguageModel,
    prompts: Sequence[Prompt],
    read: Sequence[PromptIds],
    search: SearchPolicy | str,
    sampling: Sampling,
    seed: int,
    alpha: float,
    neighbors: int,
    progress: bool = True,
) -> Searched:
    """Answer prompts under a policy; `read` are their token ids. See `SDMLanguageModel.generate`.

    Each round tries all prompts without a verified answer together. The model's certificate decides whether to try again; where it
    promises nothing, the SDM layer's own region as well; without one, the region alone.
    """
    policy = as_policy(search)
    if not isinstance(policy, SearchPolicy):
        raise ValueError(f"search is {type(search).__name__}: give a SearchPolicy or one of {', '.join(KINDS)}.")
    certificate, guard = lm.certificate(alpha), lm.guard(alpha)
    best: dict[int, tuple[Answer, Scores, float]] = {}
    refused: dict[int, Answer] = {}
    turns: list[list[str]] = [[] for _ in prompts]  # for "continue": the refused answers so far
    tries, spent = [0] * len(prompts), [0] * len(prompts)  # answers, and their tokens
    still = list(range(len(prompts)))
    for attempt in range(1 + policy.budget):
        if attempt == 0:
            seeds, how = [[seed, n] for n in still], sampling
        else:
            seeds = [[seed, n, attempt] for n in still]
            how = dataclasses.replace(sampling, temperature=policy.temperature)
        contexts: list[Prompt | PromptIds] | None = None
        start: list[list[int]] | None = None
        if attempt and policy.kind == "reprompt":
            contexts = [reprompted(lm, prompts[n], refused[n].text) for n in still]
            fit = [_fits(lm.encoder, context) for context in contexts]
            still, seeds, contexts = (_those(values, fit) for values in (still, seeds, contexts))
        elif attempt and policy.kind == "continue":
            for n in still:
                turns[n].append(refused[n].text)
            fit = [_fits(lm.encoder, read[n], turns[n]) for n in still]
            still, seeds = (_those(values, fit) for values in (still, seeds))
            contexts, start = [read[n] for n in still], [lm.encoder.refused(turns[n]) for n in still]
        if not still:
            break
        answers = lm.write([read[n] for n in still], how, seeds, progress=progress, contexts=contexts, prefixes=start)
        h = lm.summaries(answers, progress)
        scores = lm.score(h, alpha)
        done, sure = _ranked(certificate, guard, scores, h)
        for i, (n, answer) in enumerate(zip(still, answers, strict=True)):
            tries[n], refused[n] = attempt + 1, answer
            spent[n] += answer.completion_tokens
            if done[i] or n not in best or sure[i] > best[n][2] + TIE:
                best[n] = answer, scores[i], float(sure[i])
        still = _those(still, ~done)
    if not prompts:
        return Searched([], lm.score(torch.empty(0, lm.estimator.n_features_in_), alpha), [], [])
    answers = [best[n][0] for n in range(len(prompts))]
    scores = Scores.concatenate([best[n][1] for n in range(len(prompts))])
    judged = _verifications(lm, answers, scores, tries, spent, policy, sampling, alpha, neighbors)
    return Searched(answers, scores, tries, judged)


def _ranked(
    certificate: AnswerCertificate | None, guard: AnswerCertificate | None, scores: Scores, h: torch.Tensor
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Which answers end the search, and how sure the SDM layer is of each; unusual answers come after all others."""
    if certificate is None:
        done = scores.accepted & (scores.prediction == 1)
        return done if guard is None else done & guard.rule.accepts(guard.evidence(scores, h.numpy())), scores.p[:, 1]
    evidence = certificate.evidence(scores, h.numpy())
    unusual = ~certificate.rule.near_enough(evidence.d)
    return certificate.rule.accepts(evidence), certificate.certainty(evidence) - unusual


def prepared_policies(lm: SDMLanguageModel, alpha: float, sampling: Sampling) -> list[SearchPolicy]:
    """The searches that were certified (or calibrated, for a model without a certificate) with these settings.

    The newest comes first, whatever came out: to choose the search by its certificate would weaken the promise.
    """
    single = lm.certificate(alpha)
    if single is not None:
        apply = [c for c in lm.search_certificates if c.matches(c.policy, alpha, sampling, single)]
        return [c.policy for c in reversed(apply)]
    return [c.policy for c in lm.search_calibrations if c.matches(c.policy, alpha, sampling, lm.digest())]


def reprompted(lm: SDMLanguageModel, prompt: Prompt, refused: str) -> Prompt:
    """A prompt that holds the refused answer: as further turns, or, without a chat template, before the prompt again."""
    answer = refused + lm.tags.suffix(False)
    if not lm.tokenizer.chat_template:
        text = prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt)
        return f"{text}{answer}\n\n{AGAIN}\n\n{text}"
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    return [*turns, {"role": "assistant", "content": answer}, {"role": "user", "content": AGAIN}]


def _fits(encoder: Encoder, context: Prompt | PromptIds, turn: Sequence[str] = ()) -> bool:
    """Whether the context has room for another answer; if not, the prompt is not tried again."""
    try:
        encoder.encode_prompt(context, 1 + len(encoder.refused(turn)))
    except ValueError:
        return False
    return True


def _those(values: Sequence[Any], mask: Any) -> list[Any]:
    return [value for value, wanted in zip(values, mask, strict=True) if wanted]


def _verifications(
    lm: SDMLanguageModel,
    answers: list[Answer],
    scores: Scores,
    tries: list[int],
    spent: list[int],
    policy: SearchPolicy,
    sampling: Sampling,
    alpha: float,
    neighbors: int,
) -> list[Verification]:
    single = lm.certificate(alpha)
    if single is not None:
        return _certified(lm, answers, scores, tries, spent, policy, sampling, alpha, neighbors, single)
    known = lm.search_calibrations
    calibration = next((c for c in known if c.matches(policy, alpha, sampling, lm.digest())), None)
    if calibration is not None:  # otherwise they are decided by the layer's own region already
        scores = decided(scores, calibration.deciding, alpha)
    plain = calibration is not None or policy.budget == 0  # a budget of 0 leaves nothing to choose from
    shown = (lm.estimator if calibration is None else calibration).region(alpha)
    h, guard = lm.summaries(answers), lm.guard(alpha)
    judged = lm.verdicts(answers, h, scores, shown, neighbors)
    judged = judged if guard is None else guarded(judged, guard, scores, h)
    remark = "" if plain else NOT_CALIBRATED
    return [
        dataclasses.replace(v, tries=n, completion_tokens=tokens, calibrated=plain, reason=v.reason + remark)
        for v, n, tokens in zip(judged, tries, spent, strict=True)
    ]


def _certified(
    lm: SDMLanguageModel,
    answers: list[Answer],
    scores: Scores,
    tries: list[int],
    spent: list[int],
    policy: SearchPolicy,
    sampling: Sampling,
    alpha: float,
    neighbors: int,
    single: AnswerCertificate,
) -> list[Verification]:
    """Verifications by the certificate of the search; by that of single answers, which promises nothing here, if it has none."""
    own = next((c for c in lm.search_certificates if c.matches(policy, alpha, sampling, single)), None)
    deciding = single if own is None else own.certificate
    h = lm.summaries(answers)
    judged = lm.verdicts(answers, h, scores, lm.estimator.region(alpha), neighbors)
    covers = None if policy.budget == 0 and own is None else own is not None
    judged = by_certificate(answers, judged, deciding, scores, h, covers)
    return [
        dataclasses.replace(v, tries=n, completion_tokens=tokens, calibrated=covers is not False)
        for v, n, tokens in zip(judged, tries, spent, strict=True)
    ]
