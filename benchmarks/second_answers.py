"""What a language model writes after a refused answer: how often is the second answer right where the first was wrong, and the reverse?

    python benchmarks/second_answers.py runs/demo/sdm_hn runs/demo-revise/sdm_hn --test runs/demo/data/test.jsonl \
        --output docs/results/second-answers-demo.json

Each model answers the test prompts greedily. Then every first answer is refused, whatever the SDM layer says: the turn goes on
after `<verified>No</verified>`, and the model writes a second answer, greedily or sampled at `--temperature`. "resample" is another
answer at that temperature without a word about the first. Counted are pairs (first right, second right), over all prompts and over
those whose first answer is not verified.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdmlm import SDMLanguageModel
from sdmlm.experiments.evaluate import load_task
from sdmlm.rewards import apply_reward
from sdmlm.storage.artifacts import write_text_atomically


def pairs(first: Sequence[int], second: Sequence[int], same: Sequence[bool], among: Sequence[bool]) -> dict[str, int]:
    """How many prompts have each pair of a wrong (0) or right (1) first and second answer; how often both are the same text."""
    counted = {f"{a}{b}": 0 for a in (0, 1) for b in (0, 1)}
    for a, b, here in zip(first, second, among, strict=True):
        counted[f"{a}{b}"] += here
    repeated = sum(s and here for s, here in zip(same, among, strict=True))
    return counted | {"prompts": sum(among), "same text": repeated}


def measure(folder: str, rows: Sequence[Mapping[str, Any]], reward: Any, temperature: float) -> dict[str, Any]:
    """The counts of one model."""
    lm = SDMLanguageModel.from_pretrained(folder, device="cpu")
    prompts = [row["prompt"] for row in rows]
    read, everyone = lm.read_prompts(prompts), [True] * len(rows)
    first = lm.generate(prompts, neighbors=0, progress=False)
    refused = [not a.verified for a in first]
    right = apply_reward(reward, rows, [a.text for a in first], lm.tags)
    starts = [lm.encoder.refused([a.text]) for a in first]
    found: dict[str, Any] = {"first_right": sum(right), "prompts": len(rows)}
    for name, t, begin in (
        ("continue, greedy", 0.0, starts),
        ("continue, sampled", temperature, starts),
        ("resample", temperature, None),
    ):
        seeds = [[0, n, 1] for n in range(len(rows))]
        more: dict[str, Any] = {} if begin is None else {"contexts": read, "prefixes": begin}
        answers = lm.write(read, lm.sampling(temperature=t), seeds, progress=False, **more)
        second = apply_reward(reward, rows, [a.text for a in answers], lm.tags)
        same = [a.text == b.text for a, b in zip(first, answers, strict=True)]
        found[name] = {"all": pairs(right, second, same, everyone), "refused": pairs(right, second, same, refused)}
        found[name]["tokens"] = sum(a.completion_tokens for a in answers) / len(rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--task", default="word_ordering")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.test.read_text(encoding="utf-8").splitlines()]
    found = {}
    for folder in args.models:
        found[folder] = measure(folder, rows, load_task(args.task).reward, args.temperature)
        for name, counts in found[folder].items():
            print(folder, name, json.dumps(counts), flush=True)
    write_text_atomically(args.output, json.dumps({"temperature": args.temperature, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
