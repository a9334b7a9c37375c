"""A proxy in a thread, over nodes that a test has in hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from tests.serve.proxy.fake_node import WAIT_S, FakeNode, wait_until
from turbojax.serve.proxy.app import create_app
from turbojax.serve.proxy.proxy import Proxy
from turbojax.serve.proxy.settings import ProxyConfig
from turbojax.serve.server import background_server
from turbojax.serve.settings import ServeConfig

ADMIN_KEY = "admin-key-1"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Client(httpx.Client):
    """Of one proxy, which tests may look into."""

    def __init__(self, url: str, proxy: Proxy) -> None:
        super().__init__(
            base_url=url, timeout=WAIT_S, trust_env=False, verify=False
        )  # reading certificates takes 0.2 s
        self.proxy = proxy

    def status_of(self, node: FakeNode) -> dict[str, Any]:
        found = self.proxy.fleet.get(node.url)
        return {} if found is None else found.status()

    def wait_up(self, *nodes: FakeNode) -> None:
        wait_until(lambda: all(self.status_of(node).get("is_up") for node in nodes), "coming up")

    def wait_idle(self) -> None:
        """Nothing is under way any more, here or at the nodes."""
        wait_until(lambda: not any(node.load.num_requests for node in self.proxy.fleet), "the end of all requests")
        wait_until(lambda: not self.proxy.gate.num_visits, "the end of all visits")
        assert not any(node.waiting for node in self.proxy.fleet)


@contextmanager
def proxy_over(nodes: Sequence[FakeNode], *, server: dict[str, Any] | None = None, **config: Any) -> Iterator[Client]:
    """A client of a proxy over these nodes, all of them up; at the end nothing is left under way."""
    own = ServeConfig(server_port=0, **(server or {}))
    given = {"routing_strategy": "round_robin", "admin_keys": [ADMIN_KEY], "health_interval_s": 60.0} | config
    app = create_app(ProxyConfig(nodes=[node.url for node in nodes], server=own, **given))
    with background_server(app, own) as url, Client(url, app.state.proxy) as client:
        client.wait_up(*nodes)
        yield client
        client.wait_idle()
