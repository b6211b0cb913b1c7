"""A parent process that starts the server again at once when it is killed, for example by the kernel when memory runs out.

The parent imports all libraries, which takes most of the time of a start, and keeps the socket open, so clients that connect
meanwhile only wait. It loads no model and computes nothing, so a fork copies no threads and no GPU context.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

MOST, WITHIN = 5, 60.0  # after so many kills within so many seconds it gives up
PR_SET_PDEATHSIG = 1
NEEDED = (
    "uvicorn",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "sdmlm.generation.language_model",
    "sdmlm.server.app",
    "sdmlm.server.connections",
)


def keep_running(serve: Callable[[], None], say: Callable[[str], None]) -> None:
    """Run `serve` in a child process, and again each time that it is killed.

    Returns in the child only, when `serve` has ended. The parent never returns: it exits with the status of its last child.
    """
    if sys.platform != "linux":
        raise ValueError("--restart works on Linux only: let your process manager start the server again.")
    for name in NEEDED:
        importlib.import_module(name)
    child, stopping, killed = 0, False, deque[float](maxlen=MOST)

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        if child:
            os.kill(child, number)

    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in signals}
    parent = os.getpid()
    while True:
        child = os.fork()
        if child == 0:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which passes it on
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if not stopping and os.getppid() == parent:
                serve()
            return
        if stopping:  # the signal came just before the child existed
            os.kill(child, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = 0
        killed.append(time.monotonic())
        if stopping or status >= 0:
            sys.exit(max(status, 0) if stopping else status)
        if len(killed) == MOST and killed[-1] - killed[0] < WITHIN:
            raise ValueError(f"The server was killed {MOST} times in a row (signal {-status}): giving up.")
        say(f"the server was killed (signal {-status}): starting it again.")
