"""What `turbojax serve proxy` costs: a fast replica asked directly and through it.

    python scripts/bench_proxy.py --output benchmarks/results/proxy.json

The replica is a process that writes an event a token to every stream a step, as an engine does, and nothing else; it
writes into each when it was sent. Replica, proxy and client share the machine, so times of the proxy's processor are
given too, which other work does not change.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import uvloop
from cpu_results import write_results
from rich.console import Console
from rich.table import Table

CHAT = "/v1/chat/completions"
# An event of a chat completion, of the usual size.
_EVENT = (
    'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    '"model":"tiny","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}],"sent_ns":%019d}\n\n'
)
_SENT = re.compile(rb'"sent_ns":(\d{19})')
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


# -- the replica ------------------------------------------------------------------------------------------


class Replica(asyncio.Protocol):
    """Answers /health, /v1/models, and chat completions of `max_tokens` events, one a step of `step_s`."""

    streams: ClassVar[dict[Replica, int]] = {}  # tokens that each wants still
    step_s = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport, self._buffer, self._is_paused = transport, b"", False

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False

    def connection_lost(self, error: Exception | None) -> None:
        self.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        length = int(match[1]) if (match := re.search(rb"content-length: *(\d+)", head, re.I)) else 0
        if found and len(rest) >= length:
            self._buffer = b""
            self._answer(head, rest)

    def _answer(self, head: bytes, body: bytes) -> None:
        fields = json.loads(body) if body else {}
        if fields.get("stream"):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            self.streams[self], Replica.step_s = fields["max_tokens"], fields["step_s"]
            return
        text = b'{"object":"list","data":[{"id":"tiny","object":"model"}]}'
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text) + text
        )

    def step(self) -> None:
        if self._is_paused:
            return
        event = (_EVENT % time.monotonic_ns()).encode()
        self.streams[self] -= 1
        end = b"" if self.streams[self] else b"0\r\n\r\n"
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(event), event, end))
        if end:
            del self.streams[self]


async def serve_replica() -> None:
    """Runs the replica; prints its port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Replica, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while True:
        start_s = loop.time()
        for stream in list(Replica.streams):
            stream.step()
        await asyncio.sleep(max(0.0, Replica.step_s - (loop.time() - start_s)) if Replica.streams else 0.001)


# -- the client -------------------------------------------------------------------------------------------


