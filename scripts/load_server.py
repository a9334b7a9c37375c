"""Clients that behave as they like against a server: every request ends once, and nothing is left behind.

    python scripts/load_server.py [--requests 2000] [--output benchmarks/results/server_load.json]

64 clients at a time: streams and whole answers, chats and completions with several samples, slow readers, clients that
leave after a few tokens, right after their request, or in the middle of it. Server and clients share a process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from turbojax.serve.service import Service

NUM_CLIENTS, TIMEOUT_S = 64, 120.0
KINDS = {"stream": 0.4, "whole": 0.15, "samples": 0.1, "slow": 0.1, "leaves": 0.15, "goes": 0.05, "half": 0.05}
MAX_NEW, SLOW_NEW = 48, 300
SLOW_BUFFER_BYTES, SLOW_READ_BYTES, SLOW_PAUSE_S = 4096, 2048, 0.004
MAX_GROWTH_MB = 32


@dataclass
class Load:
    """What happened.

    Attributes:
        kinds: requests by what their clients did.
        statuses: of the answers that were heard to the end.
        wrong: what should not have been, at most a few of each kind.
        generations: by id, how often the server said that a call had ended.
        rss_mb: resident memory, after each twentieth of the requests.
        seconds: all of it took.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    generations: Counter[str] = field(default_factory=Counter)
    rss_mb: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def growth_mb(self) -> float:
        """From the most that was resident in the second quarter of the run to the least in its last one."""
        quarter = len(self.rss_mb) // 4
        return min(self.rss_mb[-quarter:]) - max(self.rss_mb[quarter : 2 * quarter]) if quarter else 0.0


# -- answers ----------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """A whole answer: its status and its body, out of its chunks."""

    status: int
    body: bytes

    @classmethod
    def of(cls, text: bytes) -> Answer:
        head, _, rest = text.partition(b"\r\n\r\n")
        body = unchunked(rest) if b"transfer-encoding: chunked" in head.lower() else rest
        return cls(int(head.split()[1]), body)

    def fault(self, num_tokens: int, num_choices: int, *, streams: bool) -> str | None:
        """What is wrong with an answer of so many tokens for each choice; None where it is right."""
        if self.status != 200:
            return f"status {self.status}: {self.body[:200]!r}"
        if not streams:
            answer = json.loads(self.body)
            reasons, usage = [c["finish_reason"] for c in answer["choices"]], answer["usage"]
        else:
            *events, last = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
            if last != b"[DONE]":
                return f"the last event is {last[:100]!r}"
            chunks = [json.loads(event) for event in events]
            if any("error" in chunk for chunk in chunks):
                return f"an error: {chunks[-1]}"
            reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
            usage = chunks[-1]["usage"]
        if reasons != ["length"] * num_choices:
            return f"{num_choices} choices ended with {reasons}"
        if usage["completion_tokens"] != num_tokens * num_choices:
            return f"{usage['completion_tokens']} tokens instead of {num_tokens} for each of {num_choices}"
        return None


