"""A client that takes as little of the shared cores as it can: one thread, plain sockets, answers read at their end."""

from __future__ import annotations

import json
import re
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

READ_BYTES = 1 << 16
END = b"data: [DONE]"
LETTERS_OF_TOKEN = 2
# A client on another machine costs the server's no wake-up for each event; one that slept on its sockets would.
POLL_S = 0.002


@dataclass
class Stream:
    """One answer as its bytes come; (when, bytes) of each read."""

    connection: socket.socket
    reads: list[tuple[float, bytes]] = field(default_factory=list)

    def read(self) -> bool:
        """Takes what is there; whether the answer is complete."""
        part = self.connection.recv(READ_BYTES)
        assert part, self.text[-300:]
        self.reads.append((time.perf_counter(), part))
        return END in b"".join(part for _, part in self.reads[-2:])

    @property
    def text(self) -> bytes:
        return b"".join(part for _, part in self.reads)

    def tokens(self) -> list[tuple[float, int]]:
        """(when, how many) of each event: a token is so many letters of text."""
        found, ends, end = [], [], 0
        for at_s, part in self.reads:
            end += len(part)
            ends.append((end, at_s))
        reads = iter(ends)
        end, at_s = next(reads)
        for match in re.finditer(rb'"content":"([a-z]*)"', self.text):
            while match.end() > end:
                end, at_s = next(reads)
            if match[1]:
                found.append((at_s, len(match[1]) // LETTERS_OF_TOKEN))
        return found


def run(url: str, bodies: list[bytes]) -> dict[str, Any]:
    """Sends chats at once, each over a connection of its own, and reads all answers."""
    address = urlsplit(url)
    assert address.hostname is not None
    with selectors.DefaultSelector() as selector:
        streams = []
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for body in bodies:
            connection = socket.create_connection((address.hostname, address.port or 80), timeout=300)
            head = f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            streams.append(Stream(connection))
            selector.register(connection, selectors.EVENT_READ, streams[-1])
        num_open = len(streams)
        while num_open:
            time.sleep(POLL_S)
            for key, _ in selector.select(0):
                if key.data.read():
                    selector.unregister(key.fileobj)
                    num_open -= 1
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    for stream in streams:
        stream.connection.close()
    return {"streams": [stream.tokens() for stream in streams], "seconds": seconds, "cpu_s": cpu_s}


def main() -> None:
    """`lean_client.py URL`, then a line of JSON on standard input: {"prompts": [...], "max_tokens": N}."""
    print("ready", flush=True)
    asked = json.loads(sys.stdin.readline())
    common = {"model": "tiny", "max_tokens": asked["max_tokens"], "ignore_eos": True, "stream": True}
    bodies = [
        json.dumps(common | {"messages": [{"role": "user", "content": prompt}]}).encode() for prompt in asked["prompts"]
    ]
    print(json.dumps(run(sys.argv[1], bodies)))


if __name__ == "__main__":
    main()
