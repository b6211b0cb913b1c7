"""The server under load and under faults: are answers lost, wrong or doubled, is feedback kept, how soon is it back?

    python benchmarks/serving.py DIR [--only NAME ...] [--seconds 60] [--memory-seconds 600]

DIR: a saved SDM language model, with a chat template (its support then holds prompts to ask) or with --prompts FILE, one a
line. `sdmlm serve` runs as a process of its own, on this machine only. What each prompt's answer must be is found
beforehand by the model alone, one prompt at a time. The scenarios:

    clients-64, clients-256   clients that ask again as soon as they have their answer; some send nonsense, or leave
    slow-readers              clients that ask for large answers and streams, and read nothing
    half-open                 connections that send nothing, half a head, or half a body
    kill-server               kill -9 in the middle, feedback included; started again at once
    kill-restarting           the same with --restart: it starts again by itself
    kill-upstream             kill -9 of the server that generates, behind a gateway
    full-disk                 no room for feedback, then room again, then kill -9
    two-servers               feedback to two servers over one folder
    clock-jumps               the clock jumps by days and years; the process is frozen for a while
    sigterm                   SIGTERM with requests in flight
    memory                    a few clients for ten minutes

Each prints a line. The figures are merged into docs/results/serving.json, so that one can run again by itself. Linux only;
full-disk mounts a small tmpfs where it may (as root), and otherwise forbids the server's files to grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import serving_faults as faults
from serving_clients import KINDS, TEMPERATURE, Case, Tally, client
from serving_faults import Bench
from serving_server import Server, serving

MAX_BATCH = 16
DISK_KB = 256
Scenario = Callable[[Bench], Coroutine[Any, Any, dict[str, Any]]]


async def stress(server: Server, cases: list[Case], clients: int, seconds: float) -> tuple[Tally, list[float]]:
    """Many clients at once, for some time; what they saw, and the server's memory, every second."""
    tally, memory, until = Tally(), [], time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < until:
            memory.append(server.memory())
            await asyncio.sleep(1)

    everybody = [client(server.port, cases, until, random.Random(n), tally) for n in range(clients)]
    await asyncio.gather(watch(), *everybody)
    return tally, memory


