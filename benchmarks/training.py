"""Fine-tuning speed and memory, as ratios in one run: our "sdm" against our "ce" and against TRL's SFTTrainer.

    python benchmarks/training.py --model MODEL --sentences FILE

MODEL: a Hugging Face folder (docs/results.md uses stories15m). FILE: one sentence a line. The rows are the paper's word
ordering; every contender runs in a process of its own, on the same model and the same documents, batch 32. A step is the
time from one optimiser step to the next; memory is the peak of the process. Generation is compared with one prompt at a
time without a cache. Writes benchmarks/results/training.json.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from sdmlm.tasks.word_ordering import make_row

BATCH, STEPS = 32, 9


def word_ordering(path: str, n: int) -> list[dict[str, str]]:
    """n rows of the paper's task, from the first sentences of 6 to 20 words."""
    rows: list[dict[str, str]] = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if 6 <= len(line.split()) <= 20 and (row := make_row(line)) is not None:
            rows.append(row)
        if len(rows) == n:
            return rows
    raise SystemExit(f"{path} has only {len(rows)} usable sentences, {n} are needed.")


class Clock(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def step(self) -> float:
        return float(np.median(np.diff(self.ends)[2:]))


def ours(model: str, rows: list[dict[str, str]], loss: str) -> dict[str, float]:
    from sdmlm import SDMConfig, SDMTrainer

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = SDMConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=1,
            loss=loss,
            hard_negatives=False,
            eval_strategy="no",
            save_strategy="no",
            load_best_model_at_end=False,
            sdm_epochs=3,  # the step's cost does not depend on how well the layer is trained
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = SDMTrainer(model, args, rows, rows[:64], callbacks=[clock])
        trainer.fit_final_layer = lambda: None  # type: ignore[method-assign,assignment,return-value]
        trainer.train()
    return {"step": clock.step()}


def trl(model: str, rows: list[dict[str, str]]) -> dict[str, float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    # The same documents: half positive, half negative, verdict included.
    data = Dataset.from_list(
        [
            {
                "prompt": r["prompt"],
                "completion": f"{r['rejected' if i % 2 else 'chosen']}\n<verified>{'No' if i % 2 else 'Yes'}</verified>",
            }
            for i, r in enumerate(rows)
        ]
    )
    clock = Clock()
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=5e-5,
            gradient_checkpointing=False,
            bf16=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        SFTTrainer(lm, args=args, train_dataset=data, processing_class=tokenizer, callbacks=[clock]).train()
    return {"step": clock.step()}


def generation(model: str, rows: list[dict[str, str]]) -> dict[str, float]:
    from sdmlm.language_model.decoding import generate
    from sdmlm.language_model.encoding import Encoder

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    encoder = Encoder(AutoTokenizer.from_pretrained(model), max_length=256)
    prompts, new = [r["prompt"] for r in rows[:64]], 40
    generate(lm, encoder, prompts[:8], new, progress=False)
    start = time.perf_counter()
    batched = generate(lm, encoder, prompts, new, progress=False)
    ours_each = (time.perf_counter() - start) / len(prompts)
    start, few = time.perf_counter(), 4
    with torch.no_grad():
        for n, prompt in enumerate(prompts[:few]):
            ids = encoder.encode_prompt(prompt)
            out: list[int] = []
            while len(out) < new and not (out and encoder.ends(out)):
                logits = lm(torch.tensor([ids + out]), use_cache=False).logits
                out.append(int(logits[0, -1].argmax()))
            assert out == batched[n], "batched generation differs from one at a time"
    return {"each": ours_each, "one_at_a_time": (time.perf_counter() - start) / few}


def epoch_share(model: str, rows: list[dict[str, str]]) -> dict[str, float]:
    """One whole SDM epoch with its SDM layers and evaluations: what is not the LM's own forward and backward."""
    from sdmlm import SDMConfig, SDMTrainer

    with tempfile.TemporaryDirectory() as folder:
        args = SDMConfig(
            output_dir=folder,
            loss="sdm",
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=1,
            logging_steps=1,
            save_strategy="no",
            load_best_model_at_end=False,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = SDMTrainer(model, args, rows, rows[: len(rows) // 2])
        trainer.fit_final_layer = lambda: None  # type: ignore[method-assign,assignment,return-value]
        start = time.perf_counter()
        trainer.train()
        wall = time.perf_counter() - start
    spent = {
        k: sum(log.get(k, 0.0) for log in trainer.state.log_history)
        for k in ("time/sdm_layer", "time/sdm_score", "time/generation")
    }
    spent = {k: v + sum(trainer._metrics.get(k, [])) for k, v in spent.items()}
    outside = spent["time/sdm_layer"] + spent["time/sdm_score"]
    return {"wall": wall, "outside": outside, "share": outside / (wall - spent["time/generation"])}


CONTENDERS = {
    "sdm": lambda m, r: ours(m, r, "sdm"),
    "ce": lambda m, r: ours(m, r, "ce"),
    "trl": trl,
    "generation": generation,
    "epoch": epoch_share,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sentences", required=True)
    parser.add_argument("--only", choices=CONTENDERS)
    parser.add_argument("--epoch-rows", type=int, default=800, help="rows of the whole epoch")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.only:
        n = args.epoch_rows if args.only == "epoch" else BATCH * STEPS
        result = CONTENDERS[args.only](args.model, word_ordering(args.sentences, n))
        result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    results = {}
    for name in CONTENDERS:
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        results[name] = json.loads(done.stdout.splitlines()[-1])
    ratios = {
        "step, sdm / ce": results["sdm"]["step"] / results["ce"]["step"],
        "step, sdm / TRL SFTTrainer": results["sdm"]["step"] / results["trl"]["step"],
        "peak memory, sdm / TRL SFTTrainer": results["sdm"]["peak_mb"] / results["trl"]["peak_mb"],
        "generation, one at a time without cache / ours": results["generation"]["one_at_a_time"]
        / results["generation"]["each"],
        "share of an SDM epoch in SDM layers, q and d (settings of the paper, generation apart)": results["epoch"][
            "share"
        ],
    }
    table = Table("what", "ratio", title=f"Fine-tuning, {Path(args.model).name}, batch {BATCH}")
    for name, value in ratios.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table)
    assert all(math.isfinite(v) for v in ratios.values())
    out = Path(__file__).parent / "results" / "training.json"
    out.parent.mkdir(exist_ok=True)
    facts = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "batch": BATCH,
        "epoch_rows": args.epoch_rows,
    }
    out.write_text(json.dumps({"machine": facts, "ratios": ratios, "results": results}, indent=2) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
