"""The calibration of a search as a whole: the region in which its final answers can be accepted.

Choosing among candidates changes what "accepted" means: with more tries, more wrong answers look right by chance. So
`calibrate_search` runs a policy on the calibration rows and finds the region of its final answers (`verified_region`). This is for
models without a certificate; for the others see `sdmlm.generation.search_certificate`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdmlm.estimator.certify import certify_region
from sdmlm.estimator.layer import ALPHA_GRID
from sdmlm.estimator.region import HighReliabilityRegion, check_alpha, membership
from sdmlm.generation.answers import Sampling
from sdmlm.generation.judging import widened
from sdmlm.generation.search import SearchPolicy, as_policy, run_search
from sdmlm.language_model.encoding import check_rows
from sdmlm.language_model.rows import prompt_key
from sdmlm.rewards import Reward, apply_reward, check_reward, reward_as_fitted
from sdmlm.storage.artifacts import SDM_FOLDER, finite_or_none, locked, none_as_infinity, read_metadata, write_metadata

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel

FILE, FORMAT_VERSION = "search.json", 1
STEPS, DELTA = 5, 0.05  # number of thresholds that are tested, and the probability that one passes by mistake


@dataclass(frozen=True)
class SearchCalibration:
    """The final answers of a search policy to calibration prompts, with true labels. They determine the policy's region.

    It is valid only for the settings it was made with: the policy, the alpha that decides whether to try again, the
    sampling settings, and the SDM layer with its support (`estimator`, a digest). `regions` are that layer's own, by alpha.
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
        """The region of the policy's final answers, at the policy's own alpha (default) or another one of `regions`."""
        alpha = self.alpha if alpha is None else check_alpha(alpha)
        if alpha not in self._regions:
            own = next((region for region in self.regions if region.alpha == alpha), None)
            if own is None:
                known = ", ".join(f"{region.alpha:g}" for region in self.regions)
                raise ValueError(
                    f"This search was calibrated for alpha {known}, not {alpha:g}: calibrate it for that too."
                )
            p, predictions = np.array(self.p).reshape(-1, 2), np.array(self.predictions)
            self._regions[alpha] = verified_region(np.array(self.q_prime), p, predictions, np.array(self.labels), own)
        return self._regions[alpha]

    def deciding(self, alpha: float) -> HighReliabilityRegion:
        """The region that decides about new answers."""
        return widened(self.region(alpha))

    @property
    def accepted(self) -> NDArray[np.bool_]:
        """Which of the final answers are in the region."""
        p = np.array(self.p).reshape(-1, 2)
        return membership([self.deciding(self.alpha)], np.array(self.q_prime), p, np.array(self.predictions))[:, 0]

    @property
    def accepted_right(self) -> int:
        """How many accepted answers are right (the region accepts only the verdict Yes)."""
        return int((self.accepted & (np.array(self.labels) == 1)).sum())

    def matches(self, policy: SearchPolicy, alpha: float, sampling: Sampling, estimator: str) -> bool:
        """Whether it was made with these settings."""
        return (self.policy, self.alpha, self.sampling, self.estimator) == (policy, alpha, sampling, estimator)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        regions = [[finite_or_none(value) for value in (r.alpha, r.q_min, *r.psi)] for r in self.regions]
        return {**dataclasses.asdict(self), "regions": regions}

    @classmethod
    def from_dict(cls, metadata: Mapping[str, Any]) -> SearchCalibration:
        """What `to_dict` gave."""
        sampling = {**metadata["sampling"], "stop": tuple(metadata["sampling"]["stop"])}
        calibration = cls(
            SearchPolicy(**metadata["policy"]),
            check_alpha(metadata["alpha"]),
            Sampling(**sampling),
            str(metadata["estimator"]),
            **{name: tuple(metadata[name]) for name in ("ids", "labels", "predictions", "q_prime", "tries")},
            p=tuple((float(no), float(yes)) for no, yes in metadata["p"]),
            regions=tuple(
                HighReliabilityRegion(alpha, none_as_infinity(q_min), (none_as_infinity(no), none_as_infinity(yes)))
                for alpha, q_min, no, yes in metadata["regions"]
            ),
        )
        columns = (
            *(calibration.ids, calibration.labels, calibration.predictions),
            *(calibration.q_prime, calibration.p, calibration.tries),
        )
        if len({len(column) for column in columns}) != 1:
            raise ValueError("its columns differ in length")
        return calibration


