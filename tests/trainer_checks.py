"""What the tests of SDMTrainer share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer
from torch import Tensor

from sdmlm.finetuning.trainer import SDMTrainer


def make(folder: Path, rows: int = 32, model: Any = None, **changes: Any) -> SDMTrainer:
    given = {k: changes.pop(k) for k in ("reward_funcs", "peft_config", "callbacks") if k in changes}
    config = tiny_config(folder, **changes)
    return SDMTrainer(model or tiny_lm(), config, copy_rows(rows, 0), copy_rows(24, 1), tiny_tokenizer(), **given)


def logged(trainer: SDMTrainer, metric: str) -> list[float]:
    return [log[metric] for log in trainer.state.log_history if metric in log]


def counting_decoder(model: Any) -> list[int]:
    """Grows by the number of sequences of every pass over the LM's layers."""
    calls: list[int] = []
    model.get_decoder().register_forward_hook(
        lambda m, args, kwargs, out: calls.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return calls


def moved_on(trainer: SDMTrainer) -> SDMTrainer:
    """A trainer in the middle of its first epoch: its layer is fitted and the LM has changed since."""
    trainer.begin_epoch(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return trainer


def batch_of(trainer: SDMTrainer, numbers: list[int]) -> dict[str, Tensor]:
    batches, _ = trainer.get_batch_samples(iter([{"rows": torch.tensor(numbers)}]), 1, torch.device("cpu"))
    return dict(batches[0])
