"""The faults of benchmarks/serving.py: each scenario returns its figures, and "passed"."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_clients import Case, Givers, Tally, ask, http, judge, patient
from serving_server import Server, SmallDisk, SmallFiles, serving

GRACE = 12.0  # seconds that the server leaves to those who hold things up, beyond its own limits


@dataclass
class Bench:
    """What all scenarios share: the model, what it must say, how many clients ask for how long."""

    folder: Path
    cases: list[Case]
    scratch: Path
    clients: int = 16
    seconds: float = 30.0
    kills: int = 3
    documents: int = 40  # of feedback
    limit: int = 20  # --timeout where a limit of time is part of the scenario

    def copy(self, name: str) -> Path:
        """A folder of its own, for what changes it."""
        folder = self.scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        shutil.rmtree(folder / "sdm" / "feedback", ignore_errors=True)
        return folder

    @contextlib.asynccontextmanager
    async def asking(self, port: int, seconds: float, tally: Tally) -> AsyncIterator[float]:
        """Patient clients that ask while the block runs; gives the time when they stop."""
        until = time.monotonic() + seconds
        asks = [patient(port, self.cases, until, random.Random(n), tally) for n in range(self.clients)]
        everybody = asyncio.gather(*asks)
        try:
            yield until
            await everybody
        finally:
            everybody.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await everybody

    def prompts(self) -> list[str]:
        """Prompts to give feedback on."""
        return [case.prompt for case in self.cases if case.seed is None]


def figures(tally: Tally) -> dict[str, Any]:
    """The counts of patient clients."""
    return {
        "answers": sum(tally.answers.values()),
        "sent again": dict(tally.repeats),
        "wrong": len(tally.wrong),
        "lost": len(tally.lost),
        "doubled": tally.doubled,
        "examples": [str(each)[:300] for each in (*tally.wrong[:3], *tally.lost[:3])],
    }


async def thread(function: Any, *arguments: Any) -> Any:
    """Something that blocks."""
    return await asyncio.to_thread(function, *arguments)


def feedback_on_disk(folder: Path) -> dict[str, str]:
    """Ids and texts, read as the model would."""
    from sdmlm.generation.feedback import load_feedback
    from sdmlm.language_model.sdm_folder import read_lm_metadata

    fingerprint = str(read_lm_metadata(folder / "sdm")["fingerprint"])
    return {item.id: item.text for item in load_feedback(folder / "sdm", fingerprint).items}


def held(port: int, data: bytes) -> socket.socket:
    """A connection over which something is sent, and from which nothing is read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.send(data)
    return connection


def request(path: str, body: Any, part: float = 1.0) -> bytes:
    """A request, or a part of its body."""
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    return head.encode() + sent[: round(part * len(sent))]


