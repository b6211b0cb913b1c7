"""A tokenizer, a language model and rows small enough to train in a second or two: copy a few letters."""

from __future__ import annotations

import gc
import random
import socket
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sdmlm.finetuning.config import SDMConfig

LETTERS = "abcdefgh"


def tiny_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE that knows the letters and spells each tag with one or two tokens; no pad token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<s>", "</s>"], show_progress=False)
    spelled = [*LETTERS, "=", "\n", "<verified>", "Yes</verified>", "No</verified>", "user:", "assistant:", "."]
    tokenizer.train_from_iterator([*spelled, *["<verified>", "Yes</verified>", "No</verified>"] * 5], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    return fast


def tiny_lm(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Randomly initialised; without dropout unless asked for."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": len(tiny_tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes))


def copy_rows(n: int, seed: int = 0, letters: int = 3) -> list[dict[str, str]]:
    """Rows whose right answer repeats the prompt, and whose wrong one differs in one letter."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        word = [rng.choice(LETTERS) for _ in range(letters)]
        at = rng.randrange(letters)
        wrong = rng.choice([c for c in LETTERS if c != word[at]])
        bad = [*word[:at], wrong, *word[at + 1 :]]
        rows.append({"prompt": "".join(word) + "=", "chosen": "".join(word), "rejected": "".join(bad)})
    return rows


def tiny_config(folder: str | Path, **changes: Any) -> SDMConfig:
    """Settings under which a run takes a second or two."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "learning_rate": 3e-3,
        "loss": "sdm",
        "exemplar_dim": 16,
        "sdm_epochs": 5,
        "sdm_learning_rate": 1e-2,
        "alpha": 0.8,
        "documents": "paper",
        "gamma_other": 0.0,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return SDMConfig(**settings | changes)


def warm_up(folder: Path) -> None:
    """For a driver that forks: do once what every child would do, and start no threads."""
    import sdmlm.finetuning.trainer  # noqa: F401

    torch.set_num_threads(1)
    tiny_lm().save_pretrained(folder)  # compiles a thousand regular expressions
    gc.freeze()  # the children's collections need not look at all that was imported


def process_group(world: int) -> list[dict[str, str]]:
    """What `torchrun` and `accelerate launch` put into the environment of each of `world` processes on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