def summary(tally: Tally, memory: list[float], seconds: float) -> dict[str, Any]:
    """Figures of `stress`."""
    quarter = max(1, len(memory) // 4)
    ordered = sorted(tally.seconds)
    before, after = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    return {
        "answers": sum(tally.answers.values()),
        "by kind": dict(sorted(tally.answers.items())),
        "answers per second": sum(tally.answers[k] for k in KINDS if k not in ("malformed", "leave")) / seconds,
        "p50 seconds": ordered[len(ordered) // 2],
        "p99 seconds": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "refused 429": tally.refused,
        "wrong": len(tally.wrong),
        "lost": len(tally.lost),
        "doubled": tally.doubled,
        "examples": [str(each)[:300] for each in (*tally.wrong[:3], *tally.lost[:3])],
        # After the first quarter, in which caches fill.
        "memory MB": [before, after],
        "memory flat": after < 1.02 * before + 4,
    }


def many(clients: int, seconds: float | None = None) -> Scenario:
    """A scenario of `stress`."""

    async def run(bench: Bench) -> dict[str, Any]:
        lasts = bench.seconds if seconds is None else seconds
        with serving(bench.folder, "--max-batch", str(MAX_BATCH)) as server:
            tally, memory = await stress(server, bench.cases, clients, lasts)
        found = summary(tally, memory, lasts)
        return {"clients": clients, "seconds": lasts, **found, "passed": tally.clean and found["memory flat"]}

    return run


async def full_disk(bench: Bench) -> dict[str, Any]:
    """With a disk of its own where that is allowed."""
    return await faults.full_disk(bench, DISK_KB if os.geteuid() == 0 else None)


SCENARIOS: dict[str, Scenario] = {
    "clients-64": many(64),
    "clients-256": many(256),
    "slow-readers": faults.slow_readers,
    "half-open": faults.half_open,
    "kill-server": faults.kill_server,
    "kill-restarting": faults.kill_restarting,
    "kill-upstream": faults.kill_upstream,
    "full-disk": full_disk,
    "two-servers": faults.two_servers,
    "clock-jumps": faults.clock_jumps,
    "sigterm": faults.sigterm,
}


def make_cases(lm: Any, prompts: list[str], sampled: int) -> list[Case]:
    """What the model alone says to each prompt, greedily; and to some of them sampled, each with a seed.

    A prompt whose answer or decision hangs on the last bits of a number, and so on who else is in a batch, is left out: it
    has no one right answer.
    """

    def said(v: Any) -> tuple[str, str, bool]:
        return v.text, v.verdict, v.accepted

    one_by_one = [lm.generate([prompt], progress=False)[0] for prompt in prompts]
    together = lm.generate(prompts, progress=False)
    given = lm.verify(prompts, [v.text for v in one_by_one], progress=False)
    kept = [
        Case(prompt, None, said(v))
        for prompt, v, *others in zip(prompts, one_by_one, together, given, strict=True)
        if v.text.strip() and all(said(other) == said(v) for other in others)
    ]
    for seed, case in enumerate(kept[:sampled]):
        v = lm.generate([case.prompt], progress=False, temperature=TEMPERATURE, seed=seed)[0]
        if said(lm.verify(case.prompt, v.text, progress=False)) == said(v):
            kept.append(Case(case.prompt, seed, said(v)))
    return kept


def alone(lm: Any, prompts: list[str]) -> dict[str, float]:
    """The model without a server, in batches of the same size: answers a second, and what judging adds to writing."""
    batch = (prompts * MAX_BATCH)[:MAX_BATCH]
    read, sampling = lm.read_prompts(batch), lm.sampling()
    seeds = [[0, n] for n in range(MAX_BATCH)]
    writing, judging = [], []
    for _ in range(6):
        start = time.perf_counter()
        answers = lm.write(read, sampling, seeds, progress=False)
        middle = time.perf_counter()
        lm.judge(answers, lm.alpha, 1, progress=False)
        writing.append(middle - start)
        judging.append(time.perf_counter() - middle)
    wrote, judged = (statistics.median(times[1:]) for times in (writing, judging))
    return {"answers per second": MAX_BATCH / (wrote + judged), "judging over writing": judged / wrote}


def line(name: str, found: dict[str, Any]) -> str:
    """A scenario in a line."""
    shown = {k: v for k, v in found.items() if k not in ("passed", "examples", "by kind", "load average")}
    parts = (f"{key} {_short(value)}" for key, value in shown.items())
    return f"{name}: {'passed' if found['passed'] else 'NOT PASSED'}. {'; '.join(parts)}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="DIR")
    parser.add_argument("--prompts", metavar="FILE", help="prompts, one a line")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*SCENARIOS, "memory"], help="these scenarios")
    parser.add_argument("--seconds", type=float, default=60, help="of a scenario (60)")
    parser.add_argument("--memory-seconds", type=float, default=600, help="of the scenario memory (600)")
    parser.add_argument("--output", default=str(Path(__file__).parents[1] / "docs" / "results" / "serving.json"))
    args = parser.parse_args()

    import torch

    from sdmlm import SDMLanguageModel
    from sdmlm.server.info import examples

    lm = SDMLanguageModel.from_pretrained(args.model)
    prompts = Path(args.prompts).read_text(encoding="utf-8").splitlines() if args.prompts else examples(lm, 48)
    if not prompts:
        raise SystemExit("The model's support does not tell prompts apart: give --prompts.")
    cases, without = make_cases(lm, prompts[:48], 16), alone(lm, prompts)
    del lm
    output, failed = Path(args.output), False
    results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    results["machine"] = {"threads": torch.get_num_threads(), "torch": torch.__version__, "cores": os.cpu_count()}
    results["model"] = {"name": Path(args.model).name, "cases": len(cases), "alone": without}
    scenarios = {**SCENARIOS, "memory": many(8, args.memory_seconds)}
    with tempfile.TemporaryDirectory(prefix="sdmlm-serving-") as scratch:
        bench = Bench(Path(args.model), cases, Path(scratch), seconds=args.seconds)
        for name in args.only or scenarios:
            found = asyncio.run(scenarios[name](bench))
            found["load average"] = os.getloadavg()[0]
            print(line(name, found), flush=True)
            results.setdefault("scenarios", {})[name] = found
            output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            failed |= not found["passed"]
    if failed:
        sys.exit("Not passed.")


if __name__ == "__main__":
    main()
