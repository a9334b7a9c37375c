"""Bodies, room and time have an end; whoever leaves is let go, and the engine is not kept busy for nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from tests.serve.ops.harness import (
    COMPLETION,
    address_of,
    error_of,
    gated_server,
    leaving_client,
    raw_request,
    serving_routes,
    talk,
    wait_for,
)
from turbojax.serve import limits, openai_errors
from turbojax.serve.bodies import MAX_CONTAINERS
from turbojax.serve.gate import Gate
from turbojax.serve.server import background_server
from turbojax.serve.settings import ServeConfig

MANY_TOKENS = COMPLETION | {"max_tokens": 250}


def routes(**config) -> FastAPI:
    """Two routes behind the limits: /echo gives back a body's length, /hang never answers."""
    app = FastAPI()
    openai_errors.install(app)
    settings = ServeConfig(**config)
    app.state.left = threading.Event()

    @app.post("/echo")
    @app.post("/v1/files")
    async def echo(request: Request) -> int:
        return len(await request.body())

    @app.post("/hang")
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            app.state.left.set()

    @app.get("/flood")
    async def flood() -> StreamingResponse:
        async def pieces():
            try:
                while True:
                    yield b"x" * 65536
                    await asyncio.sleep(0)  # as an engine's stream waits now and then: sending alone may never wait
            finally:
                app.state.left.set()

        return StreamingResponse(pieces())

    @app.post("/begin/{kind}")
    async def begin(kind: str) -> StreamingResponse:
        async def pieces():
            yield b"data: 1\n\n"
            await hang()

        return StreamingResponse(pieces(), media_type=f"text/{kind}")

    limits.install(app, settings, Gate(settings.max_concurrent_requests))
    return app


# -- bodies -----------------------------------------------------------------------------------------------


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return raw_request(body, "Transfer-Encoding: chunked", path="/echo")


def test_a_body_may_be_as_large_as_it_may_be_and_not_larger():
    with serving_routes(routes(max_body_bytes=1000)) as client:
        assert client.post("/echo", content=b" " * 1000).json() == 1000
        assert client.post("/echo", content=iter([b" " * 500] * 2)).json() == 1000, "in pieces too"
        assert error_of(client.post("/echo", content=b" " * 1001)) == (413, "body_too_large")


def test_a_body_that_does_not_say_how_large_it_is_is_counted():
    with serving_routes(routes(max_body_bytes=1000)) as client:
        answer = talk(client.base_url, chunked(b" " * 500, b" " * 501))  # and it does not end there
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"code":"body_too_large"' in answer


def test_a_length_alone_is_enough_to_be_refused_and_the_connection_closes():
    with serving_routes(routes(max_body_bytes=1000)) as client:
        answer = talk(client.base_url, raw_request(b"", "Content-Length: 1000000000", path="/echo"))
        assert answer.startswith(b"HTTP/1.1 413 ")


def test_uploads_have_their_own_limit():
    with serving_routes(routes(max_body_bytes=10, max_upload_bytes=1000)) as client:
        assert client.post("/v1/files", content=b" " * 1000).json() == 1000
        assert client.post("/v1/files", content=b" " * 1001).status_code == 413
        answer = client.post("/v1/files", content=iter([b" " * 600] * 2))
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            413,
            "the request's body is larger than 1000 bytes",
        )


def test_a_body_that_does_not_come_is_given_up():
    with serving_routes(routes(receive_timeout_s=0.1)) as client:
        answer = talk(client.base_url, raw_request(b'{"a":', "Content-Length: 100", path="/echo"))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"receive_timeout"' in answer


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_body_that_nests_too_deep_never_reaches_a_reader(opening):
    with serving_routes(routes(max_json_depth=20)) as client:
        bomb = opening * 1_000_000
        assert error_of(client.post("/echo", content=bomb)) == (400, "body_too_deep")
        assert client.post("/echo", content=opening * 20).status_code == 200
        brackets_of_a_text = json.dumps({"text": '["{\\' * 100}).encode()
        assert client.post("/echo", content=brackets_of_a_text).json() == len(brackets_of_a_text)


def test_a_body_of_too_many_small_things_is_refused():
    with serving_routes(routes()) as client:
        most = b"[" + b",".join([b"[]"] * (MAX_CONTAINERS - 1)) + b"]"
        assert client.post("/echo", content=most).json() == len(most)
        assert error_of(client.post("/echo", content=b"[[]," + most[1:])) == (400, "body_too_complex")


# -- room -------------------------------------------------------------------------------------------------


