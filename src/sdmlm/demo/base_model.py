"""The small base LM of the demo, trained from scratch on text of our grammar (`make base-model`).

    python -m sdmlm.demo.base_model --output DIR

It learns English of `sdmlm.demo.sentences`, to copy sharply, and to follow a few generic instructions: repeat a sentence or
a list of random words, leave a word out, say which words are missing, go on with a sentence, put given words behind a
beginning in the order in which they are given, say whether a sentence is good and whether an answer was right. It never sees
words that must be re-ordered, nor a sentence whose words have changed places: that is what fine-tuning teaches. Its sentences
come from another space of seeds than the demo's.

All chance comes from (seed, step), so the same seed and steps give the same data; a run that was cut off goes on from its
last checkpoint. `training.json` beside the model holds the settings, the machine and the loss by step.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sdmlm.demo import sentences as grammar
from sdmlm.demo.sentences import LEXICON, sentence
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
WORDS = tuple(sorted(LEXICON))
MARK = "*"
VERDICT = 5.0  # weight of a Yes or No in the loss: there is one in a whole document
YES_OR_NO = "Reply with Yes or No."
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


@dataclass(frozen=True)
class Document:
    """A plain text, or an instruction with its answer. The loss counts a prompt only where it can be foreseen.

    `right`: a second turn asks whether the answer was right, and is told so. The loss does not count a wrong answer.
    `wrong`: these words of the answer are wrong; a mark stands behind each. The loss counts the mark, not the word.
    """

    answer: str
    prompt: str | None = None
    count_prompt: bool = True
    right: bool | None = None
    wrong: frozenset[int] = frozenset()


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


def choose_word(rng: random.Random) -> Document:
    """Which of three words goes on with a sentence? The other two are random ones."""
    words = sentence(rng).split()
    cut = rng.randint(1, len(words) - 1)
    start, choices = " ".join(words[:cut]), [words[cut], *random_words(rng, 2)]
    rng.shuffle(choices)
    return Document(
        f"<sentence>{start} {words[cut]}</sentence>",
        f"Continue the sentence '{start}' with one of the words '{' '.join(choices)}'. {IN_XML}",
    )


def leave_out(rng: random.Random) -> Document:
    """All but one of some words: what has been said, and what is still to be said."""
    words = rng.sample(WORDS, rng.randint(3, 8))
    at = rng.randrange(len(words))
    rest = " ".join(words[:at] + words[at + 1 :])
    return Document(f"<sentence>{rest}</sentence>", f"Write '{' '.join(words)}' without '{words[at]}'. {IN_XML}", False)


def say_missing(rng: random.Random) -> Document:
    """Which of some words have not been said: what is left to say, known from what has been."""
    words = rng.sample(WORDS, rng.randint(2, 12))
    given = words[: rng.randint(2, min(5, len(words)))]
    said = rng.sample(range(len(given)), rng.randint(1, len(given) - 1))
    text = " ".join([*words[len(given) :], *(given[i] for i in said)])
    missing = " ".join(word for i, word in enumerate(given) if i not in said)
    asked = f"Which of the words '{' '.join(given)}' are missing in '{text}'? {IN_XML}"
    return Document(f"<sentence>{missing}</sentence>", asked, False)


def mark_wrong(rng: random.Random) -> Document:
    """A mark behind every wrong word: a judgement at each word, the densest signal there is."""
    words = sentence(rng).split()
    wrong = [False] * len(words)
    for _ in range(rng.choice((0, 1, 1, 2))):
        bad, at = spoilt(words, rng)
        wrong[at : at + (len(bad) == len(words))] = [True]
        words = bad
    return Document(" ".join(words), "Mark the wrong words.", wrong=frozenset(i for i, w in enumerate(wrong) if w))


def judge_sentence(rng: random.Random) -> Document:
    text = sentence(rng)
    good = rng.random() < 0.5
    asked = text if good else " ".join(spoilt(text.split(), rng)[0])
    return Document("Yes" if good else "No", f"Is '{asked}' a good sentence? {YES_OR_NO}", good)


def spoilt(words: list[str], rng: random.Random) -> tuple[list[str], int]:
    """One word replaced, put in or doubled, near the end as often as anywhere, and where. None changes places."""
    at = rng.randrange(max(0, len(words) - 4), len(words)) if rng.random() < 0.5 else rng.randrange(len(words))
    bare, tail = words[at].rstrip(".,"), words[at][len(words[at].rstrip(".,")) :]
    other = rng.choice(WORDS if rng.random() < 0.5 else words).rstrip(".,")
    if rng.random() < 0.6:
        if other == bare:
            other = rng.choice([word for word in WORDS if word != bare])
        return [*words[:at], other + tail, *words[at + 1 :]], at
    return [*words[:at], other, *words[at:]], at


def checked(d: Document, rng: random.Random) -> Document:
    """The same with the question whether the answer was right; in half of the cases it is spoilt first."""
    if rng.random() < 0.5:
        return replace(d, right=True)
    tags = [tag for tag in ("<sentence>", "</sentence>") if tag in d.answer]
    words = d.answer.removeprefix("<sentence>").removesuffix("</sentence>").split()
    if len(words) > 1 and rng.random() < 0.4:  # only here, where the prompt tells what is not there
        near_end = rng.randrange(max(0, len(words) - 4), len(words))
        del words[near_end if rng.random() < 0.7 else rng.randrange(len(words))]
    else:
        words, _ = spoilt(words, rng)
    body = " ".join(words)
    return replace(d, answer=body.join(tags) if tags else body, right=False)


def random_words(rng: random.Random, n: int) -> list[str]:
    """Words in no order, with commas and full stops here and there; in every other list from a few words, so that the
    place of a word, not the word before it, tells what comes next."""
    pool = rng.choices(WORDS, k=1 + n // 2) if rng.random() < 0.5 else WORDS
    return [word + rng.choice(("", "", "", "", "", ",", ".")) for word in rng.choices(pool, k=n)]


MIX = {
    plain: 3,
    repeat_sentence: 2,
    repeat_words: 3,
    complete_sentence: 8,
    complete_words: 6,
    continue_sentence: 1,
    choose_word: 4,
    leave_out: 3,
    say_missing: 3,
    mark_wrong: 6,
    judge_sentence: 10,
}
CHECKED = (repeat_sentence, repeat_words, complete_sentence, complete_words, leave_out, say_missing)
# At first mostly random words: copying must be found once, and the denser the signal, the sooner it is.
FIRST_MIX = {plain: 2, repeat_words: 8, complete_words: 1, mark_wrong: 2, judge_sentence: 5}


def document(rng: random.Random, first: bool = False) -> Document:
    mix = FIRST_MIX if first else MIX
    (make,) = rng.choices(list(mix), list(mix.values()))
    found = make(rng)
    return checked(found, rng) if make in CHECKED and not first and rng.random() < 0.5 else found


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


def pieces(d: Document) -> Iterator[tuple[str, float]]:
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
    """(ids, weights in the loss) of a step: fresh documents, one behind the other, cut into rows of a fixed length."""
    first = step < settings.first_steps
    rng, shape = _rng(settings, step), (settings.batch, settings.first_length if first else settings.length)
    room = shape[0] * shape[1]
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) < room:
        for text, weight in pieces(document(rng, first)):
            found = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += found
            weights += [weight] * len(found)
    return torch.tensor(ids[:room]).view(shape), torch.tensor(weights[:room]).view(shape)


def loss_of(model: Any, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of the next-token losses."""
    logits = model(input_ids=ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    counted = weights[:, 1:].flatten()
    return (losses * counted).sum() / counted.sum()


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
    """A hash of the code of the grammar and of this file, without imports, docstrings and comments.

    Only what decides the weights counts: rewording a comment or moving a module must not ask for a new base model.
    """
    return _code_sha256(Path(file).read_text(encoding="utf-8") for file in (grammar.__file__, __file__))


def _code_sha256(sources: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [n for n in body if not _is_inert(n)]  # type: ignore[attr-defined]
        # This function is no part of the recipe either.
        tree.body = [
            n for n in tree.body if getattr(n, "name", "") not in ("source_sha256", "_code_sha256", "_is_inert")
        ]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


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
