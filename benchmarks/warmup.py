"""Teach a small pretrained LM to copy, in any order it is told, before it is fine-tuned on word ordering.

    python benchmarks/warmup.py models/stories15m --sentences tinystories.txt --exclude data/stories15m --output models/stories15m-copy

The exercises are those of `sdmlm.tasks.warmup`; only the answer counts in the loss. Sentences of the rows in `--exclude` (the .jsonl files of
`sdmlm data word-ordering`) are left out. An interrupted run goes on from its checkpoint. At the end it says, for each kind of
exercise, how many of 50 new ones the model answers exactly; the figures are in warmup.json beside the model.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sdmlm.finetuning.loss import output_head, sdm_loss_from_hidden
from sdmlm.language_model.decoding import generate
from sdmlm.language_model.encoding import IGNORED, Encoder
from sdmlm.language_model.loading import load_lm, load_tokenizer
from sdmlm.storage.artifacts import read_artifact, write_artifact
from sdmlm.storage.progress import progress_bar
from sdmlm.tasks import warmup
from sdmlm.tasks.word_ordering import CLOSE, OPEN

KIND, VERSION = "sdmlm warm-up checkpoint", 1
POOL = 8  # steps whose examples are drawn together and batched by length


def documents(encoder: Encoder, sentences: Sequence[str], seed: int, pool: int, count: int, easy: bool) -> list[Any]:
    """(ids, how many of them are the prompt's) of fresh exercises; all chance comes from the seed and the pool's number."""
    rng = random.Random(f"sdmlm warm-up {seed} {pool}")
    made: list[tuple[list[int], int]] = []
    while len(made) < count:
        row = warmup.example(rng, sentences, in_order=0.8 if easy else 0.35)
        prompt = encoder.prompt_ids(row["prompt"])
        ids = [*prompt, *encoder.continuation(row["completion"]), *encoder.closing_ids]
        if len(ids) <= (encoder.max_length or len(ids)):
            made.append((ids, len(prompt)))
    return sorted(made, key=lambda document: len(document[0]))


def answer_tokens(encoder: Encoder, sentences: Sequence[str]) -> torch.Tensor:
    """The token ids that occur in answers, ascending: the output embedding is applied to these only, a quarter of all."""
    rng = random.Random(0)
    texts = [*sentences, *(warmup.example(rng, sentences)["completion"] for _ in range(5000))]
    return torch.tensor(sorted({*encoder.closing_ids, *(i for text in texts for i in encoder.continuation(text))}))


def step_loss(model: Any, batch: Sequence[tuple[list[int], int]], pad: int, used: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the answers of a batch, among the tokens `used`."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in batch])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in batch])
    labels = ids.masked_fill(mask == 0, IGNORED)
    for row, (_, start) in zip(labels, batch, strict=True):
        row[:start] = IGNORED
    known = torch.searchsorted(used, labels.clamp(min=0)).clamp(max=len(used) - 1)
    labels = torch.where((labels != IGNORED) & (used[known] == labels), known, IGNORED)
    states = model.get_decoder()(input_ids=ids, attention_mask=mask).last_hidden_state
    head, transform = model.get_output_embeddings(), model.sdmlm_transform
    weight = torch.nn.functional.embedding(used, head.weight)  # its gradient is faster than that of indexing
    return sdm_loss_from_hidden(states, weight, labels, torch.full((len(batch),), math.e), transform=transform)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that goes on from it."""
    return {name: getattr(args, name) for name in ("steps", "batch", "learning_rate", "seed", "max_words", "easy")}


def train(model: Any, encoder: Encoder, sentences: Sequence[str], args: argparse.Namespace) -> list[float]:
    """The losses by step; the model has learnt when it returns."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01, fused=True)
    folder = args.output / "checkpoint"
    losses = _resume(folder, settings(args), model, optimizer)
    pool: list[Any] = []
    used = answer_tokens(encoder, sentences)
    with progress_bar(True) as bar:
        task = bar.add_task("Warm-up", total=args.steps, completed=len(losses))
        start = time.perf_counter()
        while (step := len(losses)) < args.steps:
            if step % POOL == 0 or not pool:
                number, easy = step // POOL, step < args.easy * args.steps
                made = documents(encoder, sentences, args.seed, number, POOL * args.batch, easy)
                pool = [made[i : i + args.batch] for i in range(0, len(made), args.batch)]
                random.Random(f"{args.seed} {number}").shuffle(pool)
            warm = min(1.0, (step + 1) / 100)
            rate = args.learning_rate * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * step / args.steps)) / 2)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = step_loss(model, pool[step % POOL], encoder.pad_id, used)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(round(loss.item(), 4))
            bar.update(task, advance=1)
            if len(losses) % 200 == 0:
                mean = sum(losses[-200:]) / 200
                print(f"step {len(losses)}: loss {mean:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
                _checkpoint(folder, settings(args), model, optimizer, losses)
    return losses


def _checkpoint(folder: Path, made: dict[str, Any], model: Any, optimizer: Any, losses: list[float]) -> None:
    tensors = {f"weight/{name}": p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        tensors |= {f"{part}/{name}": optimizer.state[p][part] for part in ("exp_avg", "exp_avg_sq")}
    write_artifact(folder, KIND, VERSION, {"settings": made}, tensors, {"losses": losses})


def _resume(folder: Path, made: dict[str, Any], model: Any, optimizer: Any) -> list[float]:
    if not folder.exists():
        return []
    config, tensors, texts = read_artifact(folder, KIND, VERSION)
    if config["settings"] != made:
        raise SystemExit(f"{folder} was written with other settings: remove it or name another output folder.")
    for name, p in model.named_parameters():
        p.data.copy_(tensors[f"weight/{name}"])
        state = {part: tensors[f"{part}/{name}"] for part in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = state | {"step": torch.tensor(float(len(texts["losses"])))}
    return list(texts["losses"])


def share_right(model: Any, encoder: Encoder, sentences: Sequence[str]) -> dict[str, float]:
    """By kind of exercise: the share of 50 new ones, over sentences that were held out, that is answered exactly."""
    shares = {}
    for make in (*warmup.IN_ORDER, *warmup.REORDERED):
        rng = random.Random(f"sdmlm warm-up test {make.__name__}")
        asked = [make(rng, sentences) for _ in range(50)]
        answers = generate(model, encoder, [prompt for prompt, _ in asked], 80, progress=False)
        texts = [encoder.decode(encoder.turn(ids)) for ids in answers]
        right = [text == f"{OPEN}{answer}{CLOSE}" for text, (_, answer) in zip(texts, asked, strict=True)]
        shares[make.__name__] = sum(right) / len(right)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sentences", type=Path, required=True)
    parser.add_argument("--exclude", type=Path, required=True, help="folder with rows whose sentences are not used")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--max-words", type=int, default=40, help="the longest sentence used")
    parser.add_argument(
        "--easy", type=float, default=0.2, help="share of the steps to begin with, mostly in the given order"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = load_tokenizer(args.model)
    model = load_lm(args.model, torch.float32, trainable=True)
    model.sdmlm_transform = output_head(model)[1]
    encoder = Encoder(tokenizer, max_length=250)
    known = {
        json.loads(line)["sentence"]
        for file in sorted(args.exclude.glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    }
    lines = [" ".join(line.split()) for line in args.sentences.read_text(encoding="utf-8").splitlines()]
    usable = [line for line in dict.fromkeys(lines) if line not in known and 5 <= len(line.split()) <= args.max_words]
    random.Random(args.seed).shuffle(usable)
    held_out, sentences = usable[:500], usable[500:]
    model.train()
    losses = train(model, encoder, sentences, args)
    model.eval()
    shares = share_right(model, encoder, held_out)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    by_step = [[n, round(sum(losses[n - 200 : n]) / 200, 4)] for n in range(200, len(losses) + 1, 200)]
    report = {
        "settings": settings(args),
        "sentences": len(sentences),
        "answered_exactly": shares,
        "loss_by_step": by_step,
    }
    (args.output / "warmup.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(shares, indent=1))


if __name__ == "__main__":
    main()
