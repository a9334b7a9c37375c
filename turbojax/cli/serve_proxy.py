"""`turbojax serve proxy`: several servers behind one address."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from turbojax.cli import serve_log
from turbojax.cli import serve_options as of
from turbojax.errors import MissingExtraError
from turbojax.serve.proxy import DEFAULT_PORT
from turbojax.serve.proxy.settings import ProxyConfig
from turbojax.serve.settings import ServeConfig

_NODES, _ROUTING, _ACCESS = "Nodes", "Routing", "Access"

Nodes = Annotated[
    list[str] | None,
    typer.Option("--node", "--nodes", help="A server's URL; repeatable. More can come while the proxy runs."),
]
ServerPort = Annotated[int | None, typer.Option(help=f"{DEFAULT_PORT} unless it is given; 0 takes a free one.")]
RoutingStrategy = Annotated[
    str | None,
    of.option(_ROUTING, "routing_strategy", "Or prefix_affinity, round_robin, random.", ProxyConfig),
]
MaxTries = Annotated[
    int | None, of.option(_ROUTING, "max_tries", "Nodes that a request is given to, at most.", ProxyConfig)
]
NodeApiKey = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_NODES, envvar="TURBOJAX_NODE_API_KEY", show_envvar=True,
        help="Sent to the nodes in place of what clients send.",
    ),
]  # fmt: skip
MaxNodeConnections = Annotated[
    int | None, of.option(_NODES, "max_node_connections", "Requests that a node is given at once.", ProxyConfig)
]
ConnectTimeout = Annotated[float | None, of.option(_NODES, "connect_timeout_s", "To reach a node.", ProxyConfig)]
FirstByteTimeout = Annotated[
    float | None, of.option(_NODES, "first_byte_timeout_s", "Until an answer begins.", ProxyConfig)
]
IdleTimeout = Annotated[
    float | None, of.option(_NODES, "idle_timeout_s", "Between two pieces of an answer.", ProxyConfig)
]
HealthInterval = Annotated[
    float | None, of.option(_NODES, "health_interval_s", "Between two checks of a node.", ProxyConfig)
]
HealthTimeout = Annotated[
    float | None, of.option(_NODES, "health_timeout_s", "Of each request of a check.", ProxyConfig)
]
AdminKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--admin-keys", "--admin-key", rich_help_panel=_ACCESS, envvar="TURBOJAX_ADMIN_KEY", show_envvar=True,
        help="Open /nodes/add, /nodes/remove and /nodes/status; repeatable. Without one they are closed.",
    ),
]  # fmt: skip


def proxy(
    nodes: Nodes = None,
    server_name: of.ServerName = None,
    server_port: ServerPort = None,
    routing_strategy: RoutingStrategy = None,
    max_tries: MaxTries = None,
    node_api_key: NodeApiKey = None,
    max_node_connections: MaxNodeConnections = None,
    connect_timeout_s: ConnectTimeout = None,
    first_byte_timeout_s: FirstByteTimeout = None,
    idle_timeout_s: IdleTimeout = None,
    health_interval_s: HealthInterval = None,
    health_timeout_s: HealthTimeout = None,
    max_connections: of.MaxConnections = None,
    max_concurrent_requests: of.MaxConcurrentRequests = None,
    max_body_bytes: of.MaxBodyBytes = None,
    max_json_depth: of.MaxJsonDepth = None,
    receive_timeout_s: of.ReceiveTimeout = None,
    send_timeout_s: of.SendTimeout = None,
    request_timeout_s: of.RequestTimeout = None,
    drain_s: of.Drain = None,
    admin_keys: AdminKeys = None,
    api_keys: of.ApiKeys = None,
    allow_origins: of.AllowOrigins = None,
    ssl_certfile: of.SslCertfile = None,
    ssl_keyfile: of.SslKeyfile = None,
    log_level: of.LogLevel = None,
    log_json: of.LogJson = None,
) -> None:
    """Put several servers with OpenAI's protocol behind one address.

    A request goes to a node that serves its model and is well; where that fails before it has answered, to another.
    """
    given = {name: value for name, value in locals().items() if value is not None and value != []}
    run(of.config_of(ServeConfig, {"server_port": DEFAULT_PORT} | given), given)


def run(server: ServeConfig, given: dict[str, Any]) -> None:
    """Serves until a signal; the exit status is 1 where requests had to be cut.

    Raises:
        MissingExtraError: the extra `serve` is not installed.
        TurbojaxError: what is wrong with the address or a config.
    """
    config = of.config_of(ProxyConfig, given | {"server": server})
    try:
        from turbojax.serve.proxy.app import create_app
        from turbojax.serve.server import listen, run_server
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed: pip install 'turbojax[serve]'") from error
    with serve_log.starting(server) as tell, listen(server) as listener, serve_log.serving(server):
        behind = f"{len(config.nodes)} nodes are behind"
        answered_all = run_server(create_app(config), server, listener, lambda url: tell(f"{behind} {url}/v1"))
    if not answered_all:
        raise typer.Exit(1)
