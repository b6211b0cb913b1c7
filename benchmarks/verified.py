"""How many of a demo LM's own answers are verified, and how many of those are right, on rows that nothing was chosen on.

    python benchmarks/verified.py MODEL [MODEL ...] [--grammar-seed 84] [--rows 1000] [--output verified.json]

MODEL: folders of SDM language models for the demo's task, with a certificate: `runs/demo/verified`, or for other training seeds

    sdmlm train --recipe recipes/demo/sdm_hn.yaml --model demo --data runs/demo/data/train.jsonl \
        --calibration runs/demo/data/calibration.jsonl --seed 1 --output runs/seed-1
    sdmlm calibrate runs/seed-1 --data runs/demo/data/own.jsonl --documents own --alpha 0.95 --output runs/verified-1

The rows are drawn anew from the demo's grammar with a seed of their own, without sentences of the demo. Shifted rows are the
longest sentences. "Other" are right answers to other prompts, "truncated" are right answers without their last word, "canned" is
the same right answer to all prompts. Then come the rivals (`compare_answers`) on the same answers, as means over the models.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdmlm import SDMLanguageModel
from sdmlm.demo.sentences import settled_sentences
from sdmlm.demo.word_ordering import SIZES, demo_splits
from sdmlm.experiments.answer_comparison import OTHER, SHIFTED, compare_answers
from sdmlm.experiments.answer_runs import TEST
from sdmlm.experiments.evaluate import generation_length
from sdmlm.rewards import apply_reward, exact_match
from sdmlm.storage.artifacts import write_text_atomically
from sdmlm.tasks.word_ordering import make_splits

Rows = list[dict[str, Any]]
Mask = NDArray[np.bool_]


def fresh_rows(seed: int, n: int) -> tuple[Rows, Rows]:
    """Test rows and shifted rows of another seed of the grammar, without the demo's own sentences."""
    known = {row["sentence"] for rows in demo_splits(SIZES).values() for row in rows}
    sentences = [text for text in settled_sentences(30_000, seed=seed) if text not in known]
    rows = make_splits(sentences, None, train=3200, calibration=3200, test=n, shifted=n, seed=seed).rows
    return rows["test"], rows["shifted"]


def verified(lm: SDMLanguageModel, rows: Rows, answers: list[str]) -> Mask:
    """Which answers to the prompts of rows are verified."""
    judged = lm.verify([row["prompt"] for row in rows], answers, neighbors=0, progress=False)
    return np.array([one.verified for one in judged])


def own(lm: SDMLanguageModel, rows: Rows) -> tuple[list[str], Mask, Mask]:
    """The LM's own greedy answers, which of them are right, and which are verified."""
    prompts, length = [row["prompt"] for row in rows], generation_length(lm, rows)
    answers = lm.generate(prompts, max_new_tokens=length, neighbors=0, progress=False)
    texts = [one.text for one in answers]
    right = np.array(apply_reward(exact_match, rows, texts, lm.tags)) == 1
    return texts, right, np.array([one.verified for one in answers])


def measured(lm: SDMLanguageModel, test: Rows, shifted: Rows) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """What the model's own rule verifies, and all scores on the same answers."""
    texts, right, accepted = own(lm, test)
    far_texts, far_right, far_accepted = own(lm, shifted)
    end = "</sentence>"
    given = {
        "other": [test[(i + 1) % len(test)]["chosen"] for i in range(len(test))],
        "truncated": [" ".join(row["chosen"].removesuffix(end).split()[:-1]) + end for row in test],
        "canned": [shifted[0]["chosen"]] * len(test),
        "canned, short": [min((row["chosen"] for row in test), key=len)] * len(test),
    }
    found = {
        "right": float(right.mean()),
        "verified": float(accepted.mean()),
        "of these right": float(right[accepted].mean()) if accepted.any() else float("nan"),
        "shifted right": float(far_right.mean()),
        "shifted verified": float(far_accepted.mean()),
        **{name: float(verified(lm, test, answers).mean()) for name, answers in given.items()},
    }
    written = {TEST: texts, SHIFTED: far_texts}
    return found, compare_answers(lm, test, shifted, exact_match, samples=0, written=written, progress=False).json()[
        "scores"
    ]


def rival_rows(found: list[list[dict[str, Any]]]) -> list[list[str]]:
    """One line per score: means over the models."""

    def mean(estimator: str, dataset: str, measure: str) -> str:
        values = [
            one[measure]
            for scores in found
            for one in scores
            if (one["estimator"], one["dataset"]) == (estimator, dataset) and one[measure] is not None
        ]
        return f"{np.mean(values):.3f}" if values else "-"

    names = list(dict.fromkeys(one["estimator"] for scores in found for one in scores))
    return [
        [
            name,
            *(mean(name, TEST, measure) for measure in ("auroc", "aurc", "prr", "coverage_at_0.95")),
            *(f"{mean(name, d, 'coverage')} @ {mean(name, d, 'accuracy_accepted')}" for d in (TEST, SHIFTED)),
            mean(name, OTHER, "coverage"),
        ]
        for name in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--grammar-seed", type=int, default=84)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--output", metavar="FILE.json")
    args = parser.parse_args()
    test, shifted = fresh_rows(args.grammar_seed, args.rows)
    results: dict[str, Any] = {}
    for model in args.models:
        found, scores = measured(SDMLanguageModel.from_pretrained(model), test, shifted)
        results[model] = {"rule": found, "scores": scores}
        if len(results) == 1:
            print(f"| model | {' | '.join(found)} |\n|---|{'---:|' * len(found)}")
        print(f"| {model} | {' | '.join(f'{value:.3f}' for value in found.values())} |", flush=True)
        if args.output:
            head = {"grammar_seed": args.grammar_seed, "rows": args.rows}
            write_text_atomically(args.output, json.dumps({**head, "models": results}, indent=1) + "\n")
    rules = np.array([list(one["rule"].values()) for one in results.values()])
    spread = rules.std(axis=0, ddof=1) if len(rules) > 1 else np.zeros(rules.shape[1])
    cells = (f"{mean:.3f} ({sd:.3f})" for mean, sd in zip(rules.mean(axis=0), spread, strict=True))
    print(f"| mean (standard deviation) | {' | '.join(cells)} |\n")
    print(
        "| score | AUROC | AURC | PRR | cov. at 0.95 | test | shifted | other prompts |\n|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    for cells_of_line in rival_rows([one["scores"] for one in results.values()]):
        print(f"| {' | '.join(cells_of_line)} |")


if __name__ == "__main__":
    main()
