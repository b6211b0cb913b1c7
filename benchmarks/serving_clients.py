"""Clients for benchmarks/serving.py: they know what every answer must be, and count those that are wrong, lost or doubled."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

KINDS = {"chat": 45, "stream": 20, "completion": 10, "sampled": 8, "verify": 7, "malformed": 5, "leave": 5}
PLAIN = {"chat": 50, "stream": 30, "completion": 10, "verify": 10}  # what is asked again until it is answered
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
TEMPERATURE = 1.0
ANSWER_SECONDS = 120.0  # after which an answer counts as lost
PAUSE = 0.1  # before a request that failed is sent again


@dataclass
class Case:
    """A request, and what its answer must say: text, verdict and decision; None where anything is right."""

    prompt: str
    seed: int | None
    expected: tuple[str, str | None, bool | None]


@dataclass
class Tally:
    """What the clients saw."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    ids: Counter[str] = field(default_factory=Counter)  # of answers: each once
    seconds: list[float] = field(default_factory=list)  # of plain chat
    good: list[tuple[float, float]] = field(default_factory=list)  # when asked, when rightly answered
    repeats: Counter[str] = field(default_factory=Counter)  # why requests were sent again
    refused: int = 0  # 429
    tokens: int = 0

    @property
    def doubled(self) -> int:
        """Answers that came more than once."""
        return sum(n - 1 for n in self.ids.values())

    @property
    def clean(self) -> bool:
        """Nothing wrong, lost or doubled."""
        return not self.wrong and not self.lost and not self.doubled

    def recovered(self, since: float) -> float | None:
        """Seconds from a fault to the first right answer to a request that was sent after it."""
        after = [done for asked, done in self.good if asked >= since]
        return min(after) - since if after else None


