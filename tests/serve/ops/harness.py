"""Servers on engines without a device that stop and go as told, and what clients send them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI

from tests.engine.fake import VOCAB, GatedRunner
from tests.pipeline.harness import EOS, wait_until_idle
from tests.serve.harness import CharTokenizer, service_on, serving
from turbojax.api import Pipeline
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.scheduler import Scheduler
from turbojax.serve.app import create_app
from turbojax.serve.service import Service
from turbojax.serve.settings import ServeConfig

COMPLETION = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
PAGE_LEN, NUM_PAGES = 4, 400


def wait_for(condition: Callable[[], Any], at_most_s: float = 20) -> None:
    deadline = time.monotonic() + at_most_s
    while not condition():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.002)


class PatientRunner(GatedRunner):
    """Runs no step while its gate is shut, however long that is."""

    def dispatch(self, plan: Any) -> Any:
        self.gate.wait()
        return super(GatedRunner, self).dispatch(plan)


@contextmanager
def gated_pipe(num_slots: int = 2, max_queue_len: int | None = None) -> Iterator[tuple[Pipeline, PatientRunner]]:
    """A pipeline whose steps wait for a gate, with a prefix cache; nothing may leak."""
    runner, pool = PatientRunner(num_slots, PAGE_LEN), BlockPool(NUM_PAGES, PAGE_LEN)
    config = SchedulerConfig(num_slots, 300, 64, runner.max_prefill_chunks, max_queue_len=max_queue_len)
    scheduler = Scheduler(config, pool, cache=PrefixCache(pool))
    with Pipeline(runner, scheduler, CharTokenizer(), vocab_size=VOCAB, eos_ids=(EOS,)) as pipe:
        try:
            yield pipe, runner
        finally:
            runner.gate.set()
        assert wait_until_idle(pipe), "something leaked"
        assert pipe.status.num_held_pages == 0


@contextmanager
def serving_service(pipe: Pipeline, **config: Any) -> Iterator[tuple[Service, str]]:
    """A server on a pipeline, and its base url."""
    service = service_on(pipe, ServeConfig(server_port=0, **config))
    with serving(create_app(service)) as url:
        yield service, url


@contextmanager
def gated_server(
    *, num_slots: int = 2, max_queue_len: int | None = None, **config: Any
) -> Iterator[tuple[httpx.Client, Service, PatientRunner]]:
    """A server on a gated pipeline, and a client of it."""
    with (
        gated_pipe(num_slots, max_queue_len) as (pipe, runner),
        serving_service(pipe, **config) as (service, url),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        try:
            yield client, service, runner
        finally:
            runner.gate.set()


def address_of(url: httpx.URL | str) -> tuple[str, int]:
    parts = urlsplit(str(url))
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def raw_request(body: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(head).encode() + body


def talk(url: httpx.URL | str, data: bytes) -> bytes:
    """Sends bytes, and gives all that comes back before the server closes."""
    with closing(socket.create_connection(address_of(url), timeout=20)) as connection:
        connection.sendall(data)
        received = bytearray()
        while piece := connection.recv(65536):
            received += piece
        return bytes(received)


@contextmanager
def leaving_client(client: httpx.Client, completion: dict[str, Any]) -> Iterator[None]:
    """Asks for a completion, and hangs up at the end of the context."""
    body = json.dumps(completion).encode()
    with closing(socket.create_connection(address_of(client.base_url), timeout=20)) as connection:
        connection.sendall(raw_request(body, f"Content-Length: {len(body)}"))
        yield


def error_of(response: httpx.Response) -> tuple[int, str]:
    """The status and the code of an error body."""
    return response.status_code, response.json()["error"]["code"]


@contextmanager
def serving_routes(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of an app of the test's own."""
    with serving(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client
