"""Runs an application over HTTP: listens, says so, and on a signal lets what runs end before it does."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from turbojax.errors import ServerError
from turbojax.serve.connections import bounded
from turbojax.serve.gate import Gate
from turbojax.serve.settings import ServeConfig
from turbojax.serve.short_turns import short_turns

# Once all is answered or cut: for the last bytes of answers to leave.
CLOSE_S = 2
NOT_STARTED = "the server did not start; its log says why"

log = logging.getLogger(__name__)


def run_server(
    app: FastAPI,
    config: ServeConfig,
    listener: socket.socket | None = None,
    on_ready: Callable[[str], object] = lambda url: None,
) -> bool:
    """Serves until SIGTERM or SIGINT, in the main thread.

    The first signal drains: /health/ready says so, further requests get a 503, and those that run have `drain_s` to
    end, after which they are cut. A second signal cuts them at once.

    Args:
        app: whose `state.gate` knows what is being answered (`limits.install`).
        config: of the server.
        listener: of `listen`; None makes one.
        on_ready: is told the base url once the server answers.

    Returns:
        Whether everything was answered.

    Raises:
        ServerError: it cannot listen there, its certificate cannot be read, or the app does not start.
    """
    server = Server(app, config, on_ready)
    server.run_on(listener or listen(config))
    if not server.started:
        raise ServerError(NOT_STARTED)
    return not server.has_cut


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Has SIGTERM end the process while a model loads or an engine closes; `run_server` has handlers of its own.

    As the first process of a container, one without a handler would not even hear it.
    """
    before = signal.signal(signal.SIGTERM, lambda sig, frame: sys.exit(128 + sig))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def background_server(app: FastAPI, config: ServeConfig | None = None) -> Iterator[str]:
    """A server in a thread, for tests and benchmarks; gives its base url. Without a config, at a free port.

    Raises:
        ServerError: see `run_server`.
    """
    config = config or ServeConfig(server_port=0)
    ready = threading.Event()
    server, listener = Server(app, config, lambda url: ready.set()), listen(config)
    url = url_of(listener, config)
    thread = threading.Thread(target=server.run_on, args=(listener,), name="turbojax-server", daemon=True)
    thread.start()
    try:
        while not ready.wait(0.1):
            if not thread.is_alive():
                raise ServerError(NOT_STARTED)
        yield url
    finally:
        server.should_exit = True
        thread.join()


# -- listening --------------------------------------------------------------------------------------------


def listen(config: ServeConfig) -> socket.socket:
    """A socket at the config's address, which nobody can connect to yet: before a model is loaded is the time for it.

    Raises:
        ServerError: the address is taken or not this machine's; or the certificate cannot be read.
    """
    tls_context(config)
    host, port = config.server_name, config.server_port
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServerError(f"server_name {host!r} is no address of this machine: {error.strerror}") from error
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise cannot_listen(error, host, port) from error
    return listener


def cannot_listen(error: OSError, host: str, port: int) -> ServerError:
    reasons = {
        errno.EADDRINUSE: f"port {port} of {host} is in use; choose another server_port (0 takes a free one)",
        errno.EACCES: f"port {port} needs rights that this user does not have; choose a server_port above 1023",
        errno.EADDRNOTAVAIL: f"server_name {host!r} is no address of this machine",
    }
    return ServerError(reasons.get(error.errno or 0, f"cannot listen at {host} port {port}: {error.strerror}"))


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """What the server proves who it is with; None without a certificate.

    Raises:
        ServerError: the files are missing, or no pair.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except OSError as error:  # SSLError is one
        files = f"{config.ssl_certfile} and {config.ssl_keyfile}"
        what = error.strerror or getattr(error, "reason", None) or error
        raise ServerError(f"{files} are no certificate and its key, without a passphrase, in PEM: {what}") from error
    return context


def url_of(listener: socket.socket, config: ServeConfig) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


# -- serving ----------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """Drains before it ends.

    Attributes:
        has_cut: requests were cut short.
    """

    def __init__(self, app: FastAPI, config: ServeConfig, on_ready: Callable[[str], object]) -> None:
        context = tls_context(config)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # `logs` has its own lines
                access_log=False,
                server_header=False,
                ws="none",
                timeout_graceful_shutdown=CLOSE_S,
                ssl_context_factory=None if context is None else lambda *_: context,
            )
        )
        gate: Gate = app.state.gate
        self._own_config, self._gate, self._on_ready = config, gate, on_ready
        self._drain_until_s: float | None = None
        self.has_cut = False

    def run_on(self, listener: socket.socket) -> None:
        """Serves until it is told to end; or not at all, with `started` false, where the app does not start.

        Raises:
            ServerError: somebody else listens there by now.
        """
        self.config.load()
        self.config.http_protocol_class = bounded(self.config.http_protocol_class, self._own_config)
        with listener, short_turns():
            host, port = listener.getsockname()[:2]
            try:
                listener.listen(self.config.backlog)
            except OSError as error:
                raise cannot_listen(error, host, port) from error
            try:
                self.run(sockets=[listener])
            except SystemExit:  # newer uvicorns end so where an app does not start; older ones return
                if self.started:
                    raise

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:  # else the app has failed, as one whose folder of batches cannot be read
            for listener in sockets or ():
                self._on_ready(url_of(listener, self._own_config))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Hears a signal. (It is not raised again at the end: the process ends by itself, with its own exit code.)"""
        if self._drain_until_s is None:
            self._gate.is_draining = True
            self._drain_until_s = time.monotonic() + self._own_config.drain_s
        else:
            self._drain_until_s = 0.0

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self._drain_until_s is not None and not self.should_exit:
            self.should_exit = self._gate.num_visits == 0
            if not self.should_exit and time.monotonic() >= self._drain_until_s:
                self.has_cut, self.should_exit = True, True
                log.warning("%d requests are cut", self._gate.num_visits)
                self._gate.cut_all()
        return await super().on_tick(counter)
