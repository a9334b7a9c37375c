"""GET /metrics: what Prometheus reads. docs/metrics.md lists every name with its unit and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response as HttpResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from turbojax import __version__
from turbojax.serve.gate import Gate
from turbojax.serve.tensor_cores import open_tensor_cores

if TYPE_CHECKING:
    from turbojax.api import Pipeline

# Seconds. A request may wait for minutes; a token of a large model on a slow machine takes a second.
REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

router = APIRouter(tags=["operations"])


class Registry(CollectorRegistry):
    """Without the series `_created`: a time for every counter, histogram and set of labels, which no query here needs.

    prometheus_client can leave them out for a whole process alone, and its other registries are not ours to change.
    """

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class RequestMetrics(Collector):
    """Of requests to the engine, counted as their pieces come (`observed`).

    Attributes:
        num_tokens: generated; a plain number, since tokens are too many for a lock each.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, registry=registry, buckets=buckets)

        self.queue = histogram("request_queue_latency", "Seconds until a request took a slot.", REQUEST_BUCKETS)
        self.first_token = histogram(
            "turbojax_time_to_first_token_seconds", "Seconds until a request had a token.", FIRST_TOKEN_BUCKETS
        )
        self.per_token = histogram(
            "turbojax_time_per_output_token_seconds", "Mean seconds between tokens of a request.", TOKEN_BUCKETS
        )
        self.duration = histogram(
            "turbojax_request_duration_seconds", "Seconds until a request had ended.", REQUEST_BUCKETS
        )
        self.finished = Counter(
            "turbojax_requests_finished", "Requests that ended.", ["finish_reason"], registry=registry
        )
        self.refused = Counter(
            "turbojax_requests_refused", "Calls that the engine did not take.", ["error"], registry=registry
        )
        self.num_tokens = 0
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("turbojax_generated_tokens", "Generated tokens.", value=self.num_tokens)


class HttpMetrics:
    """Of what comes over HTTP, whatever it asks for."""

    def __init__(self, registry: CollectorRegistry, gate: Gate) -> None:
        self._responses = Counter(
            "turbojax_http_responses", "Answers.", ["method", "route", "status"], registry=registry
        )
        self._active = Gauge("turbojax_http_requests_active", "Requests being answered.", registry=registry)
        draining = Gauge("turbojax_draining", "1 while no further requests are taken.", registry=registry)
        draining.set_function(lambda: gate.is_draining)

    def answering(self) -> AbstractContextManager[Any]:
        """While a request is answered."""
        return self._active.track_inprogress()

    def count(self, method: str, route: str | None, status: int) -> None:
        """An answer; what clients make up does not become a label."""
        self._responses.labels(method if method in METHODS else "other", route or "none", status).inc()


class EngineCollector(Collector):
    """What the engine knows of itself, asked when somebody reads the metrics."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe

    def collect(self) -> Iterator[Metric]:
        return iter([*self._gauges(), *self._counters()])

    def _gauges(self) -> Iterator[Metric]:
        status = self._pipe.status
        for name, text, value in (
            ("turbojax_requests_running", "Requests with a slot.", status.num_running),
            ("turbojax_requests_waiting", "Requests that wait for a slot.", status.num_waiting),
            ("kv_cache_usage_ratio", "Share of the KV pool that running requests hold.", status.pool_usage),
            (
                "turbojax_engine_stalled_seconds",
                "How long there is work, and no step finishes and no program is compiled.",
                status.stalled_s,
            ),
            ("turbojax_engine_up", "0 once the engine has failed or was closed.", status.failure is None),
        ):
            yield GaugeMetricFamily(name, text, value=float(value))
        pages = GaugeMetricFamily("turbojax_kv_cache_pages", "Pages of the KV pool.", labels=["state"])
        for state in ("held", "idle", "free"):
            pages.add_metric([state], getattr(status, f"num_{state}_pages"))
        yield pages

    def _counters(self) -> Iterator[Metric]:
        counted = self._pipe.metrics
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts that took a slot.", counted.num_prompt_tokens),
            ("cached_prompt_tokens", "Those of them that the prefix cache had.", counted.num_cached_tokens),
            ("requests_cancelled", "Requests that were cancelled.", counted.num_cancelled_requests),
            ("preemptions", "Requests that gave up their pages, to be recomputed.", counted.num_preemptions),
            ("compilations", "Programs compiled, or read from the compilation cache.", counted.num_compilations),
            ("late_compilations", "Those after the engine had all that it needs.", counted.num_late_compilations),
            ("steps", "Steps that finished.", counted.num_steps),
            ("failed_steps", "Steps that raised.", counted.num_failed_steps),
        ):
            yield CounterMetricFamily(f"turbojax_{name}", text, value=value)


class ServerMetrics:
    """All metrics of a server, in a registry of its own: several servers of a process do not mix."""

    def __init__(self, pipe: Pipeline, gate: Gate, model_name: str) -> None:
        self.registry = Registry()
        self.http, self.requests = HttpMetrics(self.registry, gate), RequestMetrics(self.registry)
        info = Gauge("turbojax_info", "What is served, by whom.", ["version", "model"], registry=self.registry)
        info.labels(__version__, model_name).set(1)
        self.registry.register(EngineCollector(pipe))
        ProcessCollector(registry=self.registry)
        tensor_cores = open_tensor_cores()
        if tensor_cores is not None:
            self.registry.register(tensor_cores)


def metrics_of(request: Request) -> ServerMetrics:
    metrics: ServerMetrics = request.app.state.service.metrics
    return metrics


@router.get("/metrics", include_in_schema=False)
def read_metrics(request: Request, metrics: Annotated[ServerMetrics, Depends(metrics_of)]) -> HttpResponse:
    """All metrics, as text or in OpenMetrics' form, whichever the reader accepts."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return HttpResponse(encode(metrics.registry), media_type=content_type)
