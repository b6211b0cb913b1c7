"""A short version of benchmarks/serving.py: no wrong answer, no lost answer, the server's memory flat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from benchmark_modules import benchmark
from server_checks import PROMPTS, ask, process, trained

from sdmlm import SDMLanguageModel

SECONDS, CLIENTS = 5.0, 16


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_many_clients_who_leave_and_talk_nonsense() -> None:
    serving = benchmark("serving")
    cases = serving.make_cases(SDMLanguageModel.from_pretrained(trained()), PROMPTS[:20], 8)
    assert len({case.expected for case in cases}) > 8
    with process(str(trained())) as (running, url):
        port = int(url.rpartition(":")[2])
        tally = asyncio.run(serving.stress(port, running.pid, cases, CLIENTS, SECONDS))
        found = serving.summary(tally, SECONDS)
        assert tally.wrong == []
        assert tally.lost == []
        assert set(found["by_kind"]) == set(serving.KINDS)
        before, after = found["memory_mb"]
        assert after < before + 30
        lines = ask(url, "/metrics").body.decode().splitlines()
        assert not any('status="500"' in line for line in lines)
        assert "sdmlm_requests_in_progress 0" in lines
        assert "sdmlm_queue_length 0" in lines


def test_the_driver_would_see_a_wrong_answer() -> None:
    serving = benchmark("serving")
    case = serving.Case("abc=", None, ("abc", "Yes", True))
    answer = b'{"choices": [{"message": {"content": "abd"}, "sdm": {"verdict": "Yes", "accepted": true}}], "usage": {"completion_tokens": 3}}'
    tally = serving.Tally()
    assert serving.judge("chat", case, 200, answer.replace(b"abd", b"abc"), tally) is None
    assert serving.judge("chat", case, 200, answer, tally)
    assert serving.judge("chat", case, 200, answer.replace(b"abd", b"abc").replace(b"Yes", b"No"), tally)
    assert serving.judge("chat", case, 500, b"oops", tally)
    assert serving.judge("malformed", case, 200, b'{"error": {"message": "x"}}', tally)
    with pytest.raises(ValueError, match="ended in its middle"):
        serving._dechunked(b"5\r\nhello\r\n")
