"""Connections: how many there may be, and how long one that neither asks nor reads is kept."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from turbojax.serve.openai_errors import OVERLOADED, RETRY_AFTER_S, ApiError
from turbojax.serve.settings import ServeConfig

# Of a request line and headers. h11 has a limit of its own, which is lower; httptools has none.
MAX_HEAD_BYTES = 1 << 16
# What is sent where no request was read: there is no application to say it.
_TOLD = ApiError(503, "too many connections are open; try again later", OVERLOADED, code="too_many_connections")
_BODY = json.dumps(_TOLD.body).encode()
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Retry-After: %d\r\nConnection: close\r\n\r\n%s"
) % (len(_BODY), RETRY_AFTER_S, _BODY)


def bounded(protocol: type[asyncio.Protocol], config: ServeConfig) -> type[asyncio.Protocol]:
    """uvicorn's protocol for HTTP with an end to all that a client may leave open."""
    base: Any = protocol

    class Bounded(base):
        """Two clocks: until the head of the next request is there, and until a client reads on."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._num_head_bytes = 0
            self._asking, self._reading = Clock(), Clock()
            if len(self.connections) > config.max_connections:
                transport.write(BUSY)
                transport.close()
            else:
                self._asking.start(config.receive_timeout_s, self._hang_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_answering:
                self._asking.stop()
                self._num_head_bytes = 0
                return
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.close()
            self._asking.start(config.receive_timeout_s, self._hang_up)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reading.start(config.send_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._reading.stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._asking.stop()
            self._reading.stop()
            super().connection_lost(exc)

        @property
        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _hang_up(self) -> None:
            if not self._is_answering:
                self.transport.close()

    return Bounded


class Clock:
    """Rings once, unless it is stopped; starting one that runs changes nothing."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def start(self, after_s: float, ring: Any) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(after_s, ring)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
