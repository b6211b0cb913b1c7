"""The server under stress: many clients, some of whom leave or talk nonsense. Is every answer right, and none lost?

    python benchmarks/serving.py DIR [--clients 64] [--seconds 60]

DIR: a saved SDM language model, with a chat template (its support then holds prompts to ask) or with --prompts FILE, one a
line. `sdmlm serve` runs as a process of its own. What each prompt's answer must be is found beforehand by the model alone,
one prompt at a time. Every client asks again as soon as it has its answer: plain and streamed chat, completions, sampled
answers with a seed, verdicts on given text; now and then it sends a malformed body, or leaves in the middle. Checked: no
wrong answer, no lost answer, the server's memory flat. Also measured: answers a second and their latency, beside the
model alone in batches of the same size, and what judging adds. Writes benchmarks/results/serving.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = {"chat": 45, "stream": 20, "completion": 10, "sampled": 8, "verify": 7, "malformed": 5, "leave": 5}
MALFORMED = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b'{"messages": 5}',
    b'{"messages": [{"role": "user", "content": ""}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "no_such_field": 1}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "x"}], "sdm": {"alpha": 7}}',
)
TEMPERATURE, MAX_BATCH = 1.0, 16


@dataclass
class Case:
    """A request, and what its answer must say: text, verdict and decision."""

    prompt: str
    seed: int | None
    expected: tuple[str, str, bool]


@dataclass
class Tally:
    """What the clients saw."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of plain chat
    refused: int = 0  # 429
    tokens: int = 0
    memory: list[float] = field(default_factory=list)  # MB, every second


async def http(port: int, path: str, body: bytes, leave_after: float | None = None) -> tuple[int, bytes]:
    """One request on a connection of its own; with `leave_after` the client leaves before it has read the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if leave_after is not None:
            await asyncio.sleep(leave_after)
            return 0, b""
        answer = await asyncio.wait_for(reader.read(-1), 120)
    finally:
        writer.close()
    first, _, rest = answer.partition(b"\r\n\r\n")
    status = int(first.split(b" ", 2)[1])
    return status, _dechunked(rest) if b"chunked" in first.lower() else rest


def _dechunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        n = int(size, 16)
        if n == 0:
            return out
        out, data = out + data[:n], data[n + 2 :]
    raise ValueError("the answer ended in its middle")


async def client(port: int, cases: list[Case], until: float, rng: random.Random, tally: Tally) -> None:
    """Ask until the time is up."""
    while time.monotonic() < until:
        (kind,) = rng.choices([*KINDS], [*KINDS.values()])
        case = rng.choice([c for c in cases if (c.seed is not None) == (kind == "sampled")])
        start = time.perf_counter()
        try:
            status, body = await ask(port, kind, case, rng)
        except (OSError, TimeoutError, ValueError, IndexError) as error:
            tally.lost.append(f"{kind}: {type(error).__name__} {error}")
            continue
        if status == 429:
            tally.refused += 1
            await asyncio.sleep(0.1)
            continue
        if kind == "chat":
            tally.seconds.append(time.perf_counter() - start)
        tally.answers[kind] += 1
        if problem := judge(kind, case, status, body, tally):
            tally.wrong.append((kind, case.prompt, problem))


async def ask(port: int, kind: str, case: Case, rng: random.Random) -> tuple[int, bytes]:
    """A request of some kind."""
    messages = [{"role": "user", "content": case.prompt}]
    chat, options = "/v1/chat/completions", {"sdm": {"neighbors": 1}}
    if kind == "malformed":
        return await http(port, chat, rng.choice(MALFORMED))
    if kind == "completion":
        return await http(port, "/v1/completions", json.dumps({"prompt": case.prompt, **options}).encode())
    if kind == "verify":
        given = {"messages": messages, "completion": case.expected[0]}
        return await http(port, "/v1/verify", json.dumps({**given, **options}).encode())
    payload: dict[str, Any] = {"messages": messages, **options}
    if kind == "sampled":
        payload |= {"temperature": TEMPERATURE, "seed": case.seed}
    if kind == "leave":
        payload["stream"] = rng.random() < 0.5
        return await http(port, chat, json.dumps(payload).encode(), rng.uniform(0, 0.3))
    payload["stream"] = kind == "stream"
    return await http(port, chat, json.dumps(payload).encode())


def judge(kind: str, case: Case, status: int, body: bytes, tally: Tally) -> str | None:
    """What is wrong with an answer, if anything."""
    if kind == "leave":
        return None
    if kind == "malformed":
        said = json.loads(body)["error"]
        return None if status == 400 and said["message"] else f"status {status} for a malformed body"
    if status != 200:
        return f"status {status}: {body[:200]!r}"
    if kind == "stream":
        lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
        if lines[-1] != "[DONE]":
            return "the stream has no end"
        chunks = [json.loads(line) for line in lines[:-1]]
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        evidence = chunks[-1]["choices"][0]["sdm"]
    elif kind == "verify":
        evidence = json.loads(body)["data"][0]
        text = evidence["text"]
    else:
        answer = json.loads(body)
        choice = answer["choices"][0]
        text = choice["text"] if kind == "completion" else choice["message"]["content"]
        evidence = choice["sdm"]
        tally.tokens += answer["usage"]["completion_tokens"]
    found = (text, evidence["verdict"], evidence["accepted"])
    return None if found == case.expected else f"{found} in place of {case.expected}"


async def watch(pid: int, until: float, tally: Tally) -> None:
    """The server's memory."""
    while time.monotonic() < until:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        tally.memory.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
        await asyncio.sleep(1)


