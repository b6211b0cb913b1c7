"""What the tests of the server share: a tiny model, a server in a thread or in a process, and plain HTTP."""

from __future__ import annotations

import atexit
import functools
import http.client
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import uvicorn
from tiny_sdm_lm import calibration_rows, marked_rows, train

from sdmlm import SDMLanguageModel
from sdmlm.server.app import make_app
from sdmlm.server.connections import watched
from sdmlm.server.model import Model
from sdmlm.server.settings import ServerSettings

# Not those of the calibration set: they lie right on the steps of an eCDF, where the last bit of a distance decides, and with
# it the company in a batch.
KNOWN = {row["prompt"] for row in calibration_rows()}
PROMPTS = [p for p in dict.fromkeys(row["prompt"] for row in marked_rows(60, 5)) if p not in KNOWN][:40]
NAME = "tiny"


@functools.cache
def trained(chat: bool = True) -> Path:
    """The folder of a tiny SDM language model, trained once for all tests; not to be written to."""
    folder = Path(tempfile.mkdtemp(prefix="sdmlm-server-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return train(folder, chat)


class Slow:
    """Makes every pass of a model take some seconds longer, and counts the passes and their rows."""

    def __init__(self, lm: SDMLanguageModel) -> None:
        self.seconds, self.passes, self.rows = 0.0, 0, 0
        lm.model.register_forward_pre_hook(self._wait, with_kwargs=True)

    def _wait(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.passes += 1
        self.rows += len(kwargs["input_ids"])
        time.sleep(self.seconds)


class Served(NamedTuple):
    """A running server."""

    url: str
    host: str
    port: int
    lm: SDMLanguageModel
    slow: Slow
    model: Model


@contextmanager
def served(folder: Path, name: str = NAME, **settings: Any) -> Iterator[Served]:
    """A server of this process, in a thread, over a model of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lm = SDMLanguageModel.from_pretrained(folder)
    slow = Slow(lm)
    chosen = ServerSettings(**{"timeout": 30.0, **settings})
    model = Model(lm, name, chosen)
    listening = socket.create_server((chosen.host, 0))
    host, port = listening.getsockname()[:2]
    http = watched(chosen.timeout)
    config = uvicorn.Config(make_app(model, chosen), log_level="error", access_log=False, http=http, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield Served(f"http://{host}:{port}", host, port, lm, slow, model)
    finally:
        slow.seconds = 0.0
        server.should_exit = True
        thread.join(30)
        listening.close()
        torch.set_num_threads(threads)


@contextmanager
def process(*arguments: str, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`sdmlm serve` as a process of its own, and the address that it says."""
    command = [sys.executable, "-m", "sdmlm.cli", "serve", *arguments, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        try:
            yield running, address(running)
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()


def address(running: subprocess.Popen[str]) -> str:
    """Where a server that is starting says it is; its words of failure where it fails."""
    said: queue.Queue[str] = queue.Queue()
    assert running.stdout is not None
    threading.Thread(target=lambda: said.put(running.stdout.readline()), daemon=True).start()  # type: ignore[union-attr]
    line = said.get(timeout=120)
    assert line.startswith("Serving "), (line, running.stderr and running.stderr.read())
    return line.split(" on ")[-1].strip()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Until something holds, which must be soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must have OpenAI's form."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The server-sent events, which must end with [DONE]."""
        lines = [line for line in self.body.decode().split("\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]


def ask(
    url: str, path: str, body: Any = None, method: str | None = None, headers: dict[str, str] | None = None
) -> Answer:
    """A plain request: bytes as they are, everything else as JSON."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        connection.request(
            method or ("GET" if body is None else "POST"),
            path,
            sent,
            {"Content-Type": "application/json", **(headers or {})},
        )
        answer = connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def chat(url: str, content: str, **fields: Any) -> Answer:
    """A question in a single message."""
    return ask(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})


def metric(url: str, name: str) -> float:
    """One line of /metrics."""
    lines = ask(url, "/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]
