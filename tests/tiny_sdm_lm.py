"""A tiny SDM language model, trained in seconds, whose high-reliability region is not empty: wrong answers end in a full stop."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer

from sdmlm.finetuning.trainer import SDMTrainer

CALIBRATION = 96
# Settings of `train` for a model with a certificate.
OWN: dict[str, Any] = {
    "documents": "own",
    "summary": "states+likelihood",
    "certificate_share": 0.5,
    "certificate_epsilon": 0.05,
}
CHAT = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ('</s>' if m['role'] == 'assistant' else '\n') }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def marked_rows(n: int, seed: int) -> list[dict[str, str]]:
    return [{**row, "rejected": row["rejected"] + "."} for row in copy_rows(n, seed)]


def calibration_rows() -> list[dict[str, str]]:
    """D_ca of the model."""
    return marked_rows(CALIBRATION, 1)


def train(folder: Path, chat: bool = False, peft_config: Any = None, model: Any = None, **changes: Any) -> Path:
    """Fine-tune for a second or two and save; copies a word right nearly always."""
    settings = {
        "num_train_epochs": 6,
        "learning_rate": 1e-2,
        "sdm_epochs": 30,
        "loss": "ce",
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "hard_negatives": False,
        "logging_steps": 1000,
    }
    config = tiny_config(folder / "run", **settings | changes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            tokenizer = tiny_tokenizer(CHAT if chat else None)
            trainer = SDMTrainer(
                tiny_lm(max_position_embeddings=96) if model is None else model,
                config,
                marked_rows(256, 0),
                calibration_rows(),
                tokenizer,
                peft_config=peft_config,
            )
            trainer.train()
            trainer.save_model(str(folder / "model"))
    finally:
        torch.set_num_threads(threads)
    return folder / "model"


@contextlib.contextmanager
def ids_read_by(model: Any) -> Iterator[list[list[int]]]:
    """Every row of ids that the LM is given, padding included."""
    rows: list[list[int]] = []

    def keep(module: Any, args: tuple[Any, ...]) -> None:
        rows.extend(args[0].tolist())

    handle = model.get_input_embeddings().register_forward_pre_hook(keep)
    try:
        yield rows
    finally:
        handle.remove()
