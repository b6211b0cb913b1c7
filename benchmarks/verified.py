"""How many of a demo LM's own answers are verified, and how many of those are right, on rows that nothing was chosen on.

    python benchmarks/verified.py MODEL [MODEL ...] [--grammar-seed 77] [--rows 1000]

MODEL: folders of SDM language models for the demo's task, with a certificate: `runs/demo/verified`, or for other training seeds

    sdmlm train --recipe recipes/demo/sdm_hn.yaml --model demo --data runs/demo/data/train.jsonl \
        --calibration runs/demo/data/calibration.jsonl --seed 1 --output runs/seed-1
    sdmlm calibrate runs/seed-1 --data runs/demo/data/calibration.jsonl --summary states+likelihood --documents own \
        --alpha 0.95 --output runs/verified-1

The rows are drawn anew from the demo's grammar with a seed of their own, without sentences of the demo. Shifted rows are the
longest sentences. "Other prompts" are right answers to other prompts, "truncated" are right answers without their last word.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from sdmlm import SDMLanguageModel
from sdmlm.demo.sentences import settled_sentences
from sdmlm.demo.word_ordering import SIZES, demo_splits
from sdmlm.rewards import apply_reward, exact_match
from sdmlm.tasks.word_ordering import make_splits

Rows = list[dict[str, Any]]


def fresh_rows(seed: int, n: int) -> tuple[Rows, Rows]:
    """Test rows and shifted rows of another seed of the grammar, without the demo's own sentences."""
    known = {row["sentence"] for rows in demo_splits(SIZES).values() for row in rows}
    sentences = [text for text in settled_sentences(30_000, seed=seed) if text not in known]
    rows = make_splits(sentences, None, train=3200, calibration=3200, test=n, shifted=n, seed=seed).rows
    return rows["test"], rows["shifted"]


def shares(lm: SDMLanguageModel, rows: Rows, answers: list[str] | None = None) -> tuple[float, float, float]:
    """(right, verified, right among the verified) of the LM's own greedy answers, or of given ones."""
    prompts = [row["prompt"] for row in rows]
    verifications = (
        lm.generate(prompts, progress=False) if answers is None else lm.verify(prompts, answers, progress=False)
    )
    right = np.array(apply_reward(exact_match, rows, [v.text for v in verifications], lm.tags)) == 1
    verified = np.array([v.verified for v in verifications])
    return (
        float(right.mean()),
        float(verified.mean()),
        float(right[verified].mean()) if verified.any() else float("nan"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--grammar-seed", type=int, default=77)
    parser.add_argument("--rows", type=int, default=1000)
    args = parser.parse_args()
    test, shifted = fresh_rows(args.grammar_seed, args.rows)
    others = [test[(i + 1) % len(test)]["chosen"] for i in range(len(test))]
    end = "</sentence>"
    truncated = [" ".join(row["chosen"].removesuffix(end).split()[:-1]) + end for row in test]
    print("| model | right | verified | right among them | shifted verified | other prompts | truncated |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for model in args.models:
        lm = SDMLanguageModel.from_pretrained(model)
        right, verified, accuracy = shares(lm, test)
        rest = [shares(lm, shifted)[1], shares(lm, test, others)[1], shares(lm, test, truncated)[1]]
        numbers = [right, verified, accuracy, *rest]
        print(f"| {model} | {' | '.join(f'{number:.3f}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
