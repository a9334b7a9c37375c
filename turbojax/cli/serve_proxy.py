"""`turbojax serve proxy`: several servers behind one address."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from turbojax.cli.console import say
from turbojax.errors import MissingExtraError
from turbojax.serve.proxy import DEFAULT_PORT
from turbojax.serve.settings import ServeConfig

_ROUTING, _NODES, _SERVER = "Routing", "Nodes", "Server"


def proxy(
    node: Annotated[
        list[str] | None, typer.Option(help="A server's URL; repeatable. More can be added while the proxy runs.")
    ] = None,
    server_name: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    server_port: Annotated[int, typer.Option(help="0 takes a free port.")] = DEFAULT_PORT,
    routing_strategy: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_ROUTING,
            help="min_expected_latency (the default), prefix_affinity, round_robin or random.",
            show_default=False,
        ),
    ] = None,
    max_tries: Annotated[
        int | None, typer.Option(rich_help_panel=_ROUTING, help="Nodes that a request is given to; 3 by default.")
    ] = None,
    node_api_key: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_NODES, envvar="TURBOJAX_NODE_API_KEY", show_envvar=True,
            help="Sent to the nodes in place of what clients send.",
        ),
    ] = None,
    max_node_connections: Annotated[
        int | None, typer.Option(rich_help_panel=_NODES, help="Requests that a node has at once; 1024 by default.")
    ] = None,
    connect_timeout_s: Annotated[
        float | None, typer.Option(rich_help_panel=_NODES, help="To reach a node; 5 by default.")
    ] = None,
    first_byte_timeout_s: Annotated[
        float | None, typer.Option(rich_help_panel=_NODES, help="Until an answer begins; 600 by default.")
    ] = None,
    idle_timeout_s: Annotated[
        float | None, typer.Option(rich_help_panel=_NODES, help="Between pieces of an answer; 120 by default.")
    ] = None,
    health_interval_s: Annotated[
        float | None, typer.Option(rich_help_panel=_NODES, help="Between checks of a node; 5 by default.")
    ] = None,
    health_timeout_s: Annotated[
        float | None, typer.Option(rich_help_panel=_NODES, help="Of a check's requests; 5 by default.")
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_SERVER, envvar="TURBOJAX_ADMIN_KEY", show_envvar=True,
            help="Opens /nodes/add, /nodes/remove and /nodes/status; repeatable. Without one they are closed.",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_SERVER, envvar="TURBOJAX_API_KEY", show_envvar=True,
            help="Clients must present one of these; repeatable.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(rich_help_panel=_SERVER, help="Pages of this origin may call; repeatable.")
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(rich_help_panel=_SERVER, help="PEM; serves HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(rich_help_panel=_SERVER, help="Its key, PEM.")] = None,
    max_connections: Annotated[
        int, typer.Option(rich_help_panel=_SERVER, help="Connections of clients that are open at once.")
    ] = 8192,
    max_concurrent_requests: Annotated[
        int, typer.Option(rich_help_panel=_SERVER, help="Requests that are answered at once.")
    ] = 4096,
    max_body_bytes: Annotated[int, typer.Option(rich_help_panel=_SERVER, help="Of a request.")] = 8 << 20,
    request_timeout_s: Annotated[
        float, typer.Option(rich_help_panel=_SERVER, help="Until an answer is complete.")
    ] = 3600.0,
    drain_s: Annotated[
        float, typer.Option(rich_help_panel=_SERVER, help="On SIGTERM, for requests that run to end.")
    ] = 30.0,
    log_level: Annotated[str, typer.Option(rich_help_panel=_SERVER, help="debug, info, warning or error.")] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", rich_help_panel=_SERVER, help="Log in JSON.")] = False,
) -> None:  # fmt: skip
    """Put several servers with OpenAI's protocol behind one address.

    Requests go by their model to a node that serves it and is well; one that fails before it has answered is replaced
    by another.
    """
    server = ServeConfig(
        server_name=server_name, server_port=server_port, api_keys=tuple(api_key or ()),
        allow_origins=tuple(allow_origin or ()), ssl_certfile=_text(ssl_certfile), ssl_keyfile=_text(ssl_keyfile),
        max_connections=max_connections, max_concurrent_requests=max_concurrent_requests,
        max_body_bytes=max_body_bytes, request_timeout_s=request_timeout_s, drain_s=drain_s, log_level=log_level,
        log_json=log_json,
    )  # fmt: skip
    _run(
        server, nodes=tuple(node or ()), admin_keys=tuple(admin_key or ()), routing_strategy=routing_strategy,
        max_tries=max_tries, node_api_key=node_api_key, max_node_connections=max_node_connections,
        connect_timeout_s=connect_timeout_s, first_byte_timeout_s=first_byte_timeout_s, idle_timeout_s=idle_timeout_s,
        health_interval_s=health_interval_s, health_timeout_s=health_timeout_s,
    )  # fmt: skip


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _run(server: ServeConfig, **fields: Any) -> None:
    """Serves until a signal; fields that are None keep their default."""
    try:
        from turbojax.serve.logs import logging_to
        from turbojax.serve.proxy.app import create_app
        from turbojax.serve.proxy.settings import ProxyConfig
        from turbojax.serve.server import run_server
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed: pip install 'turbojax[serve]'") from error
    config = ProxyConfig(server=server, **{name: value for name, value in fields.items() if value is not None})
    with logging_to(None, server):
        has_answered_all = run_server(
            create_app(config), server, on_ready=lambda url: say(f"{len(config.nodes)} nodes behind {url}/v1")
        )
    if not has_answered_all:
        raise typer.Exit(1)