class Client(asyncio.Protocol):
    """One connection: a request, and all that comes until its answer ends."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self._done = transport, None

    def ask(self, fields: dict[str, Any], marker: bytes) -> asyncio.Future[None]:
        """`marker` ends the answer."""
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._marker, self._tail, self.delays_ns, self.num_bytes = marker, b"", list[int](), 0
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(head.encode() + body)
        return self._done

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        self.num_bytes += len(data)
        self.delays_ns += [now_ns - int(sent) for sent in _SENT.findall(data)]
        self._tail = (self._tail + data)[-32:]
        if self._marker in self._tail and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionError("the connection ended before the answer"))


async def connect(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def ask_one_by_one(port: int, number: int) -> list[float]:
    """Seconds of each of so many short requests, one after the other."""
    client, seconds = await connect(port), []
    for _ in range(number):
        start_s = time.perf_counter()
        await client.ask({}, b"}]}")
        seconds.append(time.perf_counter() - start_s)
    client.transport.close()
    return seconds


async def stream(port: int, num_streams: int, num_tokens: int, step_s: float) -> tuple[float, list[int]]:
    """Seconds until all streams have ended, and nanoseconds that each token was on its way."""
    clients = [await connect(port) for _ in range(num_streams)]
    fields = {"stream": True, "max_tokens": num_tokens, "step_s": step_s}
    start_s = time.perf_counter()
    await asyncio.gather(*(client.ask(fields, b"0\r\n\r\n") for client in clients))
    seconds = time.perf_counter() - start_s
    for client in clients:
        client.transport.close()
    return seconds, [delay for client in clients for delay in client.delays_ns]


# -- the measurement --------------------------------------------------------------------------------------


@contextmanager
def process(*command: str, says: str) -> Iterator[tuple[int, int]]:
    """A process that says at which port it is; gives its id and the port."""
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    try:
        for line in running.stdout:
            if found := re.search(says, line):
                yield running.pid, int(found[1])
                break
        else:
            raise SystemExit(f"{command} did not start")
    finally:
        running.kill()
        running.communicate()


def wait_healthy(port: int) -> None:
    """The proxy has reached its node."""
    for _ in range(600):
        try:
            urlopen(f"http://127.0.0.1:{port}/health").close()
            return
        except HTTPError as error:
            error.close()
            time.sleep(0.1)
    raise SystemExit("the proxy has not reached the replica")


def cpu_s(pid: int) -> float:
    """Seconds of a processor that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def measure(name: str, port: int, pid: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """All cases at one port; `pid` is the proxy's."""
    row: dict[str, Any] = {"case": name}
    used_s = cpu_s(pid) if pid else 0.0

    def used(per: int) -> float | None:
        nonlocal used_s
        if pid is None:
            return None
        before_s, used_s = used_s, cpu_s(pid)
        return (used_s - before_s) / per * 1e6

    uvloop.run(ask_one_by_one(port, 100))
    used(1)
    seconds = uvloop.run(ask_one_by_one(port, args.requests))
    row |= {"request_us": float(np.median(seconds) * 1e6), "request_cpu_us": used(args.requests)}
    num_tokens = args.streams * args.tokens
    seconds_all, _ = uvloop.run(stream(port, args.streams, args.tokens, 0.0))
    row |= {"tokens_per_s": num_tokens / seconds_all, "token_cpu_us_full": used(num_tokens)}
    num_paced = int(args.paced_s * args.rate)
    _, delays_ns = uvloop.run(stream(port, args.streams, num_paced, 1 / args.rate))
    p50, p99 = np.percentile(delays_ns, (50, 99)) / 1e3
    row |= {
        "token_us_p50": float(p50),
        "token_us_p99": float(p99),
        "token_cpu_us_paced": used(args.streams * num_paced),
    }
    return row


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of several rounds: what else the machine does only adds."""
    row = dict(rounds[0])
    for name, value in row.items():
        if isinstance(value, float):
            of_all = [one[name] for one in rounds]
            row[name] = max(of_all) if name == "tokens_per_s" else min(of_all)
    return row


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    table = Table(title=f"{args.streams} streams; paced: {args.rate:g} tokens/s each")
    columns = {
        "request_us": "request us", "request_cpu_us": "CPU us", "tokens_per_s": "tokens/s",
        "token_cpu_us_full": "CPU us/token", "token_us_p50": "paced: token us p50", "token_us_p99": "p99",
        "token_cpu_us_paced": "CPU us/token",
    }  # fmt: skip
    for name in ("", *columns.values()):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["case"], *("" if row[key] is None else f"{row[key]:,.0f}" for key in columns))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica", action="store_true", help="be the replica")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream, as fast as they go")
    parser.add_argument("--rate", type=float, default=50.0, help="paced tokens a second of each stream")
    parser.add_argument("--paced-s", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.replica:
        return uvloop.run(serve_replica())
    rounds: dict[str, list[dict[str, Any]]] = {}
    with process(sys.executable, __file__, "--replica", says=r"^(\d+)$") as (_, direct):
        url = f"http://127.0.0.1:{direct}"
        command = ("-m", "turbojax", "serve", "proxy", "--node", url, "--server-port", "0", "--log-level", "warning")
        with process(sys.executable, *command, says=r"http://127.0.0.1:(\d+)/v1") as (pid, proxied):
            wait_healthy(proxied)
            for _ in range(args.rounds):
                for name, port, of in (("direct", direct, None), ("through the proxy", proxied, pid)):
                    rounds.setdefault(name, []).append(measure(name, port, of, args))
    rows = [best(of_one) for of_one in rounds.values()]
    show(rows, args)
    if args.output is not None:
        packages = ("aiohttp", "uvicorn", "starlette", "uvloop")
        versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
        write_results(args.output, versions, rows)


if __name__ == "__main__":
    main()
