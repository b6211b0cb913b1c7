"""Does a search pay under a certificate for the whole policy? Verified share and accuracy against plain generation and best-of-n.

    python benchmarks/certified_search.py runs/demo/verified --rows 1000 --output docs/results/search-certified-demo.json

MODEL: an SDM language model with a certificate, which decides when a search stops, whatever `--alpha`. The rows are drawn anew from the
demo's grammar (`--grammar-seed`), or read from `--data`, for a `--task` of `sdmlm.tasks`. Each policy answers all of them once. `resample` and best-of-n
choose among the same candidates: the greedy answer and sampled ones (temperature 0.7). Then, for each of `--splits` random halves: one half certifies the policy (a fifth of it fixes the
candidate thresholds), the other is counted. Figures are means over the splits (`verified_right`: over those in which something is
verified), `sd` is the standard deviation of `verified`, `gain` mean and standard deviation of what is verified more than without a search; `tokens` are those that the language model wrote for each prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from verified import fresh_rows

from sdmlm import SDMLanguageModel, SearchPolicy
from sdmlm.estimator.acceptance import Evidence
from sdmlm.experiments.evaluate import load_task
from sdmlm.generation.certification import CANDIDATE_SHARE
from sdmlm.generation.search import run_search
from sdmlm.language_model.answer_rule import certify_answers, evidence_of
from sdmlm.language_model.likelihood import FIGURES
from sdmlm.rewards import Reward, apply_reward
from sdmlm.storage.artifacts import write_text_atomically

TEMPERATURE, MOST = 0.7, 5  # of further answers; how many answers there are to choose from
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Finals:
    """One answer to each prompt: the rule's input with labels, and the tokens that were written for it."""

    evidence: Evidence
    tokens: Floats

    def part(self, mask: NDArray[np.bool_]) -> Evidence:
        e = self.evidence
        labels = None if e.labels is None else e.labels[mask]
        return Evidence(e.confidence[mask], e.d[mask], e.predictions[mask], labels)


def candidates(lm: SDMLanguageModel, rows: list[dict[str, Any]], reward: Reward) -> tuple[list[Finals], Floats]:
    """The greedy answer and sampled ones, and the mean log-probability of each, (answers, prompts)."""
    certificate = lm.certificate()
    assert certificate is not None
    prompts, found, likely = lm.read_prompts([row["prompt"] for row in rows]), [], []
    for k in range(MOST):
        seeds = [[0, n, k] for n in range(len(rows))]
        answers = lm.write(prompts, lm.sampling(None, TEMPERATURE if k else 0.0), seeds, progress=False)
        whole = lm.whole_summaries(answers, progress=False)
        h = whole if lm.reduction is None else lm.reduction(whole)
        right = np.array(apply_reward(reward, rows, [answer.text for answer in answers], lm.tags))
        evidence = evidence_of(lm.score(h, lm.alpha), h.numpy(), certificate.usual, right)
        found.append(Finals(evidence, np.array([float(answer.completion_tokens) for answer in answers])))
        likely.append(whole[:, FIGURES.index("mean_log_probability") - len(FIGURES)].double().numpy())
    return found, np.stack(likely)


def picked(found: list[Finals], index: NDArray[np.int64], tokens: Floats) -> Finals:
    """Of each prompt the answer with this number."""
    at = np.arange(len(index))

    def take(name: str) -> Any:
        return np.stack([getattr(one.evidence, name) for one in found])[index, at]

    fields = {field.name: take(field.name) for field in dataclasses.fields(Evidence)}
    return Finals(Evidence(**fields), tokens)


