"""Replicas that do what a test tells them, byte for byte: they wait, stop in the middle, refuse, vanish and return."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

WAIT_S = 20.0


def wait_until(holds: Callable[[], Any], what: str = "it") -> Any:
    """Until `holds()`, whose value it gives; bounded."""
    end_s = time.monotonic() + WAIT_S
    while not (value := holds()):
        assert time.monotonic() < end_s, f"{what} did not happen"
        time.sleep(0.002)
    return value


class Loop:
    """An event loop in a thread, for all nodes of a test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="nodes", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


class Gate:
    """Opened by the test, awaited by a node."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._event = loop, asyncio.Event()

    def open(self) -> None:
        self._loop.loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await asyncio.wait_for(self._event.wait(), WAIT_S)


@dataclass
class Received:
    """A request as it came."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Connection:
    """One request's way back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.num_sent = 0

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()
        self.num_sent += len(data)

    async def start(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        """Status and headers of a body in chunks."""
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", "Transfer-Encoding: chunked"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def whole(self, body: Any, status: int = 200, **headers: str) -> None:
        """A JSON body that says its length."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(text)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join([*lines, "", ""]).encode() + text)

    def abort(self) -> None:
        """As when the process is killed: no end of anything."""
        self._writer.transport.abort()

    @property
    def is_closed(self) -> bool:
        """By the other side, or by the node itself."""
        return self._reader.at_eof() or self._writer.transport.is_closing()


Answer = Callable[[Received, Connection], Awaitable[None]]


async def echo(received: Received, connection: Connection) -> None:
    """A whole answer that has the request in it."""
    await connection.whole({"target": received.target, "body": received.body.decode("utf-8", "replace")})


async def never(received: Received, connection: Connection) -> None:
    """No answer at all."""
    await asyncio.sleep(3600)


@dataclass
class FakeNode:
    """A replica. What tests change: `answer`, `health`, `models`.

    Attributes:
        answer: what it does with a POST.
        health: status and body of /health; None never answers it.
        models: names in /v1/models.
        received: POSTs, as they came.
        connections: of these, in the same order.
    """

    loop: Loop
    answer: Answer = echo
    health: tuple[int, Any] | None = (200, {"status": "ok"})
    models: tuple[str, ...] = ("tiny",)
    received: list[Received] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    checks: list[Received] = field(default_factory=list)
    port: int = 0

    def start(self) -> FakeNode:
        """Listens; at the same port again after `stop`."""
        self.loop.run(self._start())
        return self

    async def _start(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """As when the process is killed."""
        self.loop.run(self._stop())

    async def _stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while not writer.transport.is_closing():
                await self._answer(await _read(reader), Connection(reader, writer))
        except (ConnectionError, EOFError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, received: Received, connection: Connection) -> None:
        if received.method == "POST":
            self.received.append(received)
            self.connections.append(connection)
            await self.answer(received, connection)
            return
        self.checks.append(received)
        if received.target == "/v1/models":
            await self.answer_models(connection)
        elif self.health is None:
            await asyncio.sleep(3600)
        else:
            await connection.whole(self.health[1], self.health[0])

    async def answer_models(self, connection: Connection) -> None:
        await connection.whole({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})


async def _read(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Received(method, target, headers, body)


@contextmanager
def nodes(number: int) -> Iterator[tuple[FakeNode, ...]]:
    """So many replicas, in one thread."""
    loop = Loop()
    made = tuple(FakeNode(loop).start() for _ in range(number))
    try:
        yield made
    finally:
        for node in made:
            node.stop()
        loop.close()
