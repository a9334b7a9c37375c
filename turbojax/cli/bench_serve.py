"""`turbojax bench serve`: how long the users of an OpenAI endpoint wait, whoever runs it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from turbojax.cli import options
from turbojax.cli.bench import command_line
from turbojax.cli.console import stderr
from turbojax.cli.grouped import grouped
from turbojax.errors import MissingExtraError

if TYPE_CHECKING:
    from turbojax.bench.http_load import HttpRequest
    from turbojax.bench.serve import Pace

_LOAD, _SAMPLING, _RESULTS = "Load", "Sampling", "Results"


@dataclass(frozen=True)
class Load:
    """What is sent, and how fast."""

    requests: Annotated[int, typer.Option(rich_help_panel=_LOAD, help="How many.", min=1)] = 256
    request_rate: Annotated[
        float | None, typer.Option(rich_help_panel=_LOAD, help="A second, at random times; by default as they may.")
    ] = None
    max_concurrency: Annotated[
        int | None, typer.Option(rich_help_panel=_LOAD, help="Most under way; 64 where no rate is given, else any.")
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, rich_help_panel=_LOAD, help="A text file, one prompt a line."),
    ] = None
    input_len: Annotated[
        str, typer.Option(rich_help_panel=_LOAD, help="Tokens of a made-up prompt: N or N-M; of a chat, words.")
    ] = "512"
    output_len: Annotated[str, typer.Option(rich_help_panel=_LOAD, help="Tokens of an answer: N or N-M.")] = "128"
    vocab_size: Annotated[
        int, typer.Option(rich_help_panel=_LOAD, help="Made-up token ids, for completions, are below it.")
    ] = 32000
    timeout: Annotated[float, typer.Option(rich_help_panel=_LOAD, help="Most seconds of a request.")] = 600.0
    seed: Annotated[int, typer.Option(rich_help_panel=_LOAD, help="Of prompts, lengths and times.")] = 0

    def pace(self) -> Pace:
        """
        Raises:
            BenchError: a number is out of range.
        """
        from turbojax.bench.serve import Pace

        is_open = self.max_concurrency is None and self.request_rate is None
        return Pace(self.request_rate, 64 if is_open else self.max_concurrency, self.timeout, self.seed)

    def made(self, *, is_chat: bool) -> list[HttpRequest]:
        """The requests.

        Raises:
            BenchError: a length or the file cannot be used.
        """
        from turbojax.bench.http_load import random_requests, read_prompts

        if self.prompts is not None:
            return read_prompts(self.prompts, self.requests, self.output_len, seed=self.seed)
        return random_requests(
            self.requests, self.input_len, self.output_len, is_chat=is_chat, vocab_size=self.vocab_size, seed=self.seed
        )

    def lengths(self) -> str:
        return f"{self.input_len if self.prompts is None else self.prompts.stem}/{self.output_len}"


@dataclass(frozen=True)
class Sampling:
    """Fields of every request."""

    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            rich_help_panel=_SAMPLING,
            help="Every answer has its full length; a field that not every server knows.",
        ),
    ] = True
    temperature: options.Temperature = None
    top_p: options.TopP = None

    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}


@dataclass(frozen=True)
class Results:
    """Where they go."""

    label: Annotated[
        str | None, typer.Option(rich_help_panel=_RESULTS, help="Name of the case; by default what was asked for.")
    ] = None
    json: Annotated[
        Path | None,
        typer.Option(dir_okay=False, rich_help_panel=_RESULTS, help="A JSON file: rows of the same case are replaced."),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, rich_help_panel=_RESULTS, help="A PNG file: the distributions.")
    ] = None


@grouped
def serve(
    load: Load,
    sampling: Sampling,
    results: Results,
    base_url: Annotated[str, typer.Option(help="With its /v1.")] = "http://127.0.0.1:23333/v1",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="What the server calls it; by default its first one.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    api_key: Annotated[str | None, typer.Option(help="By default OPENAI_API_KEY, where it is set.")] = None,
) -> None:
    """Send requests to an OpenAI endpoint and time its answers: first token, each further one, the whole."""
    try:
        from turbojax.bench import serve as driver
        from turbojax.bench.client import Endpoint
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed: pip install 'turbojax[serve]'") from error

    if endpoint not in ("chat", "completions"):
        raise driver.BenchError(f"endpoint: {endpoint!r}, chat or completions is expected")
    is_chat, url = endpoint == "chat", base_url.rstrip("/")
    pace, requests = load.pace(), load.made(is_chat=is_chat)
    key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY")
    name = model or asyncio.run(driver.find_model(url, key))
    case = results.label or f"{name} serve {endpoint} {load.lengths()} {pace.name}"
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    report = driver.Report(console, results.json, results.plot)
    with counted(len(requests)) as on_finish:
        driver.run(
            Endpoint(url, name, is_chat, key, sampling.fields()), requests, pace, report, case=case,
            command=command_line(sys.argv[1:]), on_finish=on_finish,
        )  # fmt: skip


@contextmanager
def counted(num_requests: int) -> Iterator[Callable[[], None]]:
    """A line that says how many have ended; to be called as each does."""
    numbers = count(1)
    with stderr.status("requests") as status:
        yield lambda: status.update(f"{next(numbers)} of {num_requests} requests")