def policies(lm: SDMLanguageModel, rows: list[dict[str, Any]], reward: Reward) -> dict[str, Finals]:
    """The final answers of every policy."""
    single = lm.certificate()
    assert single is not None
    found, likely = candidates(lm, rows, reward)
    tokens = np.cumsum([one.tokens for one in found], axis=0)
    accepts = np.stack([single.rule.accepts(one.evidence) for one in found])
    sure = np.stack([single.certainty(one.evidence) - ~single.rule.near_enough(one.evidence.d) for one in found])
    made = {"plain": found[0]}
    for budget in (1, 2, 4):
        stops = np.where(accepts[: 1 + budget].any(axis=0), accepts[: 1 + budget].argmax(axis=0), budget)
        index = np.array(
            [sure[: 1 + last, n].argmax() if not accepts[last, n] else last for n, last in enumerate(stops)]
        )
        made[f"resample, budget {budget}"] = picked(found, index, tokens[stops, np.arange(len(rows))])
    for n in (2, 5):
        made[f"best of {n} by the SDM layer"] = picked(found, sure[:n].argmax(axis=0), tokens[n - 1])
        made[f"best of {n} by mean log-probability"] = picked(found, likely[:n].argmax(axis=0), tokens[n - 1])
    prompts = [row["prompt"] for row in rows]
    for kind, budget in (("reprompt", 1), ("continue", 1), ("continue", 2), ("continue", 4)):
        policy = SearchPolicy(kind, budget, TEMPERATURE)
        result = run_search(
            lm, prompts, lm.read_prompts(prompts), policy, lm.sampling(), 0, lm.alpha, 0, progress=False
        )
        h = lm.summaries(result.answers).numpy()
        right = np.array(apply_reward(reward, rows, [answer.text for answer in result.answers], lm.tags))
        spent = np.array([float(v.completion_tokens) for v in result.verifications])
        made[f"{kind}, budget {budget}"] = Finals(evidence_of(result.scores, h, single.usual, right), spent)
    return made


def certified(finals: Finals, alpha: float, splits: int, plain: Sequence[float] | None = None) -> dict[str, Any]:
    """What is verified of one half under a certificate from the other; `plain`: the share of each split without a search."""
    shares, accuracies, n = [], [], len(finals.tokens)
    for split in range(splits):
        half = np.random.default_rng(split).permutation(n) < n // 2
        some = half & (np.random.default_rng([split, 1]).random(n) < CANDIDATE_SHARE)
        certificate = certify_answers(finals.part(some), finals.part(half & ~some), alpha=alpha, estimator="")
        counted = finals.part(~half)
        accepted = certificate.rule.accepts(counted)
        shares.append(accepted.mean())
        if accepted.any():
            accuracies.append(counted.right[accepted].mean())
    return {
        "answers_right": float((finals.evidence.labels == 1).mean()),  # type: ignore[union-attr]
        "verified": float(np.mean(shares)),
        "sd": float(np.std(shares)),
        "by_split": [float(share) for share in shares],
        **({} if plain is None else {"gain": gain(shares, plain)}),
        "verified_right": float(np.mean(accuracies)) if accuracies else None,
        "tokens": float(finals.tokens.mean()),
    }


def gain(shares: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Mean and standard deviation over the splits of what a policy verifies more than plain generation."""
    differences = np.subtract(shares, plain)
    return [float(differences.mean()), float(differences.std())]


def by_policy(finals: dict[str, Finals], alpha: float, splits: int) -> dict[str, Any]:
    """The figures of every policy at an alpha."""
    plain = certified(finals["plain"], alpha, splits)
    others = {name: one for name, one in finals.items() if name != "plain"}
    return {"plain": plain} | {name: certified(one, alpha, splits, plain["by_split"]) for name, one in others.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, help="rows; default: new ones of the demo's grammar")
    parser.add_argument("--task", default="word_ordering")
    parser.add_argument("--grammar-seed", type=int, default=81)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.9, 0.95])
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.data is None:
        rows = fresh_rows(args.grammar_seed, args.rows)[0]
    else:
        rows = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines()][: args.rows]
    lm = SDMLanguageModel.from_pretrained(args.model, device="cpu")
    if lm.certificate() is None:
        raise SystemExit(f"{args.model} has no certificate at alpha {lm.alpha:g}: make one with sdmlm certify.")
    finals = policies(lm, rows, load_task(args.task).reward)
    found = {f"{alpha:g}": by_policy(finals, alpha, args.splits) for alpha in args.alpha}
    for alpha, lines in found.items():
        print(
            f"alpha {alpha}\n| policy | answers right | verified (sd) | more (sd) | of these right | tokens |\n|---|---:|---:|---:|---:|---:|"
        )
        for name, f in lines.items():
            right = "-" if f["verified_right"] is None else f"{f['verified_right']:.1%}"
            more = "-" if "gain" not in f else f"{100 * f['gain'][0]:+.1f} ({100 * f['gain'][1]:.1f})"
            shown = f"{f['verified']:.1%} ({100 * f['sd']:.1f}) | {more} | {right} | {f['tokens']:.0f}"
            print(f"| {name} | {f['answers_right']:.1%} | {shown} |")
    head = {"rows": len(rows), "grammar_seed": None if args.data else args.grammar_seed, "splits": args.splits}
    write_text_atomically(args.output, json.dumps({**head, "alphas": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