async def holding(bench: Bench, server: Server, requests: list[bytes]) -> dict[str, Any]:
    """Some connections are held while others ask: nobody suffers, and in the end the server has let them go."""
    tally, before = Tally(), server.sockets()
    connections = [await thread(held, server.port, data) for data in requests]
    try:
        async with bench.asking(server.port, max(bench.seconds, bench.limit + GRACE), tally):
            await asyncio.sleep(1)
            most = server.sockets()
        for _ in range(300):  # what was asked for last is closed a moment later
            if server.sockets() <= before:
                break
            await asyncio.sleep(0.1)
        left = server.sockets() - before
    finally:
        for connection in connections:
            connection.close()
    found = {"held": len(requests), "sockets at most": most, "still open": left, **figures(tally)}
    return {**found, "passed": tally.clean and left <= 0 and most - before >= len(requests) // 2}


async def slow_readers(bench: Bench) -> dict[str, Any]:
    """Clients that ask for large answers and for streams, and read nothing."""
    prompt, text = bench.cases[0].prompt, bench.cases[0].expected[0]
    items = [{"prompt": prompt, "completion": text}] * 240
    large = request("/v1/verify", {"items": items, "sdm": {"neighbors": 100}})
    stream = {"prompt": prompt, "stream": True, "n": 60, "temperature": 1.0, "sdm": {"neighbors": 100}}
    with serving(bench.folder, "--timeout", str(bench.limit), "--max-queue", "2000") as server:
        return await holding(bench, server, [large, request("/v1/completions", stream)] * 4)


async def half_open(bench: Bench) -> dict[str, Any]:
    """Connections that send nothing, half a head, or half a body."""
    body = request("/v1/completions", {"prompt": bench.cases[0].prompt}, 0.5)
    with serving(bench.folder, "--timeout", str(bench.limit)) as server:
        return await holding(bench, server, [b"", body[:30], body] * 100)


async def kill_server(bench: Bench, restart: bool = False) -> dict[str, Any]:
    """kill -9 while clients ask and give feedback; somebody starts it again at once, or it does so itself (`restart`)."""
    folder, tally = bench.copy("kill-server"), Tally()
    givers = Givers(bench.prompts())
    recoveries, computing = [], []
    # Feedback changes verdicts, and rightly so: only the texts are known beforehand.
    texts = [Case(c.prompt, c.seed, (c.expected[0], None, None)) for c in bench.cases]
    asking = dataclasses.replace(bench, cases=texts).asking
    with serving(folder, *(["--restart"] if restart else [])) as server:
        until = time.monotonic() + 3600
        giving = [asyncio.ensure_future(givers.give(server.port, f"killed-{n}", until)) for n in range(2)]
        for kill in range(bench.kills):
            async with asking(server.port, bench.seconds / bench.kills, tally):
                await asyncio.sleep(random.Random(kill).uniform(0.3, 0.7) * bench.seconds / bench.kills)
                killed = time.monotonic()
                if restart:
                    server.kill_child()
                else:
                    await thread(server.kill)
                    await thread(server.start)
                    computing.append(server.cpu())
            while tally.recovered(killed) is None and time.monotonic() < killed + 120:
                async with asking(server.port, 1.0, tally):
                    pass
            recoveries.append(tally.recovered(killed))
        givers.stopped = True
        await asyncio.gather(*giving)
        if restart:
            server.stop()
    feedback = givers.compare(feedback_on_disk(folder))
    found = {
        "kills": bench.kills,
        "recovery seconds": recoveries,
        "computing seconds of a start": computing,
        "feedback": feedback,
        "feedback sent again": dict(givers.repeats),
        **figures(tally),
    }
    stored = not feedback["lost"] and not feedback["doubled"] and feedback["acknowledged"] > 0
    return {**found, "passed": tally.clean and stored and None not in recoveries}


async def kill_restarting(bench: Bench) -> dict[str, Any]:
    """kill -9 of a server that starts again by itself."""
    return await kill_server(bench, restart=True)


async def kill_upstream(bench: Bench) -> dict[str, Any]:
    """kill -9 of the server that generates, behind a gateway that judges."""
    tally, recoveries, ready = Tally(), [], []
    with serving(bench.folder) as upstream:
        url = f"http://127.0.0.1:{upstream.port}/v1"
        with serving(bench.folder, "--upstream", url, "--upstream-model", bench.folder.name) as gateway:
            for _ in range(bench.kills):
                async with bench.asking(gateway.port, bench.seconds / bench.kills, tally):
                    await asyncio.sleep(bench.seconds / bench.kills / 2)
                    await thread(upstream.kill)
                    ready.append(await thread(upstream.start))
                    back = time.monotonic()
                while tally.recovered(back) is None and time.monotonic() < back + 60:
                    async with bench.asking(gateway.port, 1.0, tally):
                        pass
                recoveries.append(tally.recovered(back))
    found = {"kills": bench.kills, "recovery seconds after the upstream is back": recoveries, **figures(tally)}
    return {**found, "start seconds": ready, "passed": tally.clean and None not in recoveries}


async def full_disk(bench: Bench, small: int | None = None) -> dict[str, Any]:
    """The disk is full under feedback: refused and said so, then stored as soon as there is room; then kill -9.

    `small`: kilobytes of a tmpfs (as root); without, no file of the server may grow.
    """
    folder, tally = bench.copy("full-disk"), Tally()
    disk: Any = SmallDisk(folder / "sdm" / "feedback", small) if small else None
    givers = Givers(bench.prompts())
    first = Bench(folder, bench.cases, bench.scratch, clients=4)
    try:
        with serving(folder) as server:
            disk = disk or SmallFiles(server.process.pid)
            await givers.give(server.port, "before", time.monotonic() + 120, most=bench.documents)
            disk.fill()
            refused = [await givers.one(server.port, givers.document(f"full-{n}"), n) for n in range(5)]
            answered = await http(
                server.port, "/v1/completions", json.dumps({"prompt": bench.cases[0].prompt}).encode()
            )
            full = givers.compare(feedback_on_disk(folder))
            disk.free()
            await givers.give(server.port, "full", time.monotonic() + 120, most=5)
            async with first.asking(server.port, 1.0, tally):
                pass
            server.kill()
        stored = feedback_on_disk(folder)
    finally:
        if disk is not None:
            disk.close()
    after = givers.compare(stored)
    found = {
        "kind": "tmpfs" if small else "files that may not grow",
        "refused while full": refused.count(False),
        "said": dict(givers.repeats),
        "feedback while full": full,
        "feedback after kill -9": after,
        "lost": after["lost"],
        "doubled": after["doubled"],
    }
    kept = full["lost"] == after["lost"] == after["doubled"] == 0 and after["stored"] == bench.documents + 5
    return {
        **found,
        "passed": kept and not any(refused) and answered[0] == 200 and set(givers.repeats) == {"status 500"},
    }


async def two_servers(bench: Bench) -> dict[str, Any]:
    """Two servers over one folder: feedback to both at once; then both must judge alike, and take back the other's."""
    folder, givers = bench.copy("two-servers"), Givers(bench.prompts())
    with serving(folder) as one, serving(folder) as two:
        until = time.monotonic() + 120
        gives = [
            givers.give(server.port, f"{name}-{n}", until, most=bench.documents // 4)
            for name, server in (("one", one), ("two", two))
            for n in range(2)
        ]
        await asyncio.gather(*gives)
        found = givers.compare(feedback_on_disk(folder))
        documents = [{"prompt": c.prompt, "completion": c.expected[0]} for c in bench.cases[:20]]
        documents += [{"prompt": givers.prompts[0], "completion": d} for d in givers.tried[:20]]
        alike = await _both(one, two, documents)
        undone = []
        for n, id in enumerate([*givers.acknowledged.values()][:10]):  # each at the server that may not have taken it
            undone.append((await http((one, two)[n % 2].port, f"/v1/feedback/{id}", b"", method="DELETE"))[0])
        alike_after = await _both(one, two, documents)
    left = len(feedback_on_disk(folder))
    figures = {
        **found,
        "judged alike": alike,
        "taken back": undone.count(200),
        "alike after": alike_after,
        "left": left,
    }
    right = left == found["acknowledged"] - len(undone) and found["acknowledged"] == len(givers.tried)
    return {
        **figures,
        "passed": not found["lost"]
        and not found["doubled"]
        and alike
        and alike_after
        and right
        and set(undone) == {200},
    }


async def _both(one: Server, two: Server, documents: list[dict[str, str]]) -> bool:
    """Whether two servers give the same verdicts, to the last field."""
    body = json.dumps({"items": documents}).encode()
    answers = [json.loads((await http(server.port, "/v1/verify", body))[1])["data"] for server in (one, two)]
    return bool(answers[0] == answers[1])


async def clock_jumps(bench: Bench) -> dict[str, Any]:
    """The clock jumps by days and years, forth and back, every half second; and the process is frozen for a while."""
    folder, tally, givers = bench.copy("clock"), Tally(), Givers(["clock"])
    frozen = min(5.0, bench.seconds / 4)
    with serving(folder, jumping=True) as server:
        async with bench.asking(server.port, bench.seconds, tally):
            await asyncio.sleep(bench.seconds / 4)
            os.kill(server.process.pid, signal.SIGSTOP)
            await asyncio.sleep(frozen)
            os.kill(server.process.pid, signal.SIGCONT)
            back = time.monotonic()
        givers.prompts = bench.prompts()
        await givers.give(server.port, "jump", time.monotonic() + 60, most=5)
        status, seconds = await thread(server.stop)
    feedback = givers.compare(feedback_on_disk(folder))
    found = {
        **figures(tally),
        "frozen seconds": frozen,
        "recovery seconds": tally.recovered(back),
        "feedback": feedback,
    }
    passed = tally.clean and feedback["acknowledged"] == feedback["stored"] == 5 and status == 0 and not tally.repeats
    return {**found, "exit status": status, "exit seconds": seconds, "passed": passed}


async def sigterm(bench: Bench) -> dict[str, Any]:
    """SIGTERM with requests in flight, beside half a request and a client that reads nothing."""
    tally, cut = Tally(), 0
    greedy = [case for case in bench.cases if case.seed is None]
    items = [{"prompt": greedy[0].prompt, "completion": "x"}] * 200
    large = request("/v1/verify", {"items": items, "sdm": {"neighbors": 100}})
    with serving(bench.folder) as server:
        connections = [await thread(held, server.port, data) for data in (b"POST", large[:-9], large)]
        rng = random.Random(0)
        kinds = [rng.choice(["chat", "stream", "completion", "verify"]) for _ in range(2 * bench.clients)]
        chosen = [rng.choice(greedy) for _ in kinds]
        asked = [asyncio.ensure_future(ask(server.port, k, c, rng)) for k, c in zip(kinds, chosen, strict=True)]
        await asyncio.sleep(0.1)  # all sent, few answered
        in_flight = sum(not each.done() for each in asked)
        stopping = asyncio.ensure_future(thread(server.stop))
        late = []
        for _ in range(20):  # those that come too late are refused, or answered, but never cut off
            await asyncio.sleep(0.1)
            late.append(asyncio.ensure_future(ask(server.port, "chat", greedy[0], rng)))
        for kind, case, each in zip(kinds, chosen, asked, strict=True):
            try:
                status, body = await each
            except (OSError, ValueError) as error:
                tally.lost.append(f"{kind}: {type(error).__name__} {error}")
            else:
                tally.answers[kind] += 1
                if problem := judge(kind, case, status, body, tally):
                    tally.wrong.append((kind, case.prompt, problem))
        for answer in await asyncio.gather(*late, return_exceptions=True):
            cut += isinstance(answer, (ValueError, TimeoutError))
        exit_status, seconds = await stopping
        for connection in connections:
            connection.close()
    found = {"in flight": in_flight, **figures(tally), "late and cut off": cut}
    passed = tally.clean and exit_status == 0 and not cut and in_flight > 0
    return {**found, "exit status": exit_status, "exit seconds": seconds, "passed": passed}