async def stress(port: int, pid: int, cases: list[Case], clients: int, seconds: float, seed: int = 0) -> Tally:
    """Many clients at once, for some time."""
    tally, until = Tally(), time.monotonic() + seconds
    everybody = [client(port, cases, until, random.Random(seed * 1000 + n), tally) for n in range(clients)]
    await asyncio.gather(watch(pid, until, tally), *everybody)
    return tally


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
    return {"answers_per_second": MAX_BATCH / (wrote + judged), "judging_over_writing": judged / wrote}


def summary(tally: Tally, seconds: float) -> dict[str, Any]:
    """Figures of a run."""
    quarter = max(1, len(tally.memory) // 4)
    ordered = sorted(tally.seconds)
    return {
        "answers": sum(tally.answers.values()),
        "by_kind": dict(sorted(tally.answers.items())),
        "answers_per_second": sum(tally.answers[k] for k in KINDS if k not in ("malformed", "leave")) / seconds,
        "p50_seconds": ordered[len(ordered) // 2],
        "p99_seconds": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "refused_429": tally.refused,
        "wrong": len(tally.wrong),
        "lost": len(tally.lost),
        # After the first quarter, in which caches fill.
        "memory_mb": [
            statistics.median(tally.memory[quarter : 2 * quarter]),
            statistics.median(tally.memory[-quarter:]),
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="DIR")
    parser.add_argument("--prompts", metavar="FILE", help="prompts, one a line")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "serving.json"))
    args = parser.parse_args()

    import torch
    from rich.console import Console
    from rich.table import Table

    from sdmlm import SDMLanguageModel
    from sdmlm.server.info import examples

    lm = SDMLanguageModel.from_pretrained(args.model)
    prompts = Path(args.prompts).read_text(encoding="utf-8").splitlines() if args.prompts else examples(lm, 48)
    if not prompts:
        raise SystemExit("The model's support does not tell prompts apart: give --prompts.")
    cases, without = make_cases(lm, prompts[:48], 16), alone(lm, prompts)
    del lm
    command = [sys.executable, "-m", "sdmlm.cli", "serve", args.model, "--port", "0", "--max-batch", str(MAX_BATCH)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().rpartition(":")[2])
        try:
            tally = asyncio.run(stress(port, server.pid, cases, args.clients, args.seconds))
        finally:
            server.send_signal(signal.SIGTERM)
    found = summary(tally, args.seconds)
    before, after = found["memory_mb"]
    flat = after < 1.02 * before + 4
    table = Table("what", "value", title=f"{args.clients} clients for {args.seconds:g} s, {Path(args.model).name}")
    rows = {
        "answers": f"{found['answers']} ({', '.join(f'{n} {k}' for k, n in found['by_kind'].items())})",
        "wrong, lost": f"{found['wrong']}, {found['lost']}",
        "answers a second": f"{found['answers_per_second']:.1f}",
        f"the model alone, batches of {MAX_BATCH}": f"{without['answers_per_second']:.1f}",
        "latency p50, p99": f"{found['p50_seconds']:.2f} s, {found['p99_seconds']:.2f} s",
        "judging / writing": f"{without['judging_over_writing']:.3f}",
        "memory of the server": f"{before:.0f} MB, at the end {after:.0f} MB",
        "refused (429)": str(found["refused_429"]),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    for line in [*tally.wrong[:5], *tally.lost[:5]]:
        print(line, file=sys.stderr)
    facts = {
        "machine": {"threads": torch.get_num_threads(), "torch": torch.__version__, "cores": os.cpu_count()},
        "model": Path(args.model).name,
        "clients": args.clients,
        "seconds": args.seconds,
        "server": found,
        "alone": without,
    }
    Path(args.output).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if tally.wrong or tally.lost or not flat:
        sys.exit("Not passed.")


if __name__ == "__main__":
    main()