def unchunked(rest: bytes) -> bytes:
    parts, at = [], 0
    while True:
        end = rest.index(b"\r\n", at)
        size = int(rest[at:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(rest[end + 2 : end + 2 + size])
        at = end + 4 + size


# -- clients ----------------------------------------------------------------------------------------------


class Clients:
    """Random clients of a server on plain sockets."""

    def __init__(self, url: str, model: str, letters: str, seed: int) -> None:
        """`url` with its /v1; prompts are made of the letters."""
        address = urlsplit(url)
        self._host, self._port, self._path = address.hostname or "", address.port or 80, address.path
        self._model, self._letters, self._rng = model, letters, np.random.default_rng(seed)
        self.load = Load()

    async def run(self, num_requests: int) -> Load:
        """Sends all of them, so many at a time."""
        start_s, every, todo = time.perf_counter(), max(1, num_requests // 20), iter(range(num_requests))

        async def client() -> None:
            for number in todo:
                await self._one(number)
                if number % every == every - 1:
                    self.load.rss_mb.append(rss_mb())

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
        self.load.seconds = time.perf_counter() - start_s
        return self.load

    async def _one(self, number: int) -> None:
        kind = str(self._rng.choice(list(KINDS), p=list(KINDS.values())))
        self.load.kinds[kind] += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                fault = await self._behave(kind)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            self.load.wrong.append(f"request {number} ({kind}): {fault}")

    async def _behave(self, kind: str) -> str | None:
        """One request; what was wrong with its answer."""
        rng = self._rng
        streams, num_choices = kind != "whole", 2 if kind == "samples" else 1
        num_tokens = SLOW_NEW if kind == "slow" else int(rng.integers(2, MAX_NEW))
        request = self._request(bool(rng.random() < 0.5), num_tokens, num_choices, streams=streams)
        reader, writer = await self._connect(buffer_bytes=SLOW_BUFFER_BYTES if kind == "slow" else None)
        try:
            writer.write(request[: len(request) // 2] if kind == "half" else request)
            await writer.drain()
            if kind in ("half", "goes"):
                return None
            if kind == "leaves":
                for _ in range(int(rng.integers(1, 8))):
                    await reader.read(SLOW_READ_BYTES)
                return None
            text = await self._read(reader, SLOW_PAUSE_S if kind == "slow" else 0.0)
        finally:
            writer.transport.abort() if kind == "leaves" else writer.close()
        answer = Answer.of(text)
        self.load.statuses[answer.status] += 1
        return answer.fault(num_tokens, num_choices, streams=streams)

    async def _connect(self, buffer_bytes: int | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection, whose kernel keeps so many bytes that nobody has read."""
        connection = socket.socket()
        try:
            if buffer_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, (self._host, self._port))
            return await asyncio.open_connection(sock=connection, limit=SLOW_READ_BYTES)
        except BaseException:
            connection.close()
            raise

    @staticmethod
    async def _read(reader: asyncio.StreamReader, pause_s: float) -> bytes:
        parts = []
        while part := await reader.read(SLOW_READ_BYTES):
            parts.append(part)
            if pause_s:
                await asyncio.sleep(pause_s)  # a reader that is slow
        return b"".join(parts)

    def _request(self, is_chat: bool, num_tokens: int, num_choices: int, *, streams: bool) -> bytes:
        rng = self._rng
        prompt = "".join(self._letters[i] for i in rng.integers(0, len(self._letters), int(rng.integers(2, 40))))
        asked: dict[str, Any] = {"model": self._model, "max_tokens": num_tokens, "ignore_eos": True, "n": num_choices}
        asked |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        asked |= {"temperature": 1.0} if num_choices > 1 else {}
        asked |= {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
        body = json.dumps(asked).encode()
        path = f"{self._path}/{'chat/completions' if is_chat else 'completions'}"
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def rss_mb() -> float:
    """Resident memory of this process; 0 where the system does not say it."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if statm.exists() else 0.0


# -- the server's side ------------------------------------------------------------------------------------


@contextmanager
def counted_ends(ends: Counter[str]) -> Iterator[None]:
    """Counts, by id, the calls of which the server logs that they have ended."""

    class Counts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "generation":
                ends[record.fields["id"]] += 1  # type: ignore[attr-defined]

    log, handler = logging.getLogger("turbojax.serve"), Counts()
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates


def leftovers(service: Service, timeout_s: float = 30.0) -> list[str]:
    """What the server still holds once its clients are gone, after a while to notice."""
    deadline_s = time.monotonic() + timeout_s
    while found := held(service):
        if time.monotonic() > deadline_s:
            return found
        time.sleep(0.02)
    return []


def held(service: Service) -> list[str]:
    """What the server holds."""
    status = service.pipe.status
    numbers = {
        "requests being answered": service.gate.num_visits,
        "running": status.num_running,
        "waiting": status.num_waiting,
        "pages held": status.num_held_pages,
    }
    return [f"{number} {name}" for name, number in numbers.items() if number]


def load_server(url: str, service: Service, letters: str, num_requests: int, seed: int = 0) -> Load:
    """Sends the requests; `wrong` has what was, on either side."""
    clients = Clients(url, service.model_name, letters, seed)
    with counted_ends(clients.load.generations):
        load = asyncio.run(clients.run(num_requests))
        load.wrong += [f"left behind: {one}" for one in leftovers(service)]
    load.wrong += [f"{name} ended {count} times" for name, count in load.generations.items() if count != 1]
    counts = service.pipe.metrics
    if counts.num_failed_requests or counts.num_failed_steps:
        load.wrong.append(f"{counts.num_failed_requests} requests and {counts.num_failed_steps} steps failed")
    return load


def main() -> None:
    from cpu_results import write_results
    from server_harness import LETTERS, open_pipeline, serving

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with open_pipeline(num_decode_steps=4) as pipe, serving(pipe) as (url, service):
        load = load_server(url, service, LETTERS, options.requests, options.seed)
        counts = service.pipe.metrics.snapshot()
    print(f"{options.requests} requests in {load.seconds:.0f} s: {dict(load.kinds)}; statuses {dict(load.statuses)}")
    print(f"{len(load.generations)} calls of the engine, each ended once; memory grew by {load.growth_mb():.1f} MB")
    print("\n".join(load.wrong[:20]) or "nothing was wrong, nothing is left")
    if options.output is not None:
        row = {
            "case": f"{options.requests} requests, {NUM_CLIENTS} at a time", "kinds": dict(load.kinds),
            "statuses": {str(status): count for status, count in load.statuses.items()}, "wrong": load.wrong,
            "calls": len(load.generations), "seconds": round(load.seconds, 1), "growth_mb": round(load.growth_mb(), 2),
            "rss_mb": [round(one, 1) for one in load.rss_mb], "engine": counts,
        }  # fmt: skip
        write_results(options.output, {}, [row])
    if load.wrong or load.growth_mb() > MAX_GROWTH_MB:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
