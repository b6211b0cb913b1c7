"""What does a certified model verify of answers that another model wrote, as in gateway mode? Nothing is promised about these.

    python benchmarks/others_answers.py runs/demo/verified runs/demo/ce_hn --test runs/demo/data/test.jsonl --output docs/results/gateway-demo.json

JUDGE: an SDM language model with a certificate. WRITER: another language model for the same task. Both answer the prompts greedily; the
judge's own answers are judged as they are written, the writer's as text. For each: the share that is right, the share that is verified,
the share of these that is right, and how well the judge's certainty ranks right above wrong answers (AUROC).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sdmlm import SDMLanguageModel
from sdmlm.evaluation.metrics import auroc
from sdmlm.experiments.evaluate import load_task
from sdmlm.generation.verification import Verification
from sdmlm.rewards import Reward, apply_reward
from sdmlm.storage.artifacts import write_text_atomically


def measured(
    lm: SDMLanguageModel, judged: Sequence[Verification], rows: Sequence[Mapping[str, Any]], reward: Reward
) -> dict[str, float]:
    """What is verified of these answers, and rightly so."""
    right = np.array(apply_reward(reward, rows, [one.text for one in judged], lm.tags)) == 1
    verified = np.array([one.verified for one in judged])
    return {
        "right": float(right.mean()),
        "verified": float(verified.mean()),
        "verified_right": float(right[verified].mean()) if verified.any() else float("nan"),
        "auroc": auroc([one.certainty or 0.0 for one in judged], right),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judge")
    parser.add_argument("writer")
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--task", default="word_ordering")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.test.read_text(encoding="utf-8").splitlines()]
    prompts, reward = [row["prompt"] for row in rows], load_task(args.task).reward
    lm, writer = (SDMLanguageModel.from_pretrained(folder, device="cpu") for folder in (args.judge, args.writer))
    own = lm.generate(prompts, neighbors=0, progress=False)
    texts = [one.text for one in writer.generate(prompts, neighbors=0, progress=False)]
    others = lm.verify(prompts, texts, neighbors=0, progress=False)
    found = {"own answers": measured(lm, own, rows, reward), "answers of the other": measured(lm, others, rows, reward)}
    for name, figures in found.items():
        print(name, {measure: round(value, 4) for measure, value in figures.items()})
    write_text_atomically(args.output, json.dumps({"rows": len(rows), "answers": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
