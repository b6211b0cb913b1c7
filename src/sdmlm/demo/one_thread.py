"""One thread for the demos."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices as small as the demos' are multiplied fastest by one thread: several wait for each other, far longer on a
    busy machine. It also makes the numbers the same whatever the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