def verified_region(
    q_prime: NDArray[np.float64],
    p: NDArray[np.float64],
    predictions: NDArray[np.int64],
    labels: NDArray[np.int64],
    own: HighReliabilityRegion,
) -> HighReliabilityRegion:
    """The part of the SDM layer's own region where final answers accepted as Yes are right at least alpha of the time.

    Algorithm 1 needs answers of both true classes, but hardly any final answer is accepted as No: the search tries again
    after those. So the region accepts only the verdict Yes, and its accuracy is tested with a margin for chance: thresholds
    of 1, 2, 4, 8 and 16 times the layer's q'_min are tested as `certify` does, and the lowest that passes is used. It is
    never lower than the threshold for single answers.
    """
    start = math.inf
    if math.isfinite(own.q_min):
        starts = {widened(dataclasses.replace(own, q_min=q)).q_min: q for q in (own.q_min * 2**k for k in range(STEPS))}
        tested = certify_region(widened(own), list(starts), q_prime, p, predictions, labels, DELTA, classes=[1])
        start = math.inf if tested.region is None else starts[tested.region.q_min]
    return HighReliabilityRegion(own.alpha, start, (math.inf, own.psi[1]))


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
    are used: the support holds a document for each of the other prompts, which would be an unusually near neighbour of an
    answer to the same prompt. reward: r, which gives the true labels of the final answers; default: that of the SDM layer.
    The other settings are those of `generate`. The result is added to `lm.search_calibrations` and, with `save`, to
    `sdm/search.json` in the model's folder; `generate` uses it wherever policy and settings are the same.
    """
    policy = as_policy(policy)
    sampling = lm.sampling(max_new_tokens, temperature, top_p, stop)
    alpha = lm.alpha if alpha is None else check_alpha(alpha)
    if lm.answer_certificate is not None:
        raise ValueError(
            "This model has a certificate, which decides about its answers: certify the search as well, with fresh rows "
            "(sdmlm certify DIR --data ROWS --search KIND)."
        )
    if save and lm.folder is None:
        raise ValueError("This model has no folder of its own to keep the calibration in: give save=False.")
    r = reward_as_fitted(reward, lm.metadata)
    check_reward(r, rows)
    ids = _calibration_rows(lm, rows)
    chosen = [rows[i] for i in ids]
    prompts = [row["prompt"] for row in chosen]
    result = run_search(lm, prompts, lm.read_prompts(prompts), policy, sampling, 0, alpha, 0, progress)
    bodies = [answer.text for answer in result.answers]
    columns = dict.fromkeys(name for row in rows for name in row)
    labels = apply_reward(r, chosen, bodies, lm.tags, columns)
    scores = result.scores
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
        tuple(result.tries),
        tuple(lm.estimator.region(a) for a in sorted({*ALPHA_GRID, alpha})),
    )

    if save and lm.folder is not None:
        sdm = lm.folder / SDM_FOLDER
        with locked(sdm):  # another process may have calibrated another search in the meantime
            save_searches(sdm, joined(load_searches(sdm), [calibration]))
    lm.search_calibrations = joined(lm.search_calibrations, [calibration])
    return calibration


def joined(known: Sequence[SearchCalibration], more: Sequence[SearchCalibration]) -> tuple[SearchCalibration, ...]:
    """Both together; a calibration in `more` replaces one in `known` for the same search and settings."""
    others = [c for c in known if not any(c.matches(n.policy, n.alpha, n.sampling, n.estimator) for n in more)]
    return (*others, *more)


def _calibration_rows(lm: SDMLanguageModel, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the rows in the calibration half of the SDM layer whose prompts are not in its support as well."""
    check_rows(rows, lm.tags)
    if "held_out" in lm.metadata:
        return _held_out_rows(lm, rows)
    support_ids, calibration_ids = lm.estimator.support_ids_, lm.estimator.calibration_ids_
    numbers = [i for i in (*support_ids, *calibration_ids) if isinstance(i, int)]
    other = "these are not the rows that the SDM layer was fitted over: give D_ca, all of it, in its order."
    if sorted(numbers) != list(range(len(rows))):
        raise ValueError(f"The SDM layer was fitted over {len(numbers)} rows and {len(rows)} are given: {other}")
    if not lm.encoder.truncate_prompt:
        for i in numbers:
            start = lm.encoder.decode(lm.encoder.encode_prompt(rows[i]["prompt"]))
            if not lm.estimator.documents_.get(i, start).startswith(start):
                raise ValueError(f"Row {i} has another prompt than document {i} of the SDM layer: {other}")
    known = {prompt_key(rows[i]["prompt"]) for i in support_ids if isinstance(i, int)}
    given = [lm.estimator.documents_[i] for i in support_ids if not isinstance(i, int)]  # by feedback

    def new(i: int) -> bool:
        start = lm.encoder.decode(lm.encoder.encode_prompt(rows[i]["prompt"])) if given else ""
        return prompt_key(rows[i]["prompt"]) not in known and not any(text.startswith(start) for text in given)

    kept = sorted(i for i in calibration_ids if isinstance(i, int) and new(i))
    if not kept:
        raise ValueError(
            "Every calibration prompt is in the support too, so no row is left to calibrate the search on."
        )
    return kept


def _held_out_rows(lm: SDMLanguageModel, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the rows that were held out for the certificate and whose prompts the SDM layer was not fitted over."""
    n = lm.metadata["calibration_rows"]
    if len(rows) != n:
        raise ValueError(
            f"The SDM layer was made with {n} calibration rows and {len(rows)} are given: give the same, in their order."
        )
    held_out = set(lm.metadata["held_out"])
    seen = {prompt_key(row["prompt"]) for i, row in enumerate(rows) if i not in held_out}
    kept = [i for i in sorted(held_out) if prompt_key(rows[i]["prompt"]) not in seen]
    if not kept:
        raise ValueError("Every held-out prompt was fitted over too, so no row is left to calibrate the search on.")
    return kept


# On disk


def save_searches(sdm: Path, searches: Sequence[SearchCalibration]) -> None:
    """Write `sdm/search.json`, if there are searches or an older file."""
    if searches or (sdm / FILE).exists():
        write_metadata(sdm / FILE, {"format_version": FORMAT_VERSION, "searches": [c.to_dict() for c in searches]})


def load_searches(sdm: Path) -> tuple[SearchCalibration, ...]:
    """What `save_searches` wrote; empty if there is no file."""
    path = sdm / FILE
    if not path.exists():
        return ()
    try:
        metadata = read_metadata(path)
        version = int(metadata["format_version"])
        if version <= FORMAT_VERSION:
            return tuple(SearchCalibration.from_dict(c) for c in metadata["searches"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it from a copy or delete it.") from error
    raise ValueError(f"{path} was written by a newer sdmlm (format {version}): upgrade sdmlm.")
