"""What the routes of the proxy share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from turbojax.serve.gate import Gate
from turbojax.serve.proxy.checks import Checks
from turbojax.serve.proxy.fleet import Fleet
from turbojax.serve.proxy.metrics import ProxyMetrics
from turbojax.serve.proxy.node import Node
from turbojax.serve.proxy.routing import STRATEGIES
from turbojax.serve.proxy.settings import ProxyConfig
from turbojax.serve.proxy.upstream import Upstream


class Proxy:
    """Nodes, the connections to them, their checks and counters; routes find it as `request.app.state.proxy`."""

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config
        self.gate = Gate(config.server.max_concurrent_requests)
        self.fleet = Fleet(
            STRATEGIES[config.routing_strategy](),
            interval_s=config.health_interval_s,
            max_connections=config.max_node_connections,
        )
        self.fleet.on_gone = self._gone
        self.metrics = ProxyMetrics(self.fleet, self.gate)
        self.upstream = Upstream(config)
        self.checks = Checks(self.fleet, self.upstream)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connections and checks, in this event loop, from the nodes that the config names on."""
        async with self.upstream.opened():
            for url in self.config.nodes:
                self.checks.start(self.fleet.add(url, self.config.node_api_key))
            try:
                yield
            finally:
                await self.checks.close()

    def _gone(self, node: Node) -> None:
        self.checks.stop(node)
        self.metrics.forget(node.url)


def proxy_of(request: Request) -> Proxy:
    """The proxy of the app that a request came to; routes depend on it."""
    proxy: Proxy = request.app.state.proxy
    return proxy
