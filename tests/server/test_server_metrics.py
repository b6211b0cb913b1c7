"""Prometheus text: counts against naive ones."""

from __future__ import annotations

import random
import re

from sdmlm.server.metrics import OUTCOMES, SECONDS, Metrics


def test_text() -> None:
    rng, metrics = random.Random(0), Metrics(lambda: 7, lambda: 3)
    requests = [
        (rng.choice(["/a", "/b"]), rng.choice([200, 400]), rng.choice([*SECONDS, 0.2, 500.0])) for _ in range(200)
    ]
    for request in requests:
        metrics.request(*request)
    for outcome in ("verified", "judged wrong", "out of distribution", "out of distribution"):
        metrics.judged(outcome, 3, 5)
    text = metrics.text()
    assert text.endswith("\n")
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            found = re.fullmatch(r"([a-z_]+(?:\{[^{}]*\})?) (\S+)", line)
            assert found, line
            values[found[1]] = float(found[2])
    for route in ("/a", "/b"):
        for status in (200, 400):
            count = sum(r == route and s == status for r, s, _ in requests)
            assert values[f'sdmlm_requests_total{{route="{route}",status="{status}"}}'] == count
        seconds = [s for r, _, s in requests if r == route]
        for bound in SECONDS:
            name = f'sdmlm_request_seconds_bucket{{route="{route}",le="{bound}"}}'
            assert values[name] == sum(s <= bound for s in seconds)
        assert values[f'sdmlm_request_seconds_bucket{{route="{route}",le="+Inf"}}'] == len(seconds)
        assert values[f'sdmlm_request_seconds_count{{route="{route}"}}'] == len(seconds)
        assert abs(values[f'sdmlm_request_seconds_sum{{route="{route}"}}'] - sum(seconds)) < 1e-3
    outcomes = {name: values[f'sdmlm_answers_total{{outcome="{name}"}}'] for name in OUTCOMES}
    assert outcomes == {"verified": 1, "judged_wrong": 1, "not_verified": 0, "out_of_distribution": 2}
    assert values['sdmlm_tokens_total{part="prompt"}'] == 12
    assert values['sdmlm_tokens_total{part="completion"}'] == 20
    assert (values["sdmlm_queue_length"], values["sdmlm_requests_in_progress"]) == (7, 3)
    kinds = dict(re.findall(r"# TYPE (\S+) (\S+)", text))
    assert kinds["sdmlm_requests_total"] == "counter"
    assert kinds["sdmlm_request_seconds"] == "histogram"
    assert all(f"# HELP {name} " in text for name in kinds)
