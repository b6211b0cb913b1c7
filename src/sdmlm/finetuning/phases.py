"""What a training run shows and logs: one progress bar that names the phase, logs above it, means over steps."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import TrainerCallback


class StepMetrics(defaultdict[str, list[float]]):
    """Named values that the steps recorded since the last log, one per document; `time/*` are seconds of a phase."""

    def __init__(self) -> None:
        super().__init__(list)

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """Means over the documents of all processes."""
        sums = {name: (sum(v), len(v)) for name, v in self.items() if not name.startswith("time/")}
        parts = gather_object([sums]) if accelerator.num_processes > 1 else [sums]
        means = {}
        for name in sorted({name for part in parts for name in part}):
            total, n = np.sum([part[name] for part in parts if name in part], axis=0)
            if n:
                means[name] = float(total / n)
        return means

    def pop_times(self) -> dict[str, float]:
        """The seconds of each phase in this process; removes them."""
        names = [name for name in self if name.startswith("time/")]
        return {name: float(sum(self.pop(name))) for name in names}


class PhaseProgress(TrainerCallback):  # type: ignore[misc]
    """Shows steps and phase in a progress bar and prints logs; without a terminal it only prints logs."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> PhaseProgress:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not sys.stderr.isatty():
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._progress.start()
        self._task = self._progress.add_task("Training", total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._progress is not None:
            epoch = f"Epoch {int(state.epoch - 1e-9) + 1}: training"
            self._progress.update(self._task, completed=state.global_step, description=epoch)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        line = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in (logs or {}).items())
        if self._progress is None:
            print(line, flush=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False)

    @contextmanager
    def phase(self, description: str) -> Iterator[None]:
        """Show a description while something other than steps runs."""
        if self._progress is None:
            yield
            return
        before = self._progress.tasks[self._task].description
        self._progress.update(
            self._task, description=description, refresh=True
        )  # refresh: so that short phases are shown too
        yield
        self._progress.update(self._task, description=before)
