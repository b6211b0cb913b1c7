"""A short version of benchmarks/serving.py: no wrong answer, no lost answer, none doubled, the server's memory flat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_checks import PROMPTS, ask, trained
from serving_benchmark import serving_module

from sdmlm import SDMLanguageModel

SECONDS, CLIENTS = 5.0, 16
linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def cases() -> list[Any]:
    made = serving_module("serving").make_cases(SDMLanguageModel.from_pretrained(trained()), PROMPTS[:20], 8)
    assert len({case.expected for case in made}) > 8
    return list(made)


@linux
def test_many_clients_who_leave_and_talk_nonsense(cases: list[Any]) -> None:
    serving = serving_module("serving")
    with serving.serving(trained()) as server:
        tally, memory = asyncio.run(serving.stress(server, cases, CLIENTS, SECONDS))
        found = serving.summary(tally, memory, SECONDS)
        assert (tally.wrong, tally.lost, tally.doubled) == ([], [], 0)
        assert set(found["by kind"]) == set(serving.KINDS)
        before, after = found["memory MB"]
        assert after < before + 30
        lines = ask(f"http://127.0.0.1:{server.port}", "/metrics").body.decode().splitlines()
        assert not any('status="500"' in line for line in lines)
        assert "sdmlm_requests_in_progress 0" in lines
        assert "sdmlm_queue_length 0" in lines


@linux
@pytest.mark.parametrize(
    "scenario",
    ["kill_server", "kill_upstream", "full_disk", "two_servers", "clock_jumps", "sigterm"],
)
def test_faults(scenario: str, cases: list[Any], tmp_path: Path) -> None:
    """Clients that hold a connection without using it: test_server_connections.py."""
    faults = serving_module("serving_faults")
    bench = faults.Bench(trained(), cases, tmp_path, clients=4, seconds=3.0, kills=1, documents=8, limit=3)
    found = asyncio.run(getattr(faults, scenario)(bench))
    assert found["passed"], found


def test_the_driver_would_see_a_wrong_answer() -> None:
    clients = serving_module("serving_clients")
    case = clients.Case("abc=", None, ("abc", "Yes", True))
    answer = b'{"id": "1", "choices": [{"message": {"content": "abd"}, "sdm": {"verdict": "Yes", "accepted": true}}], "usage": {"completion_tokens": 3}}'
    tally = clients.Tally()
    right = answer.replace(b"abd", b"abc")
    assert clients.judge("chat", case, 200, right, tally) is None
    assert (tally.doubled, tally.clean) == (0, True)
    assert clients.judge("chat", case, 200, answer, tally)
    assert clients.judge("chat", case, 200, right.replace(b"Yes", b"No"), tally)
    assert clients.judge("chat", clients.Case("abc=", None, ("abc", None, None)), 200, right, tally) is None
    assert clients.judge("chat", clients.Case("abc=", None, ("x", None, None)), 200, right, tally)
    assert clients.judge("chat", case, 500, b"oops", tally)
    assert clients.judge("malformed", case, 200, b'{"error": {"message": "x"}}', tally)
    assert tally.doubled == 4  # the same id again


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhellohello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
)
def test_the_driver_would_see_an_answer_that_is_cut_off(answer: bytes) -> None:
    with pytest.raises(ConnectionError):
        serving_module("serving_clients").parsed(answer)


@pytest.mark.parametrize(
    ("stored", "lost", "doubled"),
    [
        ({"1": "x aaaaa. y", "2": "aaaab."}, 0, 0),
        ({"1": "x aaaaa. y"}, 1, 0),
        ({"1": "aaaaa.", "2": "aaaab.", "3": "aaaab."}, 0, 1),
        ({"1": "aaaaa.", "3": "aaaab."}, 1, 0),  # there, but under another id than was said
    ],
)
def test_the_driver_would_see_feedback_that_is_lost_or_doubled(stored: dict[str, str], lost: int, doubled: int) -> None:
    givers = serving_module("serving_clients").Givers(["p"])
    givers.acknowledged = {givers.document("first"): "1", givers.document("second"): "2"}
    found: Callable[..., Any] = givers.compare
    assert found(stored) == {"acknowledged": 2, "stored": len(stored), "lost": lost, "doubled": doubled}
