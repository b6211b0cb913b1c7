"""A server with a tiny model in a thread, and the official client. Imported where they are used: the server is an extra."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from server_checks import Served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from server_checks import served, trained

    folder = shutil.copytree(trained(), tmp_path_factory.mktemp("served") / "model")
    with served(Path(folder), max_batch=8, max_queue=32, max_concurrent=24, timeout=10.0) as running:
        yield running


@pytest.fixture
def slow(server: Served) -> Iterator[Any]:
    """Slow passes for one test."""
    from server_checks import metric, wait_until

    yield server.slow
    server.slow.seconds = 0.0
    wait_until(lambda: metric(server.url, "sdmlm_requests_in_progress") == 0)


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
