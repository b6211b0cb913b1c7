"""One thread for the demos."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the demos on one thread.

    Their matrices are so small that several threads would mostly wait for each other, above all on a busy machine. It also
    makes the numbers independent of the number of cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
