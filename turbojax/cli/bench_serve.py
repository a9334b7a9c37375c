"""`turbojax bench serve`: how long the users of an OpenAI endpoint wait, whoever runs it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from turbojax.cli import options
from turbojax.cli.bench import command_line
from turbojax.cli.console import stderr
from turbojax.errors import MissingExtraError

_LOAD, _SAMPLING, _RESULTS = "Load", "Sampling", "Results"


def serve(
    base_url: Annotated[str, typer.Option(help="With its /v1.")] = "http://127.0.0.1:23333/v1",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="What the server calls it; by default its first one.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    requests: Annotated[int, typer.Option(rich_help_panel=_LOAD, help="How many.", min=1)] = 256,
    request_rate: Annotated[
        float | None, typer.Option(rich_help_panel=_LOAD, help="A second, at random times; by default as they may.")
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(rich_help_panel=_LOAD, help="Most under way; 64 where no rate is given, else any.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, rich_help_panel=_LOAD, help="A text file, one prompt a line."),
    ] = None,
    input_len: Annotated[
        str, typer.Option(rich_help_panel=_LOAD, help="Tokens of a made-up prompt: N or N-M; of a chat, words.")
    ] = "512",
    output_len: Annotated[str, typer.Option(rich_help_panel=_LOAD, help="Tokens of an answer: N or N-M.")] = "128",
    vocab_size: Annotated[
        int, typer.Option(rich_help_panel=_LOAD, help="Made-up token ids, for completions, are below it.")
    ] = 32000,
    timeout: Annotated[float, typer.Option(rich_help_panel=_LOAD, help="Most seconds of a request.")] = 600.0,
    seed: Annotated[int, typer.Option(rich_help_panel=_LOAD, help="Of prompts, lengths and times.")] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            rich_help_panel=_SAMPLING,
            help="Every answer has its full length; a field that not every server knows.",
        ),
    ] = True,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    api_key: Annotated[str | None, typer.Option(help="By default OPENAI_API_KEY, where it is set.")] = None,
    label: Annotated[
        str | None, typer.Option(rich_help_panel=_RESULTS, help="Name of the case; by default what was asked for.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(dir_okay=False, rich_help_panel=_RESULTS, help="A JSON file: rows of the same case are replaced."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, rich_help_panel=_RESULTS, help="A PNG file: the distributions.")
    ] = None,
) -> None:
    """Send requests to an OpenAI endpoint and time its answers: first token, each further one, the whole."""
    try:
        from turbojax.bench import http_load
        from turbojax.bench import serve as driver
        from turbojax.bench.client import Endpoint
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed: pip install 'turbojax[serve]'") from error

    if endpoint not in ("chat", "completions"):
        raise driver.BenchError(f"endpoint: {endpoint!r}, chat or completions is expected")
    is_chat, url = endpoint == "chat", base_url.rstrip("/")
    if max_concurrency is None and request_rate is None:
        max_concurrency = 64
    pace = driver.Pace(request_rate, max_concurrency, timeout, seed)
    if prompts is not None:
        load = http_load.read_prompts(prompts, requests, output_len, seed=seed)
    else:
        load = http_load.random_requests(
            requests, input_len, output_len, is_chat=is_chat, vocab_size=vocab_size, seed=seed
        )
    key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY")
    given = {"temperature": temperature, "top_p": top_p, "ignore_eos": True if ignore_eos else None}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    name = model or asyncio.run(driver.find_model(url, key))
    lengths = f"{input_len if prompts is None else prompts.stem}/{output_len}"
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    with stderr.status("requests") as status:
        num_done = 0

        def count() -> None:
            nonlocal num_done
            num_done += 1
            status.update(f"{num_done} of {requests} requests")

        driver.run(
            Endpoint(url, name, is_chat, key, fields), load, pace, driver.Report(console, json, plot),
            case=label or f"{name} serve {endpoint} {lengths} {pace.name}", command=command_line(sys.argv[1:]),
            on_finish=count,
        )  # fmt: skip
