"""What the proxy counts, in Prometheus's form; docs/proxy.md says what each means."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from turbojax.serve.gate import Gate
from turbojax.serve.metrics import FIRST_TOKEN_BUCKETS, REQUEST_BUCKETS, HttpMetrics, Registry
from turbojax.serve.proxy.fleet import Fleet

_BUCKETS = tuple(sorted({*FIRST_TOKEN_BUCKETS, *REQUEST_BUCKETS}))


class ProxyMetrics:
    """Counters of one proxy. Labels are the operator's nodes and kinds of ends, never what a client wrote."""

    def __init__(self, fleet: Fleet, gate: Gate) -> None:
        self.registry = Registry()
        self.http = HttpMetrics(self.registry, gate)
        self.tries = Counter(
            "turbojax_proxy_tries", "Requests given to a node.", ["node", "outcome"], registry=self.registry
        )
        self.first_byte = Histogram(
            "turbojax_proxy_first_byte_seconds",
            "Seconds from a request to the first byte of its answer.",
            ["node"],
            registry=self.registry,
            buckets=_BUCKETS,
        )
        self.registry.register(_Nodes(fleet))
        ProcessCollector(registry=self.registry)

    def forget(self, url: str) -> None:
        """A node is gone."""
        for metric in (self.tries, self.first_byte):
            metric.remove_by_labels({"node": url})


class _Nodes(Collector):
    """The nodes as they stand when somebody asks."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> list[GaugeMetricFamily]:
        return [
            GaugeMetricFamily(f"turbojax_proxy_node_{name}", text, labels=["node"])
            for name, text in (
                ("up", "1 while the node may be asked."),
                ("requests", "Requests that the node has."),
                ("outstanding_tokens", "Work that they are expected to be still, in generated tokens."),
                ("tokens_per_second", "Work that the node did a second while it had any."),
            )
        ]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families = self.describe()
        for node in self._fleet:
            values = (node.health.is_up, node.load.num_requests, node.load.outstanding, node.load.speed or 0.0)
            for family, value in zip(families, values, strict=True):
                family.add_metric([node.url], float(value))
        yield from families