def test_more_than_may_be_answered_at_once_are_told_to_come_back():
    with (
        gated_server(max_concurrent_requests=2) as (client, service, runner),
        ThreadPoolExecutor(2) as threads,
    ):
        runner.gate.clear()
        waiting = [threads.submit(client.post, "/v1/completions", json=COMPLETION) for _ in range(2)]
        wait_for(lambda: service.gate.num_visits == 2)
        refused = client.post("/v1/completions", json=COMPLETION)
        assert error_of(refused) == (429, "too_many_requests")
        assert int(refused.headers["Retry-After"]) >= 1
        assert client.get("/health").status_code == 200, "whoever watches still gets an answer"
        assert client.get("/metrics").status_code == 200
        runner.gate.set()
        assert [answer.result(20).status_code for answer in waiting] == [200, 200]
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200


def test_a_full_queue_of_the_engine_is_told_apart():
    with (
        gated_server(num_slots=1, max_queue_len=0) as (client, service, runner),
        ThreadPoolExecutor(1) as threads,
    ):
        runner.gate.clear()
        waiting = threads.submit(client.post, "/v1/completions", json=COMPLETION)
        wait_for(lambda: service.pipe.status.num_running)
        refused = client.post("/v1/completions", json=COMPLETION)
        assert error_of(refused) == (429, "queue_full")
        assert int(refused.headers["Retry-After"]) >= 1
        runner.gate.set()
        assert waiting.result(20).status_code == 200


# -- time -------------------------------------------------------------------------------------------------


def test_an_answer_that_takes_too_long_is_a_504():
    app = routes(request_timeout_s=0.5)
    with serving_routes(app) as client:
        assert error_of(client.post("/hang")) == (504, "request_timeout")
        assert app.state.left.wait(10)


def test_a_stream_that_takes_too_long_ends_with_an_error_event():
    with serving_routes(routes(request_timeout_s=0.5)) as client:
        lines = client.post("/begin/event-stream").text.split("\n\n")
        assert lines[0] == "data: 1"
        assert json.loads(lines[1].removeprefix("data: "))["error"]["code"] == "request_timeout"


def test_another_answer_that_has_begun_is_broken_off():
    with serving_routes(routes(request_timeout_s=0.5)) as client, pytest.raises(httpx.RemoteProtocolError):
        client.post("/begin/plain")


# -- clients that leave -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_slot_and_pages(stream):
    with gated_server() as (client, service, runner):
        pipe = service.pipe
        runner.gate.clear()
        with leaving_client(client, MANY_TOKENS | {"stream": stream}):
            wait_for(lambda: pipe.status.num_held_pages)
            assert service.gate.num_visits == 1
        wait_for(lambda: service.gate.num_visits == 0)
        runner.gate.set()
        wait_for(lambda: pipe.status.num_running == 0)
        assert pipe.status.num_held_pages == 0
        assert pipe.metrics.num_cancelled_requests == 1
        assert pipe.metrics.num_finished_requests == 0


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_slot_and_pages():
    with gated_server() as (client, service, runner):
        with client.stream("POST", "/v1/completions", json=MANY_TOKENS | {"stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            runner.gate.clear()
        wait_for(lambda: service.gate.num_visits == 0)
        runner.gate.set()
        wait_for(lambda: service.pipe.status.num_running == 0)
        assert service.pipe.metrics.num_cancelled_requests == 1


def test_a_client_that_leaves_before_its_body_is_there_leaves_nothing():
    app = routes()
    with serving_routes(app) as client:
        with closing(socket.create_connection(address_of(client.base_url), timeout=20)) as connection:
            connection.sendall(raw_request(b"{", "Content-Length: 100", path="/hang"))
            wait_for(lambda: app.state.gate.num_visits == 1)
        wait_for(lambda: app.state.gate.num_visits == 0)
        assert not app.state.left.is_set()
        assert client.post("/echo", content=b"1").json() == 1


def test_a_client_that_does_not_read_is_disconnected():
    app = routes()
    config = ServeConfig(server_port=0, send_timeout_s=0.2)
    with (
        background_server(app, config) as url,
        closing(socket.create_connection(address_of(url), timeout=20)) as connection,
    ):
        connection.sendall(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
        assert app.state.left.wait(20)
        wait_for(lambda: app.state.gate.num_visits == 0)


def test_a_client_that_reads_slowly_is_not():
    app = routes()
    config = ServeConfig(server_port=0, send_timeout_s=60)
    with (
        background_server(app, config) as url,
        closing(socket.create_connection(address_of(url), timeout=20)) as connection,
    ):
        connection.sendall(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
        num_bytes = 0
        while num_bytes < 32 << 20:  # more than all buffers hold, so that it was kept waiting again and again
            num_bytes += len(connection.recv(65536))
        assert not app.state.left.is_set()
    assert app.state.left.wait(20)
