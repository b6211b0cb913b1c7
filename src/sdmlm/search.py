"""Search under a budget: further answers where the first is not verified, and the calibration of that as a whole.

The paper's section on limits proposes it: go on after `<verified>No</verified>`, or start over with the refused answer in the
prompt, the branching decided by the SDM layer. Every candidate is judged as an answer to the prompt that was asked.

Choosing among candidates changes what "accepted" means: the more tries, the more wrong answers look right by chance. So
`calibrate_search` runs the policy on the calibration rows and finds the region of its final answers (`verified_region`).
Without it a searched answer says `calibrated=False`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sdmlm.artifacts import finite_or_none, locked, none_as_infinity, write_text_atomically
from sdmlm.certify import certify_region
from sdmlm.encoding import Encoder, check_rows
from sdmlm.final_layer import SDM_FOLDER
from sdmlm.layer import ALPHA_GRID
from sdmlm.region import HighReliabilityRegion, check_alpha, membership
from sdmlm.rewards import Reward, apply_reward, load_reward
from sdmlm.scores import Scores
from sdmlm.verification import Answer, Sampling, Verification, check_whole, decided, widened

if TYPE_CHECKING:
    from sdmlm.lm import Prompt, SDMLanguageModel

KINDS = ("resample", "reprompt", "continue")
AGAIN = "That answer was not verified. Answer the same instructions again."
FILE, FORMAT_VERSION = "search.json", 1
STEPS, DELTA = 5, 0.05  # thresholds that are tested for a search, and the chance that any passes wrongly
TIE = 1e-6  # outputs this close are equal: the same answer twice may differ in its last bits
NOT_CALIBRATED = " The search that chose this answer was not calibrated, so it may be accepted too easily."


@dataclass(frozen=True)
class SearchPolicy:
    """What to do about an answer that is not verified (rejected, or accepted as No).

    kind: "resample" draws another answer; "reprompt" starts over with the refused answer in the prompt; "continue" goes
    on generating after the refused answer and `<verified>No</verified>`. budget: further tries a prompt, at most. The search
    stops at the first verified answer; where there is none, the answer with the highest SDM output for Yes is returned, the
    earliest of equals. temperature: of the further tries; their chance comes from the seed of the call.
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
class SearchCalibration:
    """The final answers of a policy over calibration prompts, with true labels: what its region is found from.

    It holds for the settings it was made with: the policy, the alpha that branching looked at, how the LM writes, and the
    SDM layer with its support (`estimator`, a digest). `regions` are that layer's own, by alpha.
    """

    policy: SearchPolicy
    alpha: float
    sampling: Sampling
    estimator: str
    ids: tuple[int, ...]  # the calibration rows
    labels: tuple[int, ...]  # r of the final answers
    predictions: tuple[int, ...]
    q_prime: tuple[float, ...]
    p: tuple[tuple[float, float], ...]  # SDM(z')
    tries: tuple[int, ...]
    regions: tuple[HighReliabilityRegion, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _regions(self) -> dict[float, HighReliabilityRegion]:
        return {}

    def region(self, alpha: float | None = None) -> HighReliabilityRegion:
        """The region of the policy's final answers, at the alpha of its branching or another of `regions`."""
        alpha = self.alpha if alpha is None else check_alpha(alpha)
        if alpha not in self._regions:
            own = next(region for region in self.regions if region.alpha == alpha)
            p, predictions = np.array(self.p).reshape(-1, 2), np.array(self.predictions)
            self._regions[alpha] = verified_region(np.array(self.q_prime), p, predictions, np.array(self.labels), own)
        return self._regions[alpha]

    def deciding(self, alpha: float) -> HighReliabilityRegion:
        """The region that new answers are decided by."""
        return widened(self.region(alpha))

    @property
    def accepted(self) -> NDArray[np.bool_]:
        """Which of the final answers are in the region."""
        p = np.array(self.p).reshape(-1, 2)
        return membership([self.deciding(self.alpha)], np.array(self.q_prime), p, np.array(self.predictions))[:, 0]

    @property
    def accepted_right(self) -> int:
        """How many of those are right; they are all accepted as Yes."""
        return int((self.accepted & (np.array(self.labels) == 1)).sum())

    def matches(self, policy: SearchPolicy, alpha: float, sampling: Sampling, estimator: str) -> bool:
        """Whether it was made with these settings."""
        return (self.policy, self.alpha, self.sampling, self.estimator) == (policy, alpha, sampling, estimator)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        regions = [[finite_or_none(value) for value in (r.alpha, r.q_min, *r.psi)] for r in self.regions]
        return {**dataclasses.asdict(self), "regions": regions}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> SearchCalibration:
        """What `to_dict` gave."""
        sampling = {**facts["sampling"], "stop": tuple(facts["sampling"]["stop"])}
        found = cls(
            SearchPolicy(**facts["policy"]),
            check_alpha(facts["alpha"]),
            Sampling(**sampling),
            str(facts["estimator"]),
            **{name: tuple(facts[name]) for name in ("ids", "labels", "predictions", "q_prime", "tries")},
            p=tuple((float(no), float(yes)) for no, yes in facts["p"]),
            regions=tuple(
                HighReliabilityRegion(alpha, none_as_infinity(q_min), (none_as_infinity(no), none_as_infinity(yes)))
                for alpha, q_min, no, yes in facts["regions"]
            ),
        )
        if len({len(found), *map(len, (found.labels, found.predictions, found.q_prime, found.p, found.tries))}) != 1:
            raise ValueError("its columns differ in length")
        return found


def verified_region(
    q_prime: NDArray[np.float64],
    p: NDArray[np.float64],
    predictions: NDArray[np.int64],
    labels: NDArray[np.int64],
    own: HighReliabilityRegion,
) -> HighReliabilityRegion:
    """The part of the SDM layer's own region where final answers accepted as Yes are right at least alpha of the time.

    Algorithm 1 asks for both true classes, and a search leaves hardly any answer that is known to be wrong: it went on from
    those. So only the verdict that a search is for is accepted, Yes, and its accuracy is what is asked for, with a margin for
    chance: thresholds of 1, 2, 4, 8 and 16 times the layer's q'_min are tested as `certify` does, and the lowest that passes
    is taken. No easier than for a single answer.
    """
    start = math.inf
    if math.isfinite(own.q_min):
        starts = {widened(dataclasses.replace(own, q_min=q)).q_min: q for q in (own.q_min * 2**k for k in range(STEPS))}
        tested = certify_region(widened(own), list(starts), q_prime, p, predictions, labels, DELTA, classes=[1])
        start = math.inf if tested.region is None else starts[tested.region.q_min]
    return HighReliabilityRegion(own.alpha, start, (math.inf, own.psi[1]))


@dataclass(frozen=True)
class Searched:
    """The final answer for each prompt."""

    answers: list[Answer]
    scores: Scores  # decided by the SDM layer's own region, as branching is
    tries: list[int]
    verifications: list[Verification]


def as_policy(search: SearchPolicy | str) -> SearchPolicy:
    """A policy, or the one of a kind with the default settings."""
    return SearchPolicy(search) if isinstance(search, str) else search


def run_search(
    lm: SDMLanguageModel,
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
    search: SearchPolicy | str,
    sampling: Sampling,
    seed: int,
    alpha: float,
    neighbors: int,
    progress: bool = True,
) -> Searched:
    """Answer prompts under a policy. Prompts that are still open are tried together; see `SDMLanguageModel.generate`."""
    policy = as_policy(search)
    if not isinstance(policy, SearchPolicy):
        raise ValueError(f"search is {type(search).__name__}: give a SearchPolicy or one of {', '.join(KINDS)}.")
    best: dict[int, tuple[Answer, Scores]] = {}
    refused: dict[int, Answer] = {}
    begun = [""] * len(prompts)  # of "continue": all that the LM's turn holds so far
    tries = [0] * len(prompts)
    still = list(range(len(prompts)))
    for attempt in range(1 + policy.budget):
        if attempt == 0:
            seeds, how = [[seed, n] for n in still], sampling
        else:
            seeds = [[seed, n, attempt] for n in still]
            how = dataclasses.replace(sampling, temperature=policy.temperature)
        contexts: list[Prompt] | None = None
        start: list[str] | None = None
        if attempt and policy.kind != "resample":
            for n in still:
                begun[n] += refused[n].text + lm.tags.suffix(False) + lm.tags.separator
            contexts = [reprompted(lm, prompts[n], refused[n].text) for n in still]
            if policy.kind == "continue":
                contexts, start = [prompts[n] for n in still], [begun[n] for n in still]
            fit = [_fits(lm.encoder, c, start[i] if start else "") for i, c in enumerate(contexts)]
            still, seeds, contexts = (_those(values, fit) for values in (still, seeds, contexts))
            start = None if start is None else _those(start, fit)
        if not still:
            break
        asked, counts = [prompts[n] for n in still], [lengths[n] for n in still]
        answers = lm.write(asked, counts, how, seeds, progress=progress, contexts=contexts, begun=start)
        scores = lm.score(lm.summaries(answers, progress), alpha)
        done = scores.accepted & (scores.prediction == 1)
        for i, (n, answer) in enumerate(zip(still, answers, strict=True)):
            tries[n], refused[n] = attempt + 1, answer
            if done[i] or n not in best or scores.p[i, 1] > best[n][1].p[0, 1] + TIE:
                best[n] = answer, scores[i]
        still = _those(still, ~done)
    if not prompts:
        return Searched([], lm.score(torch.empty(0, lm.estimator.n_features_in_), alpha), [], [])
    answers = [best[n][0] for n in range(len(prompts))]
    scores = _joined([best[n][1] for n in range(len(prompts))])
    found = _verifications(lm, answers, scores, tries, policy, sampling, alpha, neighbors)
    return Searched(answers, scores, tries, found)


def reprompted(lm: SDMLanguageModel, prompt: Prompt, refused: str) -> Prompt:
    """A prompt that holds the refused answer: as further turns, or, without a chat template, before the prompt again."""
    answer = refused + lm.tags.suffix(False)
    if not lm.tokenizer.chat_template:
        text = prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt)
        return f"{text}{answer}\n\n{AGAIN}\n\n{text}"
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    return [*turns, {"role": "assistant", "content": answer}, {"role": "user", "content": AGAIN}]


