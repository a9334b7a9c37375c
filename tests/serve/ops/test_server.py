"""Servers listen, refuse to in one line, drain on a signal, and leave nothing open."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tests.serve.harness import service_on
from tests.serve.ops.harness import COMPLETION, address_of, error_of, gated_pipe, talk, wait_for
from turbojax.errors import ServerError
from turbojax.serve.app import create_app
from turbojax.serve.connections import BUSY
from turbojax.serve.gate import Gate
from turbojax.serve.server import Server, background_server, ending_on_sigterm, listen, run_server, url_of
from turbojax.serve.settings import ServeConfig

ROOT = Path(__file__).parents[3]
STEP_S = 0.02
NUM_STREAMS = 6
SHORT, LONG = ({"max_tokens": num_tokens, "stream": True} for num_tokens in (40, 250))  # 0.8 s, 5 s at least


class Process:
    """A server of `process`, and what came of the streams that it was sent."""

    def __init__(self, **config) -> None:
        command = [sys.executable, "-m", "tests.serve.ops.process", json.dumps(config), str(STEP_S)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.process.communicate()[1]
        self.client = httpx.Client(base_url=self.url, timeout=60, limits=httpx.Limits(max_connections=None))

    def load(self, threads: ThreadPoolExecutor, fields: dict) -> list:
        """Streams, each with its first piece there."""
        begun = threading.Barrier(NUM_STREAMS + 1, timeout=60)
        streams = [threads.submit(self._stream, begun, fields) for _ in range(NUM_STREAMS)]
        begun.wait()
        return streams

    def _stream(self, begun: threading.Barrier, fields: dict) -> list[str]:
        """The data of the events of a stream, as far as it came."""
        events = []
        with self.client.stream("POST", "/v1/completions", json=COMPLETION | fields) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                    if len(events) == 1:
                        begun.wait()
        return events

    def end(self) -> tuple[int, str]:
        """Its exit code and what it logged; nobody listens any more."""
        _, errors = self.process.communicate(timeout=60)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address_of(self.url), timeout=5)
        return self.process.returncode, errors


@contextmanager
def process(**config) -> Iterator[tuple[Process, ThreadPoolExecutor]]:
    server = Process(**config)
    try:
        with ThreadPoolExecutor(NUM_STREAMS + 1) as threads:
            yield server, threads
    finally:
        server.client.close()
        server.process.kill()
        server.process.communicate()


def text_of(events: list[str]) -> str:
    return "".join(json.loads(one)["choices"][0]["text"] for one in events if one != "[DONE]")


def test_a_signal_under_load_lets_what_runs_end_and_takes_nothing_more():
    with process(drain_s=60, log_json=True) as (server, threads):
        whole = server.client.post("/v1/completions", json=COMPLETION | SHORT | {"stream": False}).json()
        streams = server.load(threads, SHORT)
        server.process.terminate()
        wait_for(lambda: server.client.get("/health/ready").status_code == 503)
        assert server.client.get("/health/live").json() == {"status": "draining"}
        refused = server.client.post("/v1/completions", json=COMPLETION)
        assert error_of(refused) == (503, "shutting_down")
        assert int(refused.headers["Retry-After"]) >= 1
        for stream in streams:
            events = stream.result(60)
            assert events[-1] == "[DONE]", "it was cut"
            assert text_of(events) == whole["choices"][0]["text"], "and each token came"
        code, errors = server.end()
        assert code == 0
        lines = [json.loads(line) for line in errors.splitlines()]
        assert sum(line["message"] == "generation" for line in lines) == NUM_STREAMS + 1
        assert not [line for line in lines if line["level"] in ("warning", "error")]


def test_what_has_not_ended_in_time_is_cut_with_an_error():
    with process(drain_s=0.1) as (server, threads):
        streams = server.load(threads, LONG)
        whole = threads.submit(server.client.post, "/v1/completions", json=COMPLETION | LONG | {"stream": False})
        wait_for(lambda: f"http_requests_active {NUM_STREAMS + 2}" in server.client.get("/metrics").text)
        server.process.terminate()
        assert error_of(whole.result(60)) == (503, "shutting_down")
        for stream in streams:
            events = stream.result(60)
            assert json.loads(events[-1])["error"]["code"] == "shutting_down"
            assert "[DONE]" not in events
        code, errors = server.end()
        assert code == 1
        assert f"{NUM_STREAMS + 1} requests are cut" in errors
        assert "Traceback" not in errors


def test_a_second_signal_ends_at_once():
    with process(drain_s=1000) as (server, threads):
        streams = server.load(threads, LONG)
        server.process.terminate()
        wait_for(lambda: server.client.get("/health/ready").status_code == 503)
        server.process.terminate()
        assert all("shutting_down" in stream.result(60)[-1] for stream in streams)
        code, _ = server.end()
        assert code == 1


def test_a_server_with_nothing_to_do_ends_at_once():
    with process(drain_s=1000) as (server, _):
        server.process.send_signal(signal.SIGINT)
        assert server.end()[0] == 0


def load_and_be_told_to_end(closed: list[str]) -> None:
    with ending_on_sigterm(), contextlib.ExitStack() as opened:
        opened.callback(closed.append, "the listener")
        signal.raise_signal(signal.SIGTERM)


def test_while_a_model_loads_a_signal_ends_the_process_and_closes_what_is_open():
    before, closed = signal.getsignal(signal.SIGTERM), list[str]()
    with pytest.raises(SystemExit) as end:
        load_and_be_told_to_end(closed)
    assert end.value.code == 143, "as a shell has it: 128 and the signal"
    assert closed == ["the listener"]
    assert signal.getsignal(signal.SIGTERM) is before


# -- listening --------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_line():
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(ServerError) as error:
            listen(ServeConfig(server_port=port))
    assert str(error.value) == f"port {port} of 127.0.0.1 is in use; choose another server_port (0 takes a free one)"


def test_a_port_that_is_taken_while_the_model_loads_is_found_then():
    config = ServeConfig(server_port=0)
    first = listen(config)
    port = first.getsockname()[1]
    with closing(first), closing(listen(ServeConfig(server_port=port))) as second:
        second.listen()  # whoever listens first has it
        with pytest.raises(ServerError, match=f"port {port} of 127.0.0.1 is in use"):
            Server(plain_app(), config, lambda url: None).run_on(first)


@pytest.mark.parametrize("name", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_one_line(name):
    with pytest.raises(ServerError, match=f"server_name '{name}' is no address of this machine"):
        listen(ServeConfig(server_name=name, server_port=0))


def test_nobody_can_connect_before_the_server_answers():
    with closing(listen(ServeConfig(server_port=0))) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname(), timeout=5)


def test_the_url_names_the_port_that_was_found():
    config = ServeConfig(server_port=0)
    with closing(listen(config)) as listener:
        assert url_of(listener, config) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def plain_app(**options) -> FastAPI:
    """No routes but /hello, behind nothing."""
    app = FastAPI(**options)
    app.state.gate = Gate(10)

    @app.get("/hello")
    async def hello() -> str:
        return "hello"

    return app


def test_a_background_server_serves_until_it_is_left():
    with background_server(plain_app()) as url:
        assert httpx.get(f"{url}/hello", timeout=60).json() == "hello"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/hello", timeout=60)


def test_ipv6_is_an_address_like_another():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    config = ServeConfig(server_name="::1", server_port=0)
    try:
        with background_server(plain_app(), config) as url:
            assert url.startswith("http://[::1]:")
            assert httpx.get(f"{url}/hello", timeout=60).json() == "hello"
    except ServerError as error:
        pytest.skip(f"no IPv6 here: {error}")


# -- connections ------------------------------------------------------------------------------------------


def test_an_app_that_does_not_start_is_never_said_to_be_ready():
    @contextlib.asynccontextmanager
    async def broken(app):
        raise OSError("no such disk")
        yield

    app, said = plain_app(lifespan=broken), []
    with pytest.raises(ServerError, match="did not start"):
        run_server(app, ServeConfig(server_port=0), on_ready=said.append)
    with pytest.raises(ServerError, match="did not start"), background_server(app):
        pytest.fail("it is said to be ready")
    assert not said


def test_more_connections_than_may_be_are_turned_away():
    head, _, body = BUSY.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    with background_server(plain_app(), ServeConfig(server_port=0, max_connections=2)) as url:
        with closing(socket.create_connection(address_of(url))), closing(socket.create_connection(address_of(url))):
            wait_for(lambda: talk(url, b"") == BUSY)
        wait_for(lambda: b"200 OK" in talk(url, b"GET /hello HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"))


@pytest.mark.parametrize("begun", [b"", b"GET /hello HT", b"GET /hello HTTP/1.1\r\nHost: a\r\nX-Slow:"])
def test_headers_that_do_not_come_are_given_up(begun):
    with background_server(plain_app(), ServeConfig(server_port=0, receive_timeout_s=0.1)) as url:
        assert talk(url, begun) == b""


def test_headers_of_the_next_request_that_do_not_come_are_given_up_too():
    with (
        background_server(plain_app(), ServeConfig(server_port=0, receive_timeout_s=1.0)) as url,
        closing(socket.create_connection(address_of(url), timeout=20)) as connection,
    ):
        connection.sendall(b"GET /hello HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(b"GET /hel")
        while connection.recv(65536):
            pass


@pytest.mark.parametrize("long", [b"GET /hello", b"GET /hello HTTP/1.1\r\nHost: a\r\nX-Long: "])
def test_a_head_has_an_end(long):
    """The connection is closed, after a 400 or none: which of the two parsers of uvicorn is there decides."""
    with (
        background_server(plain_app()) as url,
        closing(socket.create_connection(address_of(url), timeout=20)) as connection,
    ):
        connection.sendall(long)
        with contextlib.suppress(ConnectionError):
            for _ in range(64):  # megabytes: more than the system keeps for a reader
                connection.sendall(b"x" * (1 << 20))
            pytest.fail("all was taken")


def test_a_slow_answer_is_no_slow_request():
    """The clock of a connection stops while its request is answered, however long that takes."""
    with gated_pipe() as (pipe, runner):
        config = ServeConfig(server_port=0, receive_timeout_s=1.0)
        with background_server(create_app(service_on(pipe, config)), config) as url, ThreadPoolExecutor(1) as threads:
            runner.gate.clear()
            asked = threads.submit(httpx.post, f"{url}/v1/completions", json=COMPLETION, timeout=30)
            wait_for(lambda: pipe.status.stalled_s > 1.2)
            runner.gate.set()
            assert asked.result(20).status_code == 200


# -- TLS --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[str, str]:
    """A certificate for 127.0.0.1 and its key, by the openssl command."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=turbojax"]
    try:
        subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    return cert, key


def test_with_a_certificate_the_server_speaks_tls(certificate):
    cert, key = certificate
    with background_server(plain_app(), ServeConfig(server_port=0, ssl_certfile=cert, ssl_keyfile=key)) as url:
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=cert)
        assert httpx.get(f"{url}/hello", verify=trusted, timeout=60).json() == "hello"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/hello", timeout=60)
        assert talk(url, b"GET /hello HTTP/1.1\r\n\r\n").startswith(b"HTTP/") is False


def test_files_that_are_no_certificate_are_named_before_anything_starts(certificate, tmp_path):
    cert, key = certificate
    for files in ((str(tmp_path / "missing.pem"), key), (key, cert), (__file__, key)):
        with pytest.raises(ServerError, match="are no certificate and its key") as error:
            listen(ServeConfig(server_port=0, ssl_certfile=files[0], ssl_keyfile=files[1]))
        assert files[0] in str(error.value)
        assert "\n" not in str(error.value)
