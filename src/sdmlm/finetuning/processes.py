"""Which process of a distributed run this one is. Imports nothing, so that commands can ask before torch is loaded."""

from __future__ import annotations

import os


def is_main_process() -> bool:
    """Whether this is the first process of the run; torchrun and `accelerate launch` set RANK."""
    return os.environ.get("RANK", "0") == "0"
