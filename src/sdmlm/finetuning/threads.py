"""How many threads a run should use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_MODEL = 10_000_000  # parameters


@contextmanager
def threads_for(parameters: int) -> Iterator[int]:
    """One thread for a small model on a CPU, until the context ends; otherwise torch's own number, which is unchanged.

    Matrices this small are multiplied fastest by one thread: several wait for each other, and far longer beside
    another job. OMP_NUM_THREADS in the environment is the user's own choice and wins. Only commands, and
    `calibrate`, call this: a library caller's threads are left alone.
    """
    before = torch.get_num_threads()
    if parameters >= SMALL_MODEL or torch.accelerator.is_available() or os.environ.get("OMP_NUM_THREADS"):
        yield before
        return
    torch.set_num_threads(1)
    try:
        yield 1
    finally:
        torch.set_num_threads(before)
