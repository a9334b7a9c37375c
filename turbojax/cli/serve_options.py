"""The options of `turbojax serve api_server`: one for each field of ServeConfig, and some of EngineConfig's."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, TypeVar

import typer

from turbojax.serve.settings import ServeConfig

Config = TypeVar("Config")
_ENGINE, _CHAT, _LIMITS, _ACCESS, _LOG, _BATCHES = "Engine", "Chats", "Limits", "Access", "Log", "Batches"


def option(panel: str, name: str, text: str, owner: type = ServeConfig) -> Any:
    """The option of a field of a config; its help has the default."""
    default = getattr(owner, name)
    shown = f"{default:g}" if isinstance(default, float) else default
    return typer.Option(f"--{name.replace('_', '-')}", rich_help_panel=panel, help=f"{text} Default: {shown}.")


# Defaults stand in the config classes alone; None here means "as there".
MaxPrefillTokenNum = Annotated[
    int | None, typer.Option(rich_help_panel=_ENGINE, help="Most prompt tokens that one step computes.")
]
CacheBlockSeqLen = Annotated[
    int | None, typer.Option(rich_help_panel=_ENGINE, help="Tokens of a page of the KV cache.")
]
EnablePrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        rich_help_panel=_ENGINE,
        help="Keep what was computed for requests that begin the same; on unless it is turned off.",
    ),
]
MaxQueueLen = Annotated[
    int | None, typer.Option(rich_help_panel=_ENGINE, help="Most requests that wait for the engine; more get a 429.")
]

ServerName = Annotated[str | None, typer.Option(help="The address to listen at; 127.0.0.1 unless it is given.")]
ServerPort = Annotated[int | None, typer.Option(help="23333 unless it is given; 0 takes a free one.")]
ModelName = Annotated[
    str | None, typer.Option(help="What clients call the model; the name of its folder, file or repository by default.")
]

ChatTemplate = Annotated[
    str | None, typer.Option(rich_help_panel=_CHAT, help="A file with a Jinja template, in place of the model's own.")
]
ToolCallParser = Annotated[
    str | None, typer.Option(rich_help_panel=_CHAT, help="The style of the model's tool calls: auto, none, hermes, ...")
]
ReasoningParser = Annotated[
    str | None, typer.Option(rich_help_panel=_CHAT, help="The style of its reasoning: auto, none, think, ...")
]

MaxConnections = Annotated[int | None, option(_LIMITS, "max_connections", "Connections open at once.")]
MaxConcurrentRequests = Annotated[
    int | None, option(_LIMITS, "max_concurrent_requests", "Requests answered at once, those that wait included.")
]
MaxBodyBytes = Annotated[int | None, option(_LIMITS, "max_body_bytes", "Of a request's body.")]
MaxUploadBytes = Annotated[int | None, option(_LIMITS, "max_upload_bytes", "Of a file for a batch.")]
MaxJsonDepth = Annotated[int | None, option(_LIMITS, "max_json_depth", "Of a body's arrays and objects.")]
MinPriority = Annotated[
    int | None, option(_LIMITS, "min_priority", "The best that a client may ask for; lower ones are served first.")
]
ReceiveTimeout = Annotated[float | None, option(_LIMITS, "receive_timeout_s", "For a request to come whole.")]
SendTimeout = Annotated[float | None, option(_LIMITS, "send_timeout_s", "For a slow client to read on.")]
RequestTimeout = Annotated[float | None, option(_LIMITS, "request_timeout_s", "For a request to be answered.")]
Drain = Annotated[float | None, option(_LIMITS, "drain_s", "For requests to end by themselves once the server must.")]
Stall = Annotated[float | None, option(_LIMITS, "stall_s", "An engine that ends no step for so long is unhealthy.")]

ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-keys",
        "--api-key",
        rich_help_panel=_ACCESS,
        envvar="TURBOJAX_API_KEY",
        show_envvar=True,
        help="Clients must present one of these; repeatable.",
    ),
]
AllowOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origins",
        "--allow-origin",
        rich_help_panel=_ACCESS,
        help="Pages that may call; repeatable.",
    ),
]
SslCertfile = Annotated[str | None, typer.Option(rich_help_panel=_ACCESS, help="A certificate (PEM) to serve HTTPS.")]
SslKeyfile = Annotated[str | None, typer.Option(rich_help_panel=_ACCESS, help="Its key (PEM).")]

LogLevel = Annotated[str | None, option(_LOG, "log_level", "debug, info, warning or error.")]
LogJson = Annotated[bool | None, typer.Option("--log-json", rich_help_panel=_LOG, help="A JSON object a line.")]

BatchDir = Annotated[
    str | None, typer.Option(rich_help_panel=_BATCHES, help="Where files and batches are kept; off without one.")
]
MaxBatchDirBytes = Annotated[int | None, option(_BATCHES, "max_batch_dir_bytes", "Of all files together.")]
MaxBatchRequests = Annotated[int | None, option(_BATCHES, "max_batch_requests", "Of one batch.")]
BatchConcurrency = Annotated[
    int | None, typer.Option(rich_help_panel=_BATCHES, help="Requests of batches that run at once.")
]
BatchPriority = Annotated[
    int | None, option(_BATCHES, "batch_priority", "Of their requests; lower ones are served first.")
]


def config_of(kind: type[Config], given: dict[str, Any]) -> Config:
    """A config of the fields that are given, by name.

    Raises:
        ConfigError: one is out of range.
    """
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in given.items() if name in names})
