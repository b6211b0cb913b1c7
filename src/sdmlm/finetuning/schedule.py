"""When things happen in a training run: the order of the rows, the start of an epoch, evaluation in its middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import TrainerCallback

if TYPE_CHECKING:
    from sdmlm.finetuning.trainer import SDMTrainer


class RowNumbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return i


def row_numbers(numbers: list[int]) -> dict[str, Tensor]:
    return {"rows": torch.tensor(numbers)}


class EpochOrder(Sampler[int]):
    """A new order of the rows in each epoch, drawn from (seed, epoch), so that a resumed epoch has the same order.

    With several processes, -1 (no row) is appended until the last step has a full batch for each of them. Otherwise
    Accelerate would fill that step up with rows that this epoch has used already.
    """

    def __init__(self, trainer: SDMTrainer) -> None:
        self.trainer = trainer

    def __len__(self) -> int:
        n, args = len(self.trainer.rows), self.trainer.args
        if args.world_size == 1 or args.dataloader_drop_last:
            return n
        step: int = self.trainer._train_batch_size * args.world_size
        return -(-n // step) * step

    def __iter__(self) -> Iterator[int]:
        args, n = self.trainer.args, len(self.trainer.rows)
        seed = args.seed if args.data_seed is None else args.data_seed
        order = np.random.default_rng([seed, 3, max(0, self.trainer.layer_epoch)]).permutation(n).tolist()
        return iter(order + [-1] * (len(self) - n))


class Schedule(TrainerCallback):  # type: ignore[misc]
    """Starts each epoch, and evaluates and saves in its middle."""

    def __init__(self, trainer: SDMTrainer) -> None:
        self.trainer = trainer

    def _steps(self, args: Any) -> int:
        batches: int = len(self.trainer.callback_handler.train_dataloader)
        gathered: int = args.gradient_accumulation_steps
        return max(1, -(-batches // gathered))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the path of the best checkpoint of a resumed run, whose folder may have been moved since."""
        if state.best_global_step is None:
            return
        best = Path(args.output_dir) / f"checkpoint-{state.best_global_step}"
        if args.load_best_model_at_end and not best.is_dir():
            raise ValueError(f"{best}, the best checkpoint of this run so far, is missing: restore it, or train anew.")
        if best.is_dir():
            state.best_model_checkpoint = str(best)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.begin_epoch(state.global_step // self._steps(args))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        steps = self._steps(args)
        middle = str(args.eval_strategy.value) == "epoch" and steps > 1 and state.global_step % steps == steps // 2
        if middle and args.eval_delay <= state.epoch:
            control.should_evaluate = True
            control.should_save = control.should_save or str(args.save_strategy.value) == "epoch"
        return control
