"""What search under a budget is worth: admitted share and accuracy against the number of further tries.

    python benchmarks/search.py --model runs/demo/sdm_hn --calibration runs/demo/data/calibration.jsonl \
        --test runs/demo/data/test.jsonl --output docs/results/search-demo.json

Each kind of search and budget is run on the test prompts, and calibrated as a whole over the calibration prompts; its final
answers are judged by the region of that calibration, and by that of single answers ("not calibrated"). Beside it stand plain
generation (budget 0) and best-of-n by the LM's probability: of n = 1 + budget answers the likeliest, judged by the region of
single answers. "verified" is the share of prompts with an answer accepted as Yes, and how many of those are right; "tokens"
are those that the LM wrote for each prompt, in all tries together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sdmlm import SDMLanguageModel, SearchPolicy, calibrate_search
from sdmlm.estimator.region import HighReliabilityRegion, membership
from sdmlm.experiments.evaluate import load_task
from sdmlm.generation.verification import Verification
from sdmlm.language_model.summary import batches_by_length
from sdmlm.rewards import apply_reward
from sdmlm.storage.artifacts import write_text_atomically

Rows = Sequence[Mapping[str, Any]]


def measured(answers: Sequence[Verification], right: Sequence[int]) -> dict[str, Any]:
    """Shares over all prompts, accuracies among those they are of."""
    n = len(answers)
    verified = [r for a, r in zip(answers, right, strict=True) if a.verified]
    decided = [r == (a.verdict == a.yes) for a, r in zip(answers, right, strict=True) if a.accepted]
    return {
        "answers_right": sum(right) / n,
        "verified": len(verified) / n,
        "verified_right": sum(verified) / len(verified) if verified else None,
        "admitted": len(decided) / n,
        "admitted_right": sum(decided) / len(decided) if decided else None,
        "tries": sum(a.tries for a in answers) / n,
        "tokens": sum(a.completion_tokens for a in answers) / n,
    }


@torch.inference_mode()
def log_probabilities(lm: SDMLanguageModel, prompts: Sequence[str], texts: Sequence[str]) -> list[float]:
    """log p(answer | prompt) under the LM, up to and including its `<verified>` tag."""
    prefix = [len(lm.encoder.encode_prompt(p)) for p in prompts]
    ids = [lm.encoder.encode_for_judging(p, t) for p, t in zip(prompts, texts, strict=True)]
    out = [0.0] * len(ids)
    for batch in batches_by_length([len(i) for i in ids], 4096):
        longest = max(len(ids[n]) for n in batch)
        padded = torch.tensor([ids[n] + [0] * (longest - len(ids[n])) for n in batch])
        logits = lm.model(input_ids=padded).logits.log_softmax(dim=-1)  # causal: padding on the right changes nothing
        token = logits[:, :-1].gather(2, padded[:, 1:, None]).squeeze(2)
        for row, n in enumerate(batch):
            out[n] = float(token[row, prefix[n] - 1 : len(ids[n]) - 1].sum())
    return out


def best_of(lm: SDMLanguageModel, prompts: list[str], n: int, temperature: float, alpha: float) -> list[Verification]:
    """Of a greedy answer and n - 1 sampled ones the likeliest for each prompt."""
    how: dict[str, Any] = {"alpha": alpha, "neighbors": 0, "progress": False}
    candidates = [lm.generate(prompts, **how)]
    for seed in range(1, n):
        candidates.append(lm.generate(prompts, temperature=temperature, seed=seed, **how))
    scores = [log_probabilities(lm, prompts, [a.text for a in answers]) for answers in candidates]
    best = [max(zip(at, some, strict=True), key=lambda pair: pair[0])[1] for at, some in _by_prompt(scores, candidates)]
    spent = [sum(a.completion_tokens for a in answers) for answers in zip(*candidates, strict=True)]
    return [dataclasses.replace(a, tries=n, completion_tokens=tokens) for a, tokens in zip(best, spent, strict=True)]


def _by_prompt(scores: list[list[float]], candidates: list[list[Verification]]) -> Any:
    return zip(zip(*scores, strict=True), zip(*candidates, strict=True), strict=True)


def judged_by(region: HighReliabilityRegion, answers: Sequence[Verification]) -> list[Verification]:
    """The same answers, accepted where the region holds them."""
    yes = np.array([a.probability_of_yes for a in answers])
    q_prime, predictions = np.array([a.q_prime for a in answers]), np.array([int(a.verdict == a.yes) for a in answers])
    inside = membership([region], q_prime, np.stack([1 - yes, yes], axis=1), predictions)[:, 0]
    return [dataclasses.replace(a, accepted=bool(here)) for a, here in zip(answers, inside, strict=True)]


def read(path: str, limit: int | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()][:limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True, help="D_ca, all of it")
    parser.add_argument("--test", required=True)
    parser.add_argument("--task", default="word_ordering")
    parser.add_argument("--kinds", nargs="+", default=["resample", "reprompt", "continue"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--calibrate", nargs="+", type=int, help="budgets to calibrate a search for (default: all)")
    parser.add_argument("--best-of", nargs="+", type=int, help="budgets to compare with best-of-n (default: all)")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--alpha", type=float, help="another alpha than the model's")
    parser.add_argument("--limit", type=int, help="test prompts (default: all)")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    lm, task = SDMLanguageModel.from_pretrained(args.model), load_task(args.task)
    rows, calibration = read(args.test, args.limit), read(args.calibration, None)
    prompts = [row["prompt"] for row in rows]
    alpha = lm.alpha if args.alpha is None else args.alpha
    found: list[dict[str, Any]] = []

    def note(how: str, budget: int, start: float, answers: Sequence[Verification], **more: Any) -> None:
        right = apply_reward(task.reward, rows, [a.text for a in answers], lm.tags)
        seconds = round(time.perf_counter() - start, 1)
        found.append({"how": how, "budget": budget, **measured(answers, right), "seconds": seconds, **more})
        line = {k: round(v, 4) if isinstance(v, float) else v for k, v in found[-1].items()}
        print(json.dumps(line), flush=True)
        facts = {"model": args.model, "alpha": alpha, "prompts": len(rows), "temperature": args.temperature}
        write_text_atomically(args.output, json.dumps({**facts, "results": found}, indent=1) + "\n")

    start = time.perf_counter()
    note("plain", 0, start, lm.generate(prompts, alpha=alpha, neighbors=0, progress=False))
    for budget in args.budgets:
        start = time.perf_counter()
        if not args.best_of or budget in args.best_of:
            best = best_of(lm, prompts, 1 + budget, args.temperature, alpha)
            note("best-of-n by LM probability", budget, start, best)
        for kind in args.kinds:
            policy, start = SearchPolicy(kind, budget, args.temperature), time.perf_counter()
            answers = lm.generate(prompts, search=policy, alpha=alpha, neighbors=0, progress=False)
            note(f"{kind}, not calibrated", budget, start, answers)
            if args.calibrate and budget not in args.calibrate:
                continue
            start = time.perf_counter()  # what the calibration takes, once
            found_region = calibrate_search(
                lm, calibration, policy, task.reward, alpha=alpha, save=False, progress=False
            ).deciding(alpha)
            note(kind, budget, start, judged_by(found_region, answers), q_min=min(found_region.q_min, 1e9))


if __name__ == "__main__":
    main()
