"""The small base LM of the demo, trained from scratch on text of our grammar (`make base-model`).

    python -m sdmlm.demo.base_model --output DIR

Its documents are those of `sdmlm.demo.base_documents`. Its sentences come from other seeds than the demo's.

Random numbers depend only on (seed, step), so the same seed and steps give the same data; an interrupted run continues from
its last checkpoint. `training.json` beside the model holds the settings, the machine and the loss by step.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import platform
import random
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sdmlm.demo import base_documents
from sdmlm.demo import sentences as grammar
from sdmlm.demo.base_documents import FIRST_MIX, MIX, WORDS, YES_OR_NO, BaseDocument, document
from sdmlm.storage.artifacts import read_artifact, write_artifact, write_text_atomically
from sdmlm.storage.progress import progress_bar

FOLDER = Path(__file__).parent / "base"  # the model that is shipped
LOG = "training.json"
CHECKPOINT = "checkpoint"
KIND, VERSION = "sdmlm base model checkpoint", 1
PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARK = "*"
VERDICT = 5.0  # weight of a Yes or No in the loss: there is only one in a whole document
# Wording of the instructions of fine-tuning, so that the tokenizer spells it in few tokens. The model is not trained on it.
WORDING = (
    "by reordering all of the following without adding new punctuation nor words: followed by <verified>Yes</verified> if your "
    "answer correctly addressed the instructions, and <verified>No</verified> if it did not.\n</sentence>\n<verified>"
)


@dataclass(frozen=True)
class Settings:
    """All settings that influence the weights, apart from the documents and the versions of the libraries."""

    seed: int = 0
    steps: int = 14000
    first_steps: int = 1200  # with short rows, mostly copying
    first_length: int = 128
    batch: int = 8
    length: int = 256
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup: int = 100
    vocabulary: int = 2048
    width: int = 128
    layers: int = 4
    heads: int = 4
    inner: int = 352
    positions: int = 512


def _rng(settings: Settings, what: object) -> random.Random:
    return random.Random(f"sdmlm.demo.base_model {settings.seed} {what}")


# Tokenizer


def train_tokenizer(settings: Settings) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a chat template; the markers of a turn are single tokens."""
    rng = _rng(settings, "tokenizer")
    texts = [text for _ in range(5000) for d in [document(rng)] for text in (d.prompt, d.answer) if text]
    texts += 100 * [3 * WORDING, *WORDS, " ".join(WORDS)]  # few tokens for each, with and without a space before it
    bpe = Tokenizer(models.BPE())
    words = Regex(r" ?</?\p{L}+>| ?\p{L}+('s)?| ?'| ?[^\s\p{L}'<]+|.|\s")  # tags and possessives stay whole
    split = pre_tokenizers.Split(words, behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=settings.positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# Training


def pieces(d: BaseDocument) -> Iterator[tuple[str, float]]:
    """The text of a document as (piece, its weight in the loss)."""
    if d.prompt is not None:
        yield f"{USER}{d.prompt}{END}{ASSISTANT}", float(d.count_prompt)
    done = 0
    words = d.answer.split(" ")
    for at in sorted(d.wrong):  # each word brings the space before it along
        yield "".join(" " * (i > 0) + words[i] for i in range(done, at)), 1.0
        yield " " * (at > 0) + words[at], 0.0
        yield MARK, 1.0
        done = at + 1
    rest = "".join(" " * (i > 0) + words[i] for i in range(done, len(words)))
    verdict = d.answer in ("Yes", "No")
    yield f"{rest}{END}", VERDICT if verdict else float(d.right is not False)
    if d.right is not None:
        yield f"{USER}Was this right? {YES_OR_NO}{END}{ASSISTANT}", 0.0
        yield f"{'Yes' if d.right else 'No'}{END}", VERDICT


def batch_of(tokenizer: Any, settings: Settings, step: int) -> tuple[Tensor, Tensor]:
    """(ids, weights in the loss) of a step: new documents, joined and cut into rows of a fixed length."""
    first = step < settings.first_steps
    rng, shape = _rng(settings, step), (settings.batch, settings.first_length if first else settings.length)
    room = shape[0] * shape[1]
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) < room:
        for text, weight in pieces(document(rng, first)):
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += tokens
            weights += [weight] * len(tokens)
    return torch.tensor(ids[:room]).view(shape), torch.tensor(weights[:room]).view(shape)


