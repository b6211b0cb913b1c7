"""The certificate of a search as a whole: which of its final answers are verified, and what is promised about these.

Choosing among answers changes what a threshold promises, so the certificate of single answers does not cover a search. Here the
whole search answers fresh prompts, and a threshold for its final answers is found as for single answers: a part of the answers
fixes the candidates, the others test them. This is for models with a certificate; a search of other models is calibrated by the
region of the papers (`sdmlm.generation.search_calibration`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdmlm.errors import BadSetting
from sdmlm.estimator.region import check_alpha
from sdmlm.generation.answers import Sampling
from sdmlm.generation.certification import certified_rule, new_rows
from sdmlm.generation.search import SearchPolicy, as_policy, run_search
from sdmlm.language_model.answer_rule import DELTA, EPSILON, AnswerCertificate
from sdmlm.rewards import Reward, apply_reward, check_reward, reward_as_fitted
from sdmlm.storage.artifacts import SDM_FOLDER, locked, read_metadata, write_metadata

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel

FILE, FORMAT_VERSION = "search_certificates.json", 1


@dataclass(frozen=True)
class SearchCertificate:
    """A certificate for the final answers of a search, and the settings that it holds for.

    `stops_at` are the threshold and the Distance bound of the model's own certificate, which decides whether to try again; `tries`
    is the mean number of answers per prompt.
    """

    policy: SearchPolicy
    sampling: Sampling
    stops_at: tuple[float, float]
    tries: float
    certificate: AnswerCertificate

    def matches(self, policy: SearchPolicy, alpha: float, sampling: Sampling, single: AnswerCertificate) -> bool:
        """Whether it covers a search with these settings, in a model whose certificate of single answers is `single`."""
        same = (self.policy, self.sampling, self.stops_at) == (policy, sampling, stopping(single))
        own = self.certificate
        same_scores = own.rule.estimator == single.rule.estimator and single.usual in (None, own.usual)
        return same and same_scores and own.alpha >= alpha

    def sentence(self) -> str:
        """What is promised, in words."""
        further, first = self.policy, self.sampling
        greedy = "greedy" if first.temperature == 0 else f"at temperature {first.temperature:g}, top-p {first.top_p:g}"
        stop = f", stopped by {' or '.join(map(repr, first.stop))}" if first.stop else ""
        return (
            f"Search {further.kind} with a budget of {further.budget} (first answer {greedy}, further ones at temperature "
            f"{further.temperature:g}, up to {first.max_new_tokens} tokens{stop}): {self.tries:.2f} answers per prompt. "
            f"{self.certificate.sentence('the final answers of this search')}"
        )

    def figures(self) -> dict[str, Any]:
        """The figures for the commands' JSON."""
        how = {"policy": dataclasses.asdict(self.policy), "sampling": dataclasses.asdict(self.sampling)}
        return {**how, "tries": self.tries, **self.certificate.figures(), "says": self.sentence()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**dataclasses.asdict(self), "certificate": self.certificate.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SearchCertificate:
        """What `to_dict` gave."""
        sampling = Sampling(**{**values["sampling"], "stop": tuple(values["sampling"]["stop"])})
        threshold, bound = values["stops_at"]
        certificate = AnswerCertificate.from_dict(values["certificate"])
        return cls(SearchPolicy(**values["policy"]), sampling, (threshold, bound), float(values["tries"]), certificate)


def stopping(single: AnswerCertificate) -> tuple[float, float]:
    """What decides whether a search tries again."""
    return single.threshold, single.rule.least_distance


def in_force(certificates: Sequence[SearchCertificate], single: AnswerCertificate | None) -> list[SearchCertificate]:
    """Those that apply to a model whose certificate of single answers is `single`; None if it has none that applies."""
    if single is None:
        return []
    return [
        c
        for c in certificates
        if c.certificate.alpha <= single.alpha and c.matches(c.policy, c.certificate.alpha, c.sampling, single)
    ]


def applying(lm: SDMLanguageModel) -> list[SearchCertificate]:
    """The certificates of searches that the model can use."""
    own = lm.answer_certificate
    return in_force(lm.search_certificates, None if own is None else lm.certificate(own.alpha))


def _no_stopping_rule(lm: SDMLanguageModel, alpha: float) -> str:
    """Why no certificate of single answers can decide when to stop, and what to do about it."""
    own = lm.answer_certificate
    if own is None:
        return "this model has none: run sdmlm certify without --search first, with other rows"
    if own.rule.estimator != lm.digest():
        return "this model's was made for another SDM layer (feedback changes it): undo the feedback, or certify the model again"
    if own.alpha < alpha:
        return f"this model's is for alpha {own.alpha:g}: choose that alpha or a lower one, or certify the model again"
    return "this model's verifies nothing: certify the model again, with more rows or a lower alpha"


def certify_search(
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
    delta: float = DELTA,
    epsilon: float = EPSILON,
    source: str = "fresh rows",
    save: bool = True,
    progress: bool = True,
) -> SearchCertificate:
    """Certify which final answers of a search are verified.

    rows: new to the model; they must not have been used for fitting, nor for the model's own certificate, which decides whether to
    try again. The other settings are those of `generate` and of `certify_lm`. The result is added to `lm.search_certificates`
    and, with `save`, to `sdm/search_certificates.json`, where it replaces one for the same policy and settings, whatever its alpha.
    `generate` uses it wherever policy and settings are the same.
    """
    policy, sampling = as_policy(policy), lm.sampling(max_new_tokens, temperature, top_p, stop)
    alpha = lm.alpha if alpha is None else check_alpha(alpha)
    single = lm.certificate(alpha)
    if single is None or not single.certified:
        raise BadSetting(
            "search",
            f"needs a certificate of single answers at alpha {alpha:g}, which decides when to stop; "
            f"{_no_stopping_rule(lm, alpha)}.",
        )
    if save and lm.folder is None:
        raise ValueError("This model has no folder of its own to keep the certificate in: give save=False.")
    rows = new_rows(lm, rows)
    r = reward_as_fitted(reward, lm.metadata)
    check_reward(r, rows)
    prompts = [row["prompt"] for row in rows]
    result = run_search(lm, prompts, lm.read_prompts(prompts), policy, sampling, 0, alpha, 0, progress)
    columns = dict.fromkeys(name for row in rows for name in row)
    labels = apply_reward(r, rows, [answer.text for answer in result.answers], lm.tags, columns)
    how: dict[str, Any] = {"alpha": alpha, "delta": delta, "epsilon": epsilon, "source": source}
    certificate = certified_rule(lm, result.answers, result.scores, np.asarray(labels) == 1, **how)
    found = SearchCertificate(policy, sampling, stopping(single), sum(result.tries) / len(rows), certificate)
    if save and lm.folder is not None:
        sdm = lm.folder / SDM_FOLDER
        with locked(sdm):  # another process may have certified another search in the meantime
            save_search_certificates(sdm, with_certificate(load_search_certificates(sdm), found))
        lm.saved_search_certificates = (*lm.saved_search_certificates, found)
    lm.search_certificates = with_certificate(lm.search_certificates, found)
    return found


def with_certificate(known: Sequence[SearchCertificate], new: SearchCertificate) -> tuple[SearchCertificate, ...]:
    """All of them; the new one replaces one for the same search and sampling."""
    others = [one for one in known if (one.policy, one.sampling) != (new.policy, new.sampling)]
    return (*others, new)


# On disk


def save_search_certificates(sdm: Path, certificates: Sequence[SearchCertificate]) -> None:
    """Write `sdm/search_certificates.json`, or remove it if there are none any more."""
    path = sdm / FILE
    if certificates:
        write_metadata(path, {"format_version": FORMAT_VERSION, "searches": [one.to_dict() for one in certificates]})
    else:
        path.unlink(missing_ok=True)


def load_search_certificates(sdm: Path) -> tuple[SearchCertificate, ...]:
    """What `save_search_certificates` wrote; empty if there is no file."""
    path = sdm / FILE
    if not path.exists():
        return ()
    try:
        metadata = read_metadata(path)
        version = int(metadata["format_version"])
        if version <= FORMAT_VERSION:
            return tuple(SearchCertificate.from_dict(one) for one in metadata["searches"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, then certify the search again.") from error
    raise ValueError(f"{path} was written by a newer sdmlm (format {version}): upgrade sdmlm.")
