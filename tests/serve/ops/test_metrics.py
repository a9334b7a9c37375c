"""Metrics say what happened, and the documentation says which there are."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.ops.harness import (
    COMPLETION,
    NUM_PAGES,
    PAGE_LEN,
    gated_pipe,
    gated_server,
    leaving_client,
    serving_service,
    wait_for,
)
from tests.serve.ops.test_tensor_cores import fake_nvml
from turbojax.serve.gate import Gate
from turbojax.serve.metrics import ServerMetrics

ROOT = Path(__file__).parents[3]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(client: httpx.Client) -> Samples:
    """All samples, by name and labels."""
    answer = client.get("/metrics").raise_for_status()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


class Metrics:
    """What changed between two readings."""

    def __init__(self, client: httpx.Client) -> None:
        self._client, self._before = client, read(client)

    def __call__(self, name: str, **labels: str) -> float:
        key = name, frozenset(labels.items())
        return read(self._client).get(key, 0.0) - self._before.get(key, 0.0)


def complete(client: httpx.Client, **fields) -> httpx.Response:
    return client.post("/v1/completions", json=COMPLETION | fields)


def test_counts_are_those_of_what_was_asked():
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    with gated_server() as (client, service, _):
        metrics = Metrics(client)
        answers = [complete(client, prompt=prompt, max_tokens=num) for num in (8, 3)]
        wait_for(lambda: service.pipe.status.num_running == 0)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert metrics("turbojax_requests_finished_total", finish_reason="length") == 2
        assert metrics("turbojax_requests_finished_total", finish_reason="stop") == 0
        assert metrics("turbojax_generated_tokens_total") == 8 + 3
        assert metrics("turbojax_prompt_tokens_total") == 2 * len(prompt)
        # The second time the pages that the prompt fills are there, and of the one behind them its tokens.
        assert (
            metrics("turbojax_cached_prompt_tokens_total")
            == answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            == len(prompt) - 1
        )
        assert metrics("turbojax_steps_total") == service.pipe.metrics.num_steps
        for name in ("request_queue_latency", "turbojax_time_to_first_token_seconds"):
            assert metrics(f"{name}_count") == 2
        for name in ("time_per_output_token", "request_duration"):
            assert metrics(f"turbojax_{name}_seconds_count") == 2
        assert metrics("turbojax_preemptions_total") == metrics("turbojax_failed_steps_total") == 0


def test_every_sample_of_every_prompt_counts():
    with gated_server(num_slots=4) as (client, _, _):
        metrics = Metrics(client)
        fields = {"prompt": [[1, 2], [3]], "n": 2, "temperature": 1.0, "seed": 1, "max_tokens": 5}
        assert len(complete(client, **fields).json()["choices"]) == 4
        assert metrics("turbojax_requests_finished_total", finish_reason="length") == 4
        assert metrics("turbojax_generated_tokens_total") == 20
        assert metrics("request_queue_latency_count") == 4


def test_times_are_within_what_the_client_saw():
    with gated_server(num_slots=1) as (client, service, runner), ThreadPoolExecutor(2) as threads:
        metrics = Metrics(client)
        runner.gate.clear()
        start = time.monotonic()
        asked = [threads.submit(complete, client, max_tokens=20) for _ in range(2)]
        wait_for(lambda: service.pipe.status.num_running + service.pipe.status.num_waiting == 2)
        shut = time.monotonic()
        wait_for(lambda: time.monotonic() > shut + 0.05)
        runner.gate.set()
        assert [answer.result(20).status_code for answer in asked] == [200, 200]
        took = time.monotonic() - start
        queue, first, whole = (
            metrics(f"{name}_sum")
            for name in (
                "request_queue_latency",
                "turbojax_time_to_first_token_seconds",
                "turbojax_request_duration_seconds",
            )
        )
        assert 0.05 < queue <= first <= whole < 2 * took, "the one that waited did so while the gate was shut"
        per_token = metrics("turbojax_time_per_output_token_seconds_sum")
        assert per_token * 19 == pytest.approx(whole - first, rel=1e-2, abs=1e-3)


def test_gauges_say_who_runs_and_waits_and_what_they_hold():
    with gated_server(num_slots=1) as (client, service, runner), ThreadPoolExecutor(3) as threads:
        pipe = service.pipe
        runner.gate.clear()
        asked = [threads.submit(complete, client, prompt=[i] * 9) for i in (1, 2, 3)]
        wait_for(lambda: (pipe.status.num_running, pipe.status.num_waiting) == (1, 2))
        found = read(client)

        def value(name: str, **labels: str) -> float:
            return found[name, frozenset(labels.items())]

        num_held = -(-9 // PAGE_LEN)
        assert value("turbojax_requests_running") == 1
        assert value("turbojax_requests_waiting") == 2
        assert value("kv_cache_usage_ratio") == num_held / (NUM_PAGES - 1)
        assert value("turbojax_kv_cache_pages", state="held") == num_held
        assert sum(value("turbojax_kv_cache_pages", state=s) for s in ("held", "idle", "free")) == NUM_PAGES - 1
        assert value("turbojax_http_requests_active") == 4, "this reading is one"
        assert value("turbojax_engine_stalled_seconds") > 0
        assert value("turbojax_engine_up") == 1
        assert value("turbojax_draining") == 0
        runner.gate.set()
        assert [answer.result(20).status_code for answer in asked] == [200] * 3
        wait_for(lambda: pipe.status.num_running == 0)
        found = read(client)
        assert value("kv_cache_usage_ratio") == value("turbojax_requests_running") == 0
        assert value("turbojax_kv_cache_pages", state="idle") > 0, "the prefix cache keeps what was computed"
        assert value("turbojax_http_requests_active") == 1


def test_who_leaves_is_cancelled_and_who_is_refused_never_ran():
    with gated_server() as (client, service, runner):
        metrics = Metrics(client)
        runner.gate.clear()
        with leaving_client(client, COMPLETION):
            wait_for(lambda: service.pipe.status.num_running)
        wait_for(lambda: service.gate.num_visits == 0)
        runner.gate.set()
        wait_for(lambda: service.pipe.status.num_running == 0)
        too_long = complete(client, prompt=[1] * 400)
        assert too_long.status_code == 400
        assert metrics("turbojax_requests_cancelled_total") == 1
        assert metrics("turbojax_requests_refused_total", error="PromptTooLongError") == 1
        assert metrics("turbojax_requests_finished_total", finish_reason="length") == 0
        responses = {"method": "POST", "route": "/v1/completions"}
        assert metrics("turbojax_http_responses_total", **responses, status="499") == 1
        assert metrics("turbojax_http_responses_total", **responses, status="400") == 1


def test_what_clients_make_up_becomes_no_label():
    with gated_server(api_keys=("sk-test-key",)) as (client, _, _):
        client.headers["Authorization"] = "Bearer sk-test-key"
        for path in ("/no/such", "/v1/models/one", "/v1/models/two"):
            assert client.get(path).status_code == 404
        client.request("PROPFIND", "/v1/models")
        assert client.get("/v1/models", headers={"Authorization": ""}).status_code == 401
        labels = {
            (dict(labels)["method"], dict(labels)["route"], dict(labels)["status"])
            for name, labels in read(client)
            if name == "turbojax_http_responses_total"
        }
        assert labels == {
            ("GET", "none", "404"),
            ("GET", "/v1/models/{model:path}", "404"),
            ("other", "/v1/models", "405"),
            ("GET", "none", "401"),
        }


def test_an_engine_that_was_closed_is_down():
    with gated_pipe() as (pipe, _), serving_service(pipe) as (_, url), httpx.Client(base_url=url, timeout=60) as client:
        pipe.close()
        assert read(client)["turbojax_engine_up", frozenset()] == 0


def test_readers_of_openmetrics_get_it():
    with gated_server() as (client, _, _):
        answer = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert answer.text.endswith("# EOF\n")


def test_when_a_series_was_made_is_left_out_here_and_not_elsewhere(registry):
    registry_of_another = CollectorRegistry()
    for of in (registry, registry_of_another):
        Counter("asked", "Asked.", registry=of).inc()
    for encode in (generate_latest, openmetrics.generate_latest):
        assert b"_created" not in encode(registry)
        assert b"asked_total 1.0" in encode(registry)
        assert b"asked_created" in encode(registry_of_another)


# -- documentation ----------------------------------------------------------------------------------------


def families(registry: CollectorRegistry) -> dict[str, str]:
    return {family.name: family.type for family in registry.collect()}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch):
    """Of a server whose GPU has counters."""
    fake_nvml(monkeypatch)
    with gated_pipe() as (pipe, _):
        yield ServerMetrics(pipe, Gate(1), "tiny").registry


def documented() -> dict[str, tuple[str, list[str]]]:
    """Type and labels by name, from the table."""
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs/metrics.md").read_text().splitlines() if "| `" in line]
    return {name.strip(" `"): (kind.strip(), labels.replace(" ", "").split(",")) for name, kind, labels, _ in rows}


def test_the_documentation_lists_every_metric_with_its_type(registry):
    assert {name: kind for name, (kind, _) in documented().items()} == families(registry)


def test_the_documentation_lists_the_labels(registry):
    names = {name: sorted(labels) if labels != [""] else [] for name, (_, labels) in documented().items()}
    for collector in registry._collector_to_names:
        labels = getattr(collector, "_labelnames", None)
        if labels is not None:
            assert names[collector._name] == sorted(labels)
    for family in registry.collect():
        for sample in family.samples:
            assert sorted(set(sample.labels) - {"le"}) == names[family.name]
