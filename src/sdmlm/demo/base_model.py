"""The small base LM of the demo, trained from scratch on text of our grammar (`make base-model`).

    python -m sdmlm.demo.base_model --output DIR

It learns English of `sdmlm.demo.sentences`, to copy sharply, and to follow a few generic instructions: repeat a sentence or
a list of random words, go on with a sentence, put given words behind a beginning, in the order in which they are given. It
never sees words that must be re-ordered: that is what fine-tuning teaches. Its sentences come from another space of seeds
than those of the demo.

All chance comes from (seed, step), so the same seed and steps give the same data; a run that was cut off goes on from its
last checkpoint. `training.json` beside the model holds the settings, the machine and the loss by step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sdmlm.artifacts import read_artifact, write_artifact, write_text_atomically
from sdmlm.demo import sentences as grammar
from sdmlm.demo.sentences import LEXICON, sentence
from sdmlm.progress import progress_bar

FOLDER = Path(__file__).parent / "base"  # the model that is shipped
LOG = "training.json"
CHECKPOINT = "checkpoint"
KIND, VERSION = "sdmlm base model checkpoint", 1
PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WORDS = tuple(sorted(LEXICON))
IN_XML = "Only reply with the sentence in the XML <sentence> </sentence>."
# Wording of instructions to come, so that the tokenizer spells it in few tokens. The model is not trained on it.
WORDING = (
    "by reordering all of the following without adding new punctuation nor words: followed by <verified>Yes</verified> if your "
    "answer correctly addressed the instructions, and <verified>No</verified> if it did not.\n</sentence>\n<verified>"
)


@dataclass(frozen=True)
class Settings:
    """All that decides the weights, apart from the generator and the versions of the libraries."""

    seed: int = 0
    steps: int = 3000
    first_steps: int = 1000  # with short rows, mostly copying
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


@dataclass(frozen=True)
class Document:
    """A plain text, or an instruction with its answer. The loss counts a prompt only where it can be foreseen."""

    answer: str
    prompt: str | None = None
    count_prompt: bool = True


# What the model reads


def plain(rng: random.Random) -> Document:
    return Document(sentence(rng))


def repeat_sentence(rng: random.Random) -> Document:
    text = sentence(rng)
    return rng.choice(
        (
            Document(text, f"Repeat the sentence '{text}'."),
            Document(f"<sentence>{text}</sentence>", f"Repeat the sentence '{text}'. {IN_XML}"),
            Document(f"<sentence>{text}</sentence>", f"Write down '{text}' again. {IN_XML}"),
        )
    )


def repeat_words(rng: random.Random) -> Document:
    """Random words leave nothing to guess: they teach sharp copying, the sooner the more often they are repeated."""
    words = " ".join(random_words(rng, rng.choice((1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 15))))
    times = rng.randint(1, 4) if len(words) < 60 else 1
    answer = " ".join([words] * times)
    if times > 1:
        return Document(answer, f"Repeat the words '{words}' {grammar.NUMBERS[times - 2]} times.", False)
    if rng.random() < 0.5:
        return Document(answer, f"Repeat the words '{words}'.", False)
    return Document(f"<sentence>{answer}</sentence>", f"Repeat the words '{words}'. {IN_XML}", False)


def complete_sentence(rng: random.Random) -> Document:
    """The words that are missing are given, in their order."""
    return complete(sentence(rng).split(), rng, True)


def complete_words(rng: random.Random) -> Document:
    return complete(random_words(rng, rng.randint(5, 20)), rng, False)


def complete(words: list[str], rng: random.Random, count_prompt: bool) -> Document:
    cut = len(words) - rng.randint(1, min(6, len(words) - 1))
    start, end, text = " ".join(words[:cut]), " ".join(words[cut:]), " ".join(words)
    return Document(
        f"<sentence>{text}</sentence>",
        rng.choice(
            (
                f"Complete the sentence '{start}' with the following words: '{end}'. {IN_XML}",
                f"Complete the sentence '{start}' with all of the words '{end}'. {IN_XML}",
                f"Write '{start}' and then '{end}'. {IN_XML}",
            )
        ),
        count_prompt,
    )


def continue_sentence(rng: random.Random) -> Document:
    words = sentence(rng).split()
    cut = rng.randint(2, len(words) - 1)
    return Document(" ".join(words[cut:]), f"Continue the sentence '{' '.join(words[:cut])}'.")


def random_words(rng: random.Random, n: int) -> list[str]:
    """Words in no order, sometimes as the ends of sentences have them."""
    return [word + rng.choice(("", "", "", "", "", ",", ".")) for word in rng.choices(WORDS, k=n)]


MIX = {plain: 6, repeat_sentence: 2, repeat_words: 4, complete_sentence: 5, complete_words: 3, continue_sentence: 1}
# At first mostly random words: copying must be found once, and the denser the signal, the sooner it is.
FIRST_MIX = {plain: 3, repeat_words: 8, complete_sentence: 1, complete_words: 1}


def document(rng: random.Random, first: bool = False) -> Document:
    mix = FIRST_MIX if first else MIX
    (make,) = rng.choices(list(mix), list(mix.values()))
    return make(rng)


def _rng(settings: Settings, what: object) -> random.Random:
    return random.Random(f"sdmlm.demo.base_model {settings.seed} {what}")


# Tokenizer


def train_tokenizer(settings: Settings) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a chat template; the marks of a turn are single tokens."""
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


def pieces(d: Document) -> Iterator[tuple[str, bool]]:
    """The text of a document as (piece, counts in the loss)."""
    if d.prompt is not None:
        yield f"{USER}{d.prompt}{END}{ASSISTANT}", d.count_prompt
    yield f"{d.answer}{END}", True


def batch_of(tokenizer: Any, settings: Settings, step: int) -> tuple[Tensor, Tensor]:
    """(ids, labels) of a step: fresh documents, one behind the other, cut into rows of a fixed length."""
    first = step < settings.first_steps
    rng, shape = _rng(settings, step), (settings.batch, settings.first_length if first else settings.length)
    room = shape[0] * shape[1]
    ids: list[int] = []
    labels: list[int] = []
    while len(ids) < room:
        for text, counts in pieces(document(rng, first)):
            found = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += found
            labels += found if counts else [-100] * len(found)
    return torch.tensor(ids[:room]).view(shape), torch.tensor(labels[:room]).view(shape)


def new_model(settings: Settings, tokenizer: Any) -> LlamaForCausalLM:
    """A model with fresh weights, in which every attention head starts out looking for what resembles the present token
    (K = Q) and passing on what it finds (O = V transposed). From there copying is learnt in some hundred steps; from
    independent weights it had not begun after 2 million tokens."""
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
    """Linear warm-up, then a cosine down to a twentieth. Steps count from 0."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


def train(output: Path, settings: Settings, save_every: int = 250, progress: bool = True) -> None:
    """Train the model into the folder `output`, going on from the checkpoint that may be there."""
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
            ids, labels = batch_of(tokenizer, settings, len(losses))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, len(losses))
            loss = model(input_ids=ids, labels=labels).loss
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
    """Losses and seconds of the steps that the checkpoint has behind it; none where there is no checkpoint."""
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
    """A hash over the source of the grammar and of this file."""
    files = (grammar.__file__, __file__)
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in files)).hexdigest()


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