async def http(
    port: int, path: str, body: bytes, leave_after: float | None = None, method: str = "POST"
) -> tuple[int, bytes]:
    """One request on a connection of its own; with `leave_after` the client leaves before it has read the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if leave_after is not None:
            await asyncio.sleep(leave_after)
            return 0, b""
        answer = await asyncio.wait_for(reader.read(-1), ANSWER_SECONDS)
    finally:
        writer.close()
    return parsed(answer)


def parsed(answer: bytes) -> tuple[int, bytes]:
    """Status and body; ConnectionError where the answer is not whole."""
    head, found, rest = answer.partition(b"\r\n\r\n")
    if not found:
        raise ConnectionError("no answer")
    fields = [line.partition(b":") for line in head.lower().split(b"\r\n")[1:]]
    headers = {name.strip(): value.strip() for name, _, value in fields}
    if headers.get(b"transfer-encoding") == b"chunked":
        rest = _dechunked(rest)
    elif len(rest) != int(headers.get(b"content-length", b"0")):
        raise ConnectionError("the answer ended in its middle, or went on after its end")
    return int(head.split(b" ", 2)[1]), rest


def _dechunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        n = int(size, 16)
        if n == 0:
            return out
        out, data = out + data[:n], data[n + 2 :]
    raise ConnectionError("the answer ended in its middle")


async def client(port: int, cases: list[Case], until: float, rng: random.Random, tally: Tally) -> None:
    """Ask until the time is up, each request once."""
    while time.monotonic() < until:
        (kind,) = rng.choices([*KINDS], [*KINDS.values()])
        case = rng.choice([c for c in cases if (c.seed is not None) == (kind == "sampled")])
        start = time.perf_counter()
        try:
            status, body = await ask(port, kind, case, rng)
        except (OSError, TimeoutError, ValueError) as error:
            tally.lost.append(f"{kind}: {type(error).__name__} {error}")
            continue
        if status == 429:
            tally.refused += 1
            await asyncio.sleep(PAUSE)
            continue
        if kind == "chat":
            tally.seconds.append(time.perf_counter() - start)
        tally.answers[kind] += 1
        if problem := judge(kind, case, status, body, tally):
            tally.wrong.append((kind, case.prompt, problem))


async def patient(
    port: int, cases: list[Case], until: float, rng: random.Random, tally: Tally, seconds: float = ANSWER_SECONDS
) -> None:
    """Ask until the time is up; what fails is sent again, until it is answered or `seconds` have passed."""
    greedy = [case for case in cases if case.seed is None]
    while time.monotonic() < until:
        (kind,), case = rng.choices([*PLAIN], [*PLAIN.values()]), rng.choice(greedy)
        first, pause = time.monotonic(), PAUSE
        while True:
            asked = time.monotonic()
            why = await once(port, kind, case, rng, tally, asked)
            if why is None:
                break
            tally.repeats[why] += 1
            if time.monotonic() > first + seconds:
                tally.lost.append(f"{kind}: {why} for {seconds:g} s")
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)


async def once(port: int, kind: str, case: Case, rng: random.Random, tally: Tally, asked: float) -> str | None:
    """One try; None where there was an answer, right or wrong, otherwise why not."""
    try:
        status, body = await ask(port, kind, case, rng)
    except (OSError, TimeoutError, ValueError) as error:
        return type(error).__name__
    if status in (429, 500, 502, 503, 504):
        return f"status {status}"
    if kind == "stream" and status == 200 and b'data: {"error"' in body:
        return "an error within a stream"
    tally.answers[kind] += 1
    if problem := judge(kind, case, status, body, tally):
        tally.wrong.append((kind, case.prompt, problem))
    else:
        tally.good.append((asked, time.monotonic()))
    return None


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
        if sum("sdm" in c["choices"][0] for c in chunks) != 1:
            return "not one verdict in a stream"
        tally.ids[chunks[0]["id"]] += 1
        evidence = chunks[-1]["choices"][0]["sdm"]
    elif kind == "verify":
        evidence = json.loads(body)["data"][0]
        text = evidence["text"]
    else:
        answer = json.loads(body)
        (choice,) = answer["choices"]
        text = choice["text"] if kind == "completion" else choice["message"]["content"]
        evidence = choice["sdm"]
        tally.ids[answer["id"]] += 1
        tally.tokens += answer["usage"]["completion_tokens"]
    found = (text, evidence["verdict"], evidence["accepted"])
    right = all(wanted is None or wanted == given for wanted, given in zip(case.expected, found, strict=True))
    return None if right else f"{found} in place of {case.expected}"


@dataclass
class Givers:
    """Clients that give feedback, each document until it is acknowledged; `acknowledged` maps documents to ids."""

    prompts: list[str]
    acknowledged: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    repeats: Counter[str] = field(default_factory=Counter)
    stopped: bool = False

    async def give(self, port: int, name: str, until: float, pause: float = 0.0, most: int = 1000) -> None:
        """One document after the other."""
        for n in range(most):
            if time.monotonic() > until or self.stopped:
                return
            document = self.document(f"{name}-{n}")
            while not await self.one(port, document, n) and not self.stopped:
                await asyncio.sleep(PAUSE)
            await asyncio.sleep(pause)

    def document(self, name: str) -> str:
        """The document of this name. Each has a word of its own, of letters that every model knows, to be found on disk."""
        if name not in self.words:
            self.words[name] = "".join("abcdefgh"[int(digit)] for digit in f"{len(self.words):05o}") + "."
        return self.words[name]

    @property
    def tried(self) -> list[str]:
        """All documents so far."""
        return [*self.words.values()]

    async def one(self, port: int, document: str, n: int) -> bool:
        """Send one document; whether it was acknowledged."""
        body = {"prompt": self.prompts[n % len(self.prompts)], "completion": document, "label": n % 2 == 0}
        try:
            status, answer = await http(port, "/v1/feedback", json.dumps(body).encode())
        except (OSError, TimeoutError, ValueError) as error:
            self.repeats[type(error).__name__] += 1
            return False
        if status != 200:
            self.repeats[f"status {status}"] += 1
            return False
        self.acknowledged[document] = json.loads(answer)["id"]
        return True

    def compare(self, stored: dict[str, str]) -> dict[str, int]:
        """What became of the documents; `stored` maps ids on disk to texts."""
        held = {d: [id for id, text in stored.items() if d in text] for d in self.tried}
        return {
            "acknowledged": len(self.acknowledged),
            "stored": len(stored),
            "lost": sum(id not in held[document] for document, id in self.acknowledged.items()),
            "doubled": sum(len(ids) > 1 for ids in held.values()),
        }
