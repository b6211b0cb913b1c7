"""How many threads a run should use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_MODEL = 10_000_000  # parameters


@contextmanager
def threads_for(parameters: int) -> Iterator[int]:
    """One thread for a small model on a CPU, until the context ends; otherwise torch's number of threads is unchanged.

    Matrices this small are multiplied fastest by one thread: several threads wait for each other, above all when another
    job runs. OMP_NUM_THREADS in the environment wins. Only commands and `calibrate` call this; the threads of a program that
    uses the library are not changed.
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
