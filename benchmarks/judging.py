"""What judging adds to generation: SDMLanguageModel.generate against the same generation without verdicts.

    python benchmarks/judging.py --model MODEL --sentences FILE

MODEL: a Hugging Face folder (docs/results.md uses stories15m). FILE: one sentence a line. The rows are those of
benchmarks/training.py. Two models are measured at batch 32: MODEL as it is, which writes no tag, so that each answer gets one
appended, and MODEL after some steps of fine-tuning, which writes its tag. Both contenders write the same tokens; they take
turns, and the ratio is that of the medians. For comparison: a second pass over the documents, which is what judging would
cost without the states of the generation. Writes benchmarks/results/judging.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training import BATCH, word_ordering
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdmlm import SDMConfig, SDMLanguageModel, SDMTrainer
from sdmlm.negatives import generate
from sdmlm.summary import embed_sequences

NEW_TOKENS, REPEATS, CALIBRATION = 64, 7, 400


def sdm_lm(model: str, rows: list[dict[str, str]], steps: int, folder: str) -> SDMLanguageModel:
    """MODEL after so many steps, with an SDM layer of the default width over CALIBRATION rows."""
    args = SDMConfig(
        output_dir=folder,
        max_steps=max(1, steps),
        learning_rate=3e-4 if steps else 0.0,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        loss="ce",
        hard_negatives=False,
        eval_strategy="no",
        save_strategy="no",
        load_best_model_at_end=False,
        max_length=256,
        max_new_tokens=NEW_TOKENS,
        sdm_epochs=20,  # what a verdict costs does not depend on how well the layer is trained
        sdm_learning_rate=1e-3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = SDMTrainer(lm, args, rows[CALIBRATION:], rows[:CALIBRATION], tokenizer)
    trainer.train()
    trainer.save_model(f"{folder}/model")
    return SDMLanguageModel.from_pretrained(f"{folder}/model", device="cpu")


def seconds(job: Callable[[], Any]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def measure(lm: SDMLanguageModel, prompts: list[str]) -> dict[str, Any]:
    lm.tokens_per_batch = 10**9  # one batch

    def plain() -> list[list[int]]:
        return generate(lm.model, lm.encoder, prompts, NEW_TOKENS, tokens_per_batch=10**9, progress=False)

    def judged() -> Any:
        return lm.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False)

    found, ids = judged(), plain()
    assert [v.completion_tokens for v in found] == [len(i) for i in ids], "both must write the same tokens"
    documents = [lm.encoder.encode_for_judging(p, v.text) for p, v in zip(prompts, found, strict=True)]
    answers = lm.write(prompts, lm.check_prompts(prompts), lm.sampling(NEW_TOKENS), [[n] for n in range(len(prompts))])
    times: dict[str, list[float]] = {"plain": [], "judged": [], "second pass": []}
    for _ in range(REPEATS):
        times["plain"].append(seconds(plain))
        times["judged"].append(seconds(judged))
        times["second pass"].append(
            seconds(lambda: embed_sequences(lm.model, documents, tokens_per_batch=8192, progress=False))
        )
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        **middle,
        "added": middle["judged"] / middle["plain"] - 1,
        "a second pass would add": middle["second pass"] / middle["plain"],
        "answers with a tag": sum(lm.tags.open in str(v.generated) for v in found),
        "answers read while generating": sum(answer.h is not None for answer in answers),
        "mean tokens of an answer": statistics.mean(len(i) for i in ids),
        "mean tokens of a prompt": statistics.mean(v.prompt_tokens for v in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sentences", required=True)
    parser.add_argument("--steps", type=int, default=60, help="steps of fine-tuning")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = word_ordering(args.sentences, CALIBRATION + BATCH * (args.steps + 1))
    prompts = [row["prompt"] for row in rows[-BATCH:]]  # trained on by neither
    results = {}
    for name, steps in (("as it is", 0), (f"after {args.steps} steps", args.steps)):
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(sdm_lm(args.model, rows[:-BATCH], steps, folder), prompts)

    from rich.console import Console
    from rich.table import Table

    table = Table("what", *results, title=f"Judging, {Path(args.model).name}, batch {BATCH}")
    for key in next(iter(results.values())):
        table.add_row(key, *(f"{row[key]:.3f}" for row in results.values()))
    Console().print(table)
    out = Path(__file__).parent / "results" / "judging.json"
    out.parent.mkdir(exist_ok=True)
    facts = {"threads": torch.get_num_threads(), "torch": torch.__version__, "batch": BATCH, "new_tokens": NEW_TOKENS}
    out.write_text(json.dumps({"machine": facts, "results": results}, indent=2) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
