"""What the tests of search share: prompts, a policy, and search by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from tiny_sdm_lm import marked_rows

from sdmlm import SDMLanguageModel
from sdmlm.generation.search import SearchPolicy, reprompted
from sdmlm.generation.verification import Verification

PROMPTS = [row["prompt"] for row in marked_rows(40, 5)]


HOT = SearchPolicy("resample", budget=3, temperature=1.5)


def by_hand(
    lm: SDMLanguageModel, prompt: str, number: int, policy: SearchPolicy, alpha: float, seed: int = 0
) -> tuple[Verification, int]:
    """One prompt under a policy, a try at a time: (final answer as the SDM layer judges it, tries)."""
    seen: list[Verification] = []
    turn = ""
    while True:
        n = len(seen)
        sampling = lm.sampling(temperature=policy.temperature if n else 0.0)
        seeds = [[seed, number, n] if n else [seed, number]]
        more: dict[str, Any] = {}
        if n and policy.kind == "reprompt":
            more["contexts"] = [reprompted(lm, prompt, seen[-1].text)]
        if n and policy.kind == "continue":
            turn += f"{seen[-1].text}\n<verified>No</verified>\n"
            more |= {"contexts": [prompt], "prefixes": [lm.encoder.continuation(turn)]}
        start = lm.encoder.prompt_ids(more.get("contexts", [prompt])[0]) + lm.encoder.continuation(turn)
        if len(start) + lm.encoder.suffix_length >= lm.encoder.max_length:
            break
        answers = lm.write(lm.read_prompts([prompt]), sampling, seeds, progress=False, **more)
        seen += lm.judge(answers, alpha, 3, progress=False)
        if seen[-1].verified or len(seen) > policy.budget:
            break
    best = seen[0]
    for v in seen:
        best = v if v.probability_of_yes > best.probability_of_yes + 1e-6 else best
    best = seen[-1] if seen[-1].verified else best
    return dataclasses.replace(best, completion_tokens=sum(v.completion_tokens for v in seen)), len(seen)
