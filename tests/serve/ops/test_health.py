"""Probes: an engine that is stuck, has failed or was closed is not alive; a server that drains is not ready."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.engine.fake import VOCAB, FakeRunner
from tests.serve.harness import CharTokenizer
from tests.serve.ops.harness import (
    COMPLETION,
    error_of,
    gated_pipe,
    gated_server,
    leaving_client,
    serving_service,
    wait_for,
)
from turbojax.api import Pipeline
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.scheduler import Scheduler


def probes(client) -> dict[str, tuple[int, str]]:
    found = {}
    for name in ("live", "ready"):
        answer = client.get(f"/health/{name}")
        found[name] = answer.status_code, answer.json()["status"]
    answer = client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == found["ready"], "one address alone means: send requests"
    return found


def both(status: int, state: str) -> dict[str, tuple[int, str]]:
    return {"live": (status, state), "ready": (status, state)}


def test_an_engine_with_nothing_to_do_is_healthy_however_long():
    with gated_server(stall_s=0.01) as (client, service, _):
        service.pipe._loop._progress_s -= 1000
        assert probes(client) == both(200, "ok")


def test_a_stuck_engine_is_unhealthy_until_it_goes_on():
    with gated_server(stall_s=0.05) as (client, service, runner), ThreadPoolExecutor(1) as threads:
        runner.gate.clear()
        asked = threads.submit(client.post, "/v1/completions", json=COMPLETION)
        wait_for(lambda: service.pipe.status.stalled_s > 0.05)
        assert probes(client) == both(503, "stuck")
        runner.gate.set()
        assert asked.result(20).status_code == 200
        wait_for(lambda: service.pipe.status.stalled_s == 0)
        assert probes(client) == both(200, "ok")


def test_an_engine_is_stuck_though_all_its_clients_have_left():
    with gated_server(stall_s=0.05) as (client, service, runner):
        runner.gate.clear()
        with leaving_client(client, COMPLETION):
            wait_for(lambda: service.pipe.status.num_running)
        wait_for(lambda: service.gate.num_visits == 0)
        wait_for(lambda: service.pipe.status.stalled_s > 0.05)
        assert probes(client) == both(503, "stuck")


def test_a_busy_engine_is_not_stuck():
    with gated_server(stall_s=100.0) as (client, service, runner), ThreadPoolExecutor(1) as threads:
        runner.gate.clear()
        asked = threads.submit(client.post, "/v1/completions", json=COMPLETION)
        wait_for(lambda: service.pipe.status.num_running)
        assert probes(client) == both(200, "ok")
        runner.gate.set()
        asked.result(20)


class LostRunner(FakeRunner):
    """Its device is gone."""

    def dispatch(self, plan):
        raise RuntimeError("bus error at 0xdead")

    def reset(self):
        raise RuntimeError("no device")


def test_an_engine_that_has_failed_is_unhealthy_and_says_no_more_than_that():
    scheduler = Scheduler(SchedulerConfig(2, 300, 64, 4), BlockPool(40, 4))
    with (
        Pipeline(LostRunner(2, 4), scheduler, CharTokenizer(), vocab_size=VOCAB, eos_ids=(7,)) as pipe,
        serving_service(pipe) as (_, url),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        assert probes(client) == both(200, "ok")
        assert client.post("/v1/completions", json=COMPLETION).status_code == 500
        wait_for(lambda: pipe.status.failure)
        assert probes(client) == both(503, "failed")
        assert set(client.get("/health").json()) == {"status"}
        assert error_of(client.post("/v1/completions", json=COMPLETION)) == (500, "engine_failed")


def test_an_engine_that_was_closed_is_unhealthy():
    with (
        gated_pipe() as (pipe, _),
        serving_service(pipe) as (_, url),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        pipe.close()
        assert probes(client) == both(503, "failed")
        assert client.post("/v1/completions", json=COMPLETION).status_code == 503


def test_a_server_that_drains_lives_and_is_not_ready():
    with gated_server() as (client, service, _):
        service.gate.is_draining = True
        assert probes(client) == {"live": (200, "draining"), "ready": (503, "draining")}
        refused = client.post("/v1/completions", json=COMPLETION)
        assert error_of(refused) == (503, "shutting_down")
        assert int(refused.headers["Retry-After"]) >= 1
        assert client.get("/metrics").status_code == 200
