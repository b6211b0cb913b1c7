"""What judging adds to generation: SDMLanguageModel.generate against the same generation without verdicts.

    python benchmarks/judging.py --models MODEL... --sentences FILE

MODEL: a Hugging Face folder (docs/results.md uses stories15m). FILE: one sentence a line; the prompts are the paper's word
ordering. A folder with an SDM layer is measured as it is. Any other gets one over a few rows first: a model that was never
fine-tuned writes no tag, so each of its answers gets one appended. Both contenders write the same tokens, at batch 32; they
take turns, plain first and judged first by turns. What judging adds is measured twice: as the median over the rounds of their
ratio, which carries the noise of the machine, and inside the judged call, as the time in judging (`GenerationReader`, `judge`,
and passes of the LM beyond those of plain generation) over the rest of the same call. For comparison: a second pass over the documents, which is what judging would cost without the states of the
generation. Writes benchmarks/results/judging.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from training import BATCH, word_ordering
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdmlm import SDMConfig, SDMLanguageModel
from sdmlm.finetuning.final_layer import fit_final_layer, save_final_layer
from sdmlm.language_model.decoding import generate
from sdmlm.language_model.encoding import Encoder
from sdmlm.language_model.likelihood import LikelihoodReader
from sdmlm.language_model.reading import embed_sequences
from sdmlm.language_model.summary import GenerationReader
from sdmlm.rewards import exact_match
from sdmlm.storage.artifacts import SDM_FOLDER

NEW_TOKENS, ROUNDS, CALIBRATION = 64, 12, 200


def sdm_lm(model: str, rows: list[dict[str, str]], folder: str) -> SDMLanguageModel:
    """MODEL with its SDM layer, or with one of the default width over these rows."""
    if not (Path(model) / SDM_FOLDER).is_dir():
        args = SDMConfig(
            output_dir=folder,
            max_new_tokens=NEW_TOKENS,
            documents="paper",
            sdm_epochs=20,  # what a verdict costs does not depend on how well the layer is trained
            sdm_learning_rate=1e-3,
            report_to="none",
            use_cpu=True,
        )
        lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        encoder = Encoder(AutoTokenizer.from_pretrained(model), max_length=256)
        estimator = fit_final_layer(lm, encoder, rows, args).estimator
        lm.save_pretrained(folder)
        encoder.tokenizer.save_pretrained(folder)
        save_final_layer(
            Path(folder) / SDM_FOLDER, estimator, lm.state_dict(), encoder, args, exact_match, fine_tuned=False
        )
        model = folder
    return SDMLanguageModel.from_pretrained(model, device="cpu")


def seconds(job: Callable[[], Any]) -> tuple[float, float]:
    """By the clock, and of the CPU."""
    start, start_cpu = time.perf_counter(), time.process_time()
    job()
    return time.perf_counter() - start, time.process_time() - start_cpu


def share_of_judging(lm: SDMLanguageModel, plain: Callable[[], Any], judged: Callable[[], Any]) -> float:
    """Time in judging over the rest of a judged call."""
    passes: list[float] = []
    spent = [0.0]

    def timed(function: Callable[..., Any], note: Callable[[float], None]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                note(time.perf_counter() - start)

        return run

    def add(seconds: float) -> None:
        spent[0] += seconds

    with ExitStack() as stack:
        stack.enter_context(patch.object(lm.model, "forward", timed(lm.model.forward, passes.append)))
        plain()
        needed = len(passes)
        passes.clear()
        reader = LikelihoodReader if lm.reads_likelihood else GenerationReader
        for name in ("begin", "step", "keep", "rest", "finish", "end"):
            stack.enter_context(patch.object(reader, name, timed(getattr(reader, name), add)))
        stack.enter_context(patch.object(lm, "judge", timed(lm.judge, add)))
        whole, _ = seconds(judged)
    judging = spent[0] + sum(passes[needed:])
    return judging / (whole - judging)


def measure(lm: SDMLanguageModel, prompts: list[str]) -> dict[str, Any]:
    lm.tokens_per_batch = 10**9  # one batch

    def plain() -> list[list[int]]:
        return generate(lm.model, lm.encoder, prompts, NEW_TOKENS, tokens_per_batch=10**9, progress=False)

    def judged() -> Any:
        return lm.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False)

    found, ids = judged(), plain()
    assert [v.completion_tokens for v in found] == [len(i) for i in ids], "both must write the same tokens"
    documents = [lm.encoder.encode_for_judging(p, v.text) for p, v in zip(prompts, found, strict=True)]
    answers = lm.write(lm.read_prompts(prompts), lm.sampling(NEW_TOKENS), [[n] for n in range(len(prompts))])

    def second_pass() -> Any:
        return embed_sequences(lm.model, documents, tokens_per_batch=8192, progress=False)

    shares = [share_of_judging(lm, plain, judged) for _ in range(ROUNDS)]
    jobs: dict[str, Callable[[], Any]] = {"plain": plain, "judged": judged, "second pass": second_pass}
    rounds = []
    for n in range(ROUNDS):
        names = list(jobs) if n % 2 else list(jobs)[::-1]
        rounds.append({name: seconds(jobs[name]) for name in names})
    added, added_cpu, again = (
        statistics.quantiles([one[what][which] / one["plain"][which] for one in rounds], n=4)
        for what, which in (("judged", 0), ("judged", 1), ("second pass", 0))
    )
    return {
        **{name: statistics.median(one[name][0] for one in rounds) for name in jobs},
        "added, inside the call": statistics.median(shares),
        "added": added[1] - 1,
        "added, lower quartile": added[0] - 1,
        "added, upper quartile": added[2] - 1,
        "added, of CPU seconds": added_cpu[1] - 1,
        "a second pass would add": again[1],
        "answers with a tag": sum(lm.tags.open in str(v.generated) for v in found),
        "answers read while generating": sum(answer.h is not None for answer in answers),
        "mean tokens of an answer": statistics.mean(len(i) for i in ids),
        "mean tokens of a prompt": statistics.mean(v.prompt_tokens for v in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, nargs="+")
    parser.add_argument("--sentences", required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = word_ordering(args.sentences, CALIBRATION + BATCH)
    prompts = [row["prompt"] for row in rows[-BATCH:]]
    results = {}
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            results[Path(model).name] = measure(sdm_lm(model, rows[:-BATCH], folder), prompts)

    from rich.console import Console
    from rich.table import Table

    table = Table("what", *results, title=f"Judging, batch {BATCH}")
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
