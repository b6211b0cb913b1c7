"""Embeddings h of real statements and reviews under a yes/no prompt, for `sdmlm compare` (docs/results.md).

    python examples/embed_real_data.py --model MODEL --data DATA --output DIR

MODEL: a Hugging Face folder or name of a chat LM (docs/results.md uses smollm2-135m). DATA holds `true_false/*.csv`
(Azaria & Mitchell's statements) and `sentiment/sentence_polarity.{pos,neg}` (Pang & Lee's review sentences). For each of
the two, DIR gets `NAME.npz` to fit on, `NAME_test.npz`, and `NAME_shuffled.npz`: test documents with their words
shuffled, far out of distribution. `true_false_shifted.npz` is `generated.csv`, the covariate-shifted test of its authors.
Each file holds X (h), y, ids, texts and logits (the LM's own for "No" and "Yes"). A file that exists is left alone, so an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdmlm.language_model.reading import embed_sequences

Rows = list[tuple[str, int, str]]  # text, label, id

QUESTIONS = {
    "true_false": ("You check facts.", "Is this statement true? Answer Yes or No."),
    "sentiment": ("You read film reviews.", "Is this review positive? Answer Yes or No."),
}


def read_statements(path: Path) -> Rows:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [(r["statement"], int(r["label"]), f"{path.stem}:{i}") for i, r in enumerate(csv.DictReader(file))]


def read_reviews(path: Path, label: int) -> Rows:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(line.strip(), label, f"{path.suffix[1:]}:{i}") for i, line in enumerate(lines) if line.strip()]


def shuffled(rows: Rows, rng: random.Random) -> Rows:
    out = []
    for text, label, name in rows:
        words = text.split()
        rng.shuffle(words)
        out.append((" ".join(words), label, f"{name}:shuffled"))
    return out


def splits(data: Path, fit: int, test: int, seed: int) -> dict[str, tuple[str, Rows]]:
    """file stem -> (task, rows). Duplicated texts are dropped, so that no test document was fitted on."""
    topics = sorted(p for p in (data / "true_false").glob("*.csv") if p.stem != "generated")
    pools = {
        "true_false": [row for p in topics for row in read_statements(p)],
        "sentiment": [
            row
            for label, end in enumerate(("neg", "pos"))
            for row in read_reviews(data / "sentiment" / f"sentence_polarity.{end}", label)
        ],
    }
    out: dict[str, tuple[str, Rows]] = {}
    for task, pool in pools.items():
        rng = random.Random(f"{task}{seed}")
        rows = list({text: (text, label, name) for text, label, name in pool}.values())
        rng.shuffle(rows)
        held_out = rows[fit : fit + test]
        out[task] = task, rows[:fit]
        out[f"{task}_test"] = task, held_out
        out[f"{task}_shuffled"] = task, shuffled(held_out[:1000], rng)
        if task == "true_false":
            seen = {text for text, _, _ in rows[:fit]}
            shifted = read_statements(data / "true_false" / "generated.csv")
            out["true_false_shifted"] = task, [row for row in shifted if row[0] not in seen]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--fit", type=int, default=6000, help="documents to fit on, per data set")
    parser.add_argument("--test", type=int, default=2000, help="test documents, per data set")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    answers = [tokenizer.encode(word, add_special_tokens=False)[0] for word in ("No", "Yes")]
    width = model.get_output_embeddings().weight.shape[1]

    for stem, (task, rows) in splits(args.data, args.fit, args.test, args.seed).items():
        target = args.output / f"{stem}.npz"
        if target.exists():
            print(f"{target}: already there")
            continue
        system, question = QUESTIONS[task]
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "system", "content": system}, {"role": "user", "content": f"{question}\n\n{text}"}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for text, _, _ in rows
        ]
        h = embed_sequences(model, tokenizer(prompts, add_special_tokens=False).input_ids)
        with torch.inference_mode():  # the first half of h is the last state: the LM's own answer needs no second pass
            logits = h[:, :width] @ model.get_output_embeddings().weight[answers].T
        partial = target.with_suffix(".partial.npz")
        np.savez(
            partial,
            X=h.numpy(),
            y=np.array([label for _, label, _ in rows]),
            ids=np.array([name for _, _, name in rows]),
            texts=np.array([text for text, _, _ in rows]),
            logits=logits.numpy(),
        )
        os.replace(partial, target)
        print(f"{target}: {len(rows)} documents, {h.shape[1]} wide")


if __name__ == "__main__":
    main()
