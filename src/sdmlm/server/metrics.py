"""Metrics of the server in the format of Prometheus. Only the event loop uses them, so there are no locks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable

OUTCOMES = ("verified", "judged_wrong", "not_verified", "out_of_distribution")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """How many values are at most each bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> list[str]:
        out, so_far = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            out.append(f'{name}_bucket{{{labels},le="{bound}"}} {so_far}')
        return [*out, f"{name}_sum{{{labels}}} {self.total:.6f}", f"{name}_count{{{labels}}} {so_far}"]


class Metrics:
    """The counters; `queue_length` and `in_progress` are called when the text is made."""

    def __init__(self, queue_length: Callable[[], int], in_progress: Callable[[], int]) -> None:
        self._queue_length, self._in_progress = queue_length, in_progress
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, Histogram] = {}
        self._outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._tokens: Counter[str] = Counter(prompt=0, completion=0)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered, or whose client left (499)."""
        self._requests[route, status] += 1
        self._seconds.setdefault(route, Histogram(SECONDS)).observe(seconds)

    def judged(self, outcome: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a judged answer; `outcome` is that of its `Verification`."""
        self._outcomes[outcome.replace(" ", "_")] += 1
        self._tokens.update(prompt=prompt_tokens, completion=completion_tokens)

    def text(self) -> str:
        """The page at /metrics."""
        return "\n".join(
            [
                "# HELP sdmlm_requests_total Requests by route and status (499: the client left).",
                "# TYPE sdmlm_requests_total counter",
                *(
                    f'sdmlm_requests_total{{route="{route}",status="{status}"}} {n}'
                    for (route, status), n in sorted(self._requests.items())
                ),
                "# HELP sdmlm_request_seconds From the request to the end of its answer.",
                "# TYPE sdmlm_request_seconds histogram",
                *(
                    line
                    for route, histogram in sorted(self._seconds.items())
                    for line in histogram.lines("sdmlm_request_seconds", f'route="{route}"')
                ),
                "# HELP sdmlm_answers_total Judged answers by outcome.",
                "# TYPE sdmlm_answers_total counter",
                *(f'sdmlm_answers_total{{outcome="{name}"}} {n}' for name, n in sorted(self._outcomes.items())),
                "# HELP sdmlm_tokens_total Tokens of judged documents.",
                "# TYPE sdmlm_tokens_total counter",
                *(f'sdmlm_tokens_total{{part="{name}"}} {n}' for name, n in sorted(self._tokens.items())),
                "# HELP sdmlm_queue_length Answers that wait for the model.",
                "# TYPE sdmlm_queue_length gauge",
                f"sdmlm_queue_length {self._queue_length()}",
                "# HELP sdmlm_requests_in_progress Requests that are being answered.",
                "# TYPE sdmlm_requests_in_progress gauge",
                f"sdmlm_requests_in_progress {self._in_progress()}",
                "",
            ]
        )