def _fits(encoder: Encoder, context: Prompt, begun: str) -> bool:
    """Whether there is room for an answer after all that; a prompt that has outgrown the context is not tried again."""
    try:
        encoder.encode_prompt(context, 1 + len(encoder.continuation(begun)))
    except ValueError:
        return False
    return True


def _those(values: Sequence[Any], mask: Any) -> list[Any]:
    return [value for value, wanted in zip(values, mask, strict=True) if wanted]


def _joined(parts: Sequence[Scores]) -> Scores:
    names = [field.name for field in dataclasses.fields(Scores)]
    return Scores(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _verifications(
    lm: SDMLanguageModel,
    answers: list[Answer],
    scores: Scores,
    tries: list[int],
    policy: SearchPolicy,
    sampling: Sampling,
    alpha: float,
    neighbors: int,
) -> list[Verification]:
    known = lm.search_calibrations
    calibration = next((c for c in known if c.matches(policy, alpha, sampling, lm.digest())), None)
    region_at = lm.region if calibration is None else calibration.deciding
    scores = decided(scores, region_at, alpha)
    plain = calibration is not None or policy.budget == 0  # with no further try nothing was chosen
    shown = (lm.estimator.layers_[0] if calibration is None else calibration).region(alpha)
    found = lm.verdicts(answers, lm.summaries(answers), scores, shown, neighbors)
    return [
        dataclasses.replace(v, tries=n, calibrated=plain, reason=v.reason if plain else v.reason + NOT_CALIBRATED)
        for v, n in zip(found, tries, strict=True)
    ]


# Calibration


def calibrate_search(
    lm: SDMLanguageModel,
    rows: Sequence[Mapping[str, Any]],
    policy: SearchPolicy | str,
    reward: Reward | str | None = None,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: str | Sequence[str] | None = None,
    alpha: float | None = None,
    save: bool = True,
    progress: bool = True,
) -> SearchCalibration:
    """Run a policy on calibration prompts and find the region of its final answers, `verified_region`.

    rows: D_ca, the rows that the model's SDM layer was fitted over, in their order. Only the prompts of its calibration half
    are used: the support holds a document of every other prompt, which an answer to that prompt would find again, as no
    answer to a new prompt can. reward: r, as in fine-tuning; it gives the true labels of the final answers. The other settings
    are those of `generate`. The result joins `lm.search_calibrations` and, with `save`, `sdm/search.json` of the model's
    folder; `generate` uses it wherever policy and settings are the same.
    """
    policy = as_policy(policy)
    sampling = lm.sampling(max_new_tokens, temperature, top_p, stop)
    alpha = lm.alpha if alpha is None else check_alpha(alpha)
    if save and lm.folder is None:
        raise ValueError("This model has no folder of its own to keep the calibration in: give save=False.")
    ids = _calibration_rows(lm, rows)
    chosen = [rows[i] for i in ids]
    prompts = [row["prompt"] for row in chosen]
    found = run_search(lm, prompts, lm.check_prompts(prompts), policy, sampling, 0, alpha, 0, progress)
    bodies = [answer.text for answer in found.answers]
    columns = dict.fromkeys(name for row in rows for name in row)
    labels = apply_reward(load_reward(reward), chosen, bodies, lm.tags, columns)
    scores = found.scores
    calibration = SearchCalibration(
        policy,
        alpha,
        sampling,
        lm.digest(),
        tuple(ids),
        tuple(labels),
        tuple(scores.prediction.tolist()),
        tuple(scores.q_prime.tolist()),
        tuple((float(no), float(yes)) for no, yes in scores.p),
        tuple(found.tries),
        tuple(lm.estimator.layers_[0].region(a) for a in sorted({*ALPHA_GRID, alpha})),
    )

    def joined(known: Sequence[SearchCalibration]) -> tuple[SearchCalibration, ...]:
        others = (c for c in known if not c.matches(policy, alpha, sampling, calibration.estimator))
        return (*others, calibration)

    if save and lm.folder is not None:
        sdm = lm.folder / SDM_FOLDER
        with locked(sdm):  # another process may have calibrated another search meanwhile
            save_searches(sdm, joined(load_searches(sdm)))
    lm.search_calibrations = joined(lm.search_calibrations)
    return calibration


def _calibration_rows(lm: SDMLanguageModel, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the rows in the calibration half of the SDM layer whose prompts are not in its support as well."""
    check_rows(rows, lm.tags)
    layer = lm.estimator.layers_[0]
    numbers = [i for i in (*layer.support_ids, *layer.calibration_ids) if isinstance(i, int)]
    other = "these are not the rows that the SDM layer was fitted over: give D_ca, all of it, in its order."
    if sorted(numbers) != list(range(len(rows))):
        raise ValueError(f"The SDM layer was fitted over {len(numbers)} rows and {len(rows)} are given: {other}")
    if not lm.encoder.truncate_prompt:
        for i in numbers:
            start = lm.encoder.decode(lm.encoder.encode_prompt(rows[i]["prompt"]))
            if not lm.estimator.documents_.get(i, start).startswith(start):
                raise ValueError(f"Row {i} has another prompt than document {i} of the SDM layer: {other}")
    known = {_key(rows[i]["prompt"]) for i in layer.support_ids if isinstance(i, int)}
    given = [lm.estimator.documents_[i] for i in layer.support_ids if not isinstance(i, int)]  # by feedback

    def new(i: int) -> bool:
        start = lm.encoder.decode(lm.encoder.encode_prompt(rows[i]["prompt"])) if given else ""
        return _key(rows[i]["prompt"]) not in known and not any(text.startswith(start) for text in given)

    kept = sorted(i for i in layer.calibration_ids if new(i))
    if not kept:
        raise ValueError(
            "Every calibration prompt is in the support too, so no row is left to calibrate the search on."
        )
    return kept


def _key(prompt: Prompt) -> str:
    return json.dumps(prompt if isinstance(prompt, str) else [dict(m) for m in prompt], sort_keys=True)


# On disk


def save_searches(sdm: Path, searches: Sequence[SearchCalibration]) -> None:
    """Write `sdm/search.json`; nothing where there is nothing to write."""
    if searches or (sdm / FILE).exists():
        facts = {"format_version": FORMAT_VERSION, "searches": [c.to_dict() for c in searches]}
        write_text_atomically(sdm / FILE, json.dumps(facts) + "\n")


def load_searches(sdm: Path) -> tuple[SearchCalibration, ...]:
    """What `save_searches` wrote, nothing where there is none."""
    path = sdm / FILE
    if not path.exists():
        return ()
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        version = int(facts["format_version"])
        if version <= FORMAT_VERSION:
            return tuple(SearchCalibration.from_dict(c) for c in facts["searches"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it from a copy or delete it.") from error
    raise ValueError(f"{path} was written by a newer sdmlm (format {version}): upgrade sdmlm.")
