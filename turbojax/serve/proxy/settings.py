"""What the command line says of the proxy: ProxyConfig."""

from __future__ import annotations

from dataclasses import dataclass, field

from turbojax.errors import ConfigError
from turbojax.rules import as_tuple, check, is_int, is_real
from turbojax.serve.proxy import DEFAULT_PORT
from turbojax.serve.proxy.addresses import node_url
from turbojax.serve.settings import SECONDS, Rules, ServeConfig, is_key

STRATEGIES = ("min_expected_latency", "prefix_affinity", "round_robin", "random")  # `routing` has them


@dataclass(frozen=True)
class ProxyConfig:
    """Where the nodes are and how requests get to them. Names follow LMDeploy's `serve proxy`.

    Attributes:
        nodes: base URLs of the replicas there from the start.
        server: the proxy as a server: address, keys of clients, TLS, limits, times, logs.
        routing_strategy: "min_expected_latency", "prefix_affinity", "round_robin" or "random".
        admin_keys: for /nodes/*; without one these routes refuse everybody.
        node_api_key: sent to nodes in place of what clients send; None passes that on.
        max_node_connections: requests that a node is given at once; when all have as many, more get a 429.
        max_tries: nodes that a request is given to, as long as its client has got nothing.
        connect_timeout_s: to reach a node.
        first_byte_timeout_s: until the first byte of an answer, the time in the node's queue included.
        idle_timeout_s: between two pieces of an answer, and until a client takes one.
        health_interval_s: between two checks of a node that is up.
        health_timeout_s: of each request of a check.

    Raises:
        ConfigError: a field is out of range.
    """

    nodes: tuple[str, ...] = ()
    server: ServeConfig = field(default_factory=lambda: ServeConfig(server_port=DEFAULT_PORT))
    routing_strategy: str = "min_expected_latency"
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    node_api_key: str | None = field(default=None, repr=False)
    max_node_connections: int = 1024
    max_tries: int = 3
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    health_interval_s: float = 5.0
    health_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("nodes", "admin_keys"):
            object.__setattr__(self, name, as_tuple("ProxyConfig", name, getattr(self, name)))
        object.__setattr__(self, "nodes", tuple(dict.fromkeys(node_url(node) for node in self.nodes)))
        check("ProxyConfig", self, self._rules())
        if not all(map(is_key, self.admin_keys)):  # the message must not show them
            accepted = "texts of visible ASCII characters, 8 at least"
            raise ConfigError("ProxyConfig", "admin_keys", f"{len(self.admin_keys)} keys", accepted)
        if not (self.node_api_key is None or is_sendable(self.node_api_key)):
            raise ConfigError("ProxyConfig", "node_api_key", "...", "None or a text of visible ASCII characters")

    def _rules(self) -> Rules:
        rules = {"routing_strategy": (self.routing_strategy in STRATEGIES, f"one of {', '.join(STRATEGIES)}")}
        for name in ("max_node_connections", "max_tries"):
            rules[name] = (is_int(getattr(self, name), 1), "an int of 1 at least")
        for name in self.__dataclass_fields__:
            if name.endswith("_s"):
                rules[name] = (is_real(getattr(self, name), *SECONDS), "a number of seconds above 0")
        return rules


def is_sendable(key: str) -> bool:
    """Another server's key, which may be short, in a header of ours."""
    return key != "" and all("!" <= letter <= "~" for letter in key)