def loss_of(model: Any, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of the next-token losses."""
    logits = model(input_ids=ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    counted = weights[:, 1:].flatten()
    return (losses * counted).sum() / counted.sum()


def new_model(settings: Settings, tokenizer: Any) -> LlamaForCausalLM:
    """A model with random weights, in which every attention head initially attends to tokens like the present one (K = Q)
    and copies them (O = V transposed). From this start, copying is learned in some hundred steps; from independent weights
    it had not started after 2 million tokens."""
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.width,
            intermediate_size=settings.inner,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            max_position_embeddings=settings.positions,
            initializer_range=1 / math.sqrt(settings.width),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.k_proj.weight.data.copy_(attention.q_proj.weight.data)
        attention.o_proj.weight.data.copy_(attention.v_proj.weight.data.T)
    return model


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then cosine decay to a twentieth of the peak. Steps count from 0."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


def train(output: Path, settings: Settings, save_every: int = 250, progress: bool = True) -> None:
    """Train the model and save it to the folder `output`; continues from a checkpoint if there is one."""
    source = source_sha256()  # now: the files may change while this runs
    tokenizer = train_tokenizer(settings)
    model = new_model(settings, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=settings.weight_decay, betas=(0.9, 0.98))
    losses, seconds = _resume(output / CHECKPOINT, settings, model, optimizer)
    model.train()
    with progress_bar(progress) as bar:
        task = bar.add_task("Training the base model", total=settings.steps, completed=len(losses))
        while len(losses) < settings.steps:
            start = time.perf_counter()
            ids, weights = batch_of(tokenizer, settings, len(losses))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, len(losses))
            loss = loss_of(model, ids, weights)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(round(loss.item(), 4))
            seconds += time.perf_counter() - start
            bar.update(task, advance=1, description=f"Training the base model (loss {losses[-1]:.3f})")
            if len(losses) % save_every == 0 and len(losses) < settings.steps:
                _checkpoint(output / CHECKPOINT, settings, model, optimizer, losses, seconds)
    _save(output, settings, model, tokenizer, losses, seconds, source)
    shutil.rmtree(output / CHECKPOINT, ignore_errors=True)


def _checkpoint(
    folder: Path, settings: Settings, model: Any, optimizer: Any, losses: list[float], seconds: float
) -> None:
    tensors = {f"weight/{name}": p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        tensors |= {f"{part}/{name}": optimizer.state[p][part] for part in ("exp_avg", "exp_avg_sq")}
    write_artifact(
        folder, KIND, VERSION, {"settings": asdict(settings)}, tensors, {"losses": losses, "seconds": seconds}
    )


def _resume(folder: Path, settings: Settings, model: Any, optimizer: Any) -> tuple[list[float], float]:
    """Restore a checkpoint, if there is one; returns the losses and seconds of its steps."""
    if not folder.exists():
        return [], 0.0
    config, tensors, texts = read_artifact(folder, KIND, VERSION)
    if config["settings"] != asdict(settings):
        raise ValueError(f"{folder} was written with other settings: remove it or name another output folder.")
    losses = list(texts["losses"])
    for name, p in model.named_parameters():
        p.data.copy_(tensors[f"weight/{name}"])
        optimizer.state[p] = {part: tensors[f"{part}/{name}"] for part in ("exp_avg", "exp_avg_sq")} | {
            "step": torch.tensor(float(len(losses)))
        }
    return losses, float(texts["seconds"])


def source_sha256() -> str:
    """A hash of the code of the grammar, the documents and this file.

    Imports, docstrings, comments and the order and place of definitions do not count: the base model stays valid when a
    comment is reworded or a function is moved.
    """
    return _code_sha256(
        Path(file).read_text(encoding="utf-8") for file in (grammar.__file__, base_documents.__file__, __file__)
    )


def _code_sha256(sources: Iterable[str]) -> str:
    definitions: list[str] = []
    for source in sources:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [n for n in body if not _is_inert(n)]  # type: ignore[attr-defined]
        # These functions, and those of the grammar that only the demo uses, do not influence the model.
        own = ("source_sha256", "_code_sha256", "_is_inert", "order_is_open", "settled_sentences")
        definitions += [ast.dump(n) for n in tree.body if getattr(n, "name", "") not in own]
    return hashlib.sha256("\n".join(sorted(definitions)).encode()).hexdigest()


def _is_inert(node: ast.stmt) -> bool:
    """Whether a statement is an import or a docstring."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or isinstance(node, (ast.Import, ast.ImportFrom))


def _save(
    output: Path, settings: Settings, model: Any, tokenizer: Any, losses: list[float], seconds: float, source: str
) -> None:
    """Weights in float16 (half the size; they are loaded as float32), tokenizer, log."""
    model.half().save_pretrained(output)
    tokenizer.save_pretrained(output)
    log = {
        "settings": asdict(settings),
        "parameters": model.num_parameters(),
        "first_mix": {make.__name__: weight for make, weight in FIRST_MIX.items()},
        "mix": {make.__name__: weight for make, weight in MIX.items()},
        "source_sha256": source,
        "seconds": round(seconds, 1),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "loss_by_step": [
            [step, round(sum(losses[step - 50 : step]) / 50, 4)] for step in range(50, len(losses) + 1, 50)
        ],
    }
    write_text_atomically(output / LOG, json.dumps(log, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    defaults = Settings()
    parser = argparse.ArgumentParser(description="Train the base model of the demo from scratch.")
    parser.add_argument(
        "--output", type=Path, default=FOLDER, help="folder of the model (default: where it is shipped)"
    )
    for name in ("seed", "steps", "width", "layers", "inner", "heads", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    args = vars(parser.parse_args(argv))
    output = args.pop("output")
    train(output, Settings(**args))


if __name__ == "__main__":
    main()
