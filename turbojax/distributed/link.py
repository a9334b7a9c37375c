"""A connection between two processes of a job: plain values in frames, and an error that names whoever is lost."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from turbojax.distributed.wire import LENGTH, MAX_FRAME_BYTES, decode, framed
from turbojax.errors import ClusterError, ClusterMismatchError, ProcessLostError

PROTOCOL = 1
# A host that is gone is noticed by the system after 5 + 3 * 2 s, whatever this process is busy with.
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}


class Link:
    """A connection to another process. One thread receives; any may send."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._connection, self._lock = connection, threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, value: Any) -> None:
        """
        Raises:
            ProcessLostError: the other process is gone.
            ClusterError: the value is too large.
        """
        frame = framed(value)
        try:
            with self._lock:
                self._connection.sendall(frame)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> Any:
        """The next value; waits for it.

        Raises:
            ProcessLostError: the other process is gone, or said nothing within the timeout.
            ClusterError: what came is too large, or no message.
        """
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        if length > max_bytes:
            raise ClusterError(f"{self.name} sends a message of {length} bytes; accepted: at most {max_bytes}")
        return decode(self._read(length))

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            try:
                count = self._connection.recv_into(view[got:])
            except OSError as error:
                raise self._lost(error) from error
            if count == 0:
                raise self._lost("it closed its connection")
            got += count
        return bytes(data)

    def _lost(self, reason: object) -> ProcessLostError:
        return ProcessLostError(f"{self.name} is lost: {reason}")

    def expect(self, *names: str, max_bytes: int = MAX_FRAME_BYTES) -> tuple[Any, ...]:
        """The fields of the next value, which must be a dict with these names, or say that we are refused.

        Raises:
            ClusterMismatchError: the other process refuses us, and why.
            ClusterError: see `receive`; or it is something else.
        """
        value = self.receive(max_bytes)
        if isinstance(value, dict) and isinstance(value.get("refused"), str):
            raise ClusterMismatchError(value["refused"])
        if not isinstance(value, dict) or value.keys() != set(names):
            raise ClusterError(f"{self.name} speaks another protocol than version {PROTOCOL} of turbojax's")
        return tuple(value[name] for name in names)

    def wait_for(self, seconds: float | None) -> None:
        """How long sending and receiving wait from now on; None: for ever."""
        self._connection.settimeout(seconds)

    def finish(self) -> None:
        """Nothing more is sent. What was arrives, which closing at once could prevent: the other side closes then."""
        with contextlib.suppress(OSError):  # it was faster
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends the connection, also under a thread that receives."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
