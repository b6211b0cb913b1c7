"""`sdmlm serve` as a process for benchmarks/serving.py: started, killed, watched; its disk filled, its clock moved."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 180
# The same server, with a clock that jumps every half second. The clock of the machine stays.
JUMPING = """
import sys, time
real, start = time.time, time.monotonic()
JUMPS = (0, 365 * 86400, -86400, 5 * 3600, -400 * 86400)
time.time = lambda: real() + JUMPS[int(2 * (time.monotonic() - start)) % len(JUMPS)]
from sdmlm.cli import main
main(sys.argv[1:])
"""


class Server:
    """A server process, which keeps its port over restarts."""

    def __init__(self, folder: Path | str, *options: str, jumping: bool = False) -> None:
        self.port, self._folder, self._options = 0, str(folder), options
        self._program = ["-c", JUMPING] if jumping else ["-m", "sdmlm.cli"]
        self.start()

    def start(self) -> float:
        """Start it, on the port it had; the seconds until it is ready."""
        start = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *self._program, "serve", self._folder, "--port", str(self.port), *self._options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        said: queue.Queue[str] = queue.Queue()
        stdout = self.process.stdout
        assert stdout is not None
        threading.Thread(target=lambda: said.put(stdout.readline()), daemon=True).start()
        line = said.get(timeout=START_SECONDS)
        if not line.startswith("Serving "):
            raise RuntimeError(f"The server did not start: {line!r}")
        self.port = int(line.rpartition(":")[2])
        return time.monotonic() - start

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def kill_child(self) -> None:
        """kill -9 of the process that serves, where its parent starts it again (--restart)."""
        os.kill(self.child(), signal.SIGKILL)

    def child(self) -> int:
        """The id of the process that serves below its parent."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def stop(self) -> tuple[int, float]:
        """SIGTERM; its exit status, and the seconds it took."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(180)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return status, time.monotonic() - start

    def memory(self) -> float:
        """MB that are resident."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu(self) -> float:
        """Seconds of computing so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def sockets(self) -> int:
        """Open sockets."""
        count = 0
        for path in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                count += os.readlink(path).startswith("socket:")
        return count


@contextlib.contextmanager
def serving(folder: Path | str, *options: str, jumping: bool = False) -> Iterator[Server]:
    """A server that ends with the block."""
    server = Server(folder, *options, jumping=jumping)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


class SmallDisk:
    """A disk of its own below a folder, which can be filled: a tmpfs (Linux, as root)."""

    def __init__(self, folder: Path, kilobytes: int) -> None:
        self.folder, self._ballast = folder, folder / "ballast"
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)], check=True)

    def fill(self) -> None:
        """Not a byte is left."""
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Room again."""
        self._ballast.unlink()

    def close(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)


class SmallFiles:
    """The same for a process, without rights: no file that it writes may grow (Linux)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def fill(self) -> None:
        self._limit(0)

    def free(self) -> None:
        import resource

        self._limit(resource.RLIM_INFINITY)

    def _limit(self, size: int) -> None:
        import resource

        _, hard = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (size, hard))

    def close(self) -> None:
        pass
