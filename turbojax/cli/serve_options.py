"""The options of `turbojax serve api_server`: one for each field of ServeConfig, and some of EngineConfig's."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, TypeVar

import typer

Config = TypeVar("Config")
_ENGINE, _CHAT, _LIMITS, _ACCESS, _LOG, _BATCHES = "Engine", "Chats", "Limits", "Access", "Log", "Batches"


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

MaxConnections = Annotated[int | None, typer.Option(rich_help_panel=_LIMITS, help="Connections open at once.")]
MaxConcurrentRequests = Annotated[
    int | None, typer.Option(rich_help_panel=_LIMITS, help="Requests answered at once, those that wait included.")
]
MaxBodyBytes = Annotated[int | None, typer.Option(rich_help_panel=_LIMITS, help="Of a request's body.")]
MaxUploadBytes = Annotated[int | None, typer.Option(rich_help_panel=_LIMITS, help="Of a file for a batch.")]
MaxJsonDepth = Annotated[int | None, typer.Option(rich_help_panel=_LIMITS, help="Of a body's arrays and objects.")]
ReceiveTimeout = Annotated[
    float | None, typer.Option("--receive-timeout-s", rich_help_panel=_LIMITS, help="For a request to come whole.")
]
SendTimeout = Annotated[
    float | None, typer.Option("--send-timeout-s", rich_help_panel=_LIMITS, help="For a slow client to read on.")
]
RequestTimeout = Annotated[
    float | None,
    typer.Option("--request-timeout-s", rich_help_panel=_LIMITS, help="For a request to be answered."),
]
Drain = Annotated[
    float | None,
    typer.Option("--drain-s", rich_help_panel=_LIMITS, help="For requests to end by themselves once the server must."),
]
Stall = Annotated[
    float | None,
    typer.Option("--stall-s", rich_help_panel=_LIMITS, help="An engine that ends no step for so long is unhealthy."),
]

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

LogLevel = Annotated[str | None, typer.Option(rich_help_panel=_LOG, help="debug, info, warning or error.")]
LogJson = Annotated[bool | None, typer.Option("--log-json", rich_help_panel=_LOG, help="A JSON object a line.")]

BatchDir = Annotated[
    str | None, typer.Option(rich_help_panel=_BATCHES, help="Where files and batches are kept; off without one.")
]
MaxBatchDirBytes = Annotated[int | None, typer.Option(rich_help_panel=_BATCHES, help="Of all files together.")]
MaxBatchRequests = Annotated[int | None, typer.Option(rich_help_panel=_BATCHES, help="Of one batch.")]
BatchConcurrency = Annotated[
    int | None, typer.Option(rich_help_panel=_BATCHES, help="Requests of batches that run at once.")
]
BatchPriority = Annotated[
    int | None, typer.Option(rich_help_panel=_BATCHES, help="Of their requests; lower ones are served first.")
]


def config_of(kind: type[Config], given: dict[str, Any]) -> Config:
    """A config of the fields that are given, by name.

    Raises:
        ConfigError: one is out of range.
    """
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in given.items() if name in names})
