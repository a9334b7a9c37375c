"""Connections that ask nothing end, and no more are open at once than may be."""

from __future__ import annotations

import asyncio
from typing import Any

# What is sent where no request was read: there is no application to say it.
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 21\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\ntoo many connections\n"
)


def bounded(protocol: type[asyncio.Protocol], max_connections: int, receive_timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol for HTTP, bounded: connections, and the time until the headers of a request are there."""
    base: Any = protocol

    class Bounded(base):
        """Between requests a clock runs, from the first byte that was not answered, or from the connection's start."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._clock: asyncio.TimerHandle | None = None
            if len(self.connections) > max_connections:
                transport.write(BUSY)
                transport.close()
            else:
                self._start_clock()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                if self._clock is None:
                    self._start_clock()
            else:
                self._stop_clock()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_clock()
            super().connection_lost(exc)

        def _start_clock(self) -> None:
            self._clock = asyncio.get_running_loop().call_later(receive_timeout_s, self._give_up)

        def _stop_clock(self) -> None:
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None

        def _give_up(self) -> None:
            """Closes, unless a request is being answered."""
            self._clock = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Bounded
