"""`bench serve`: requests to an OpenAI endpoint, at a rate or so many at a time, and what its users wait for."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from turbojax import __version__
from turbojax.bench.client import LINE_BYTES, Endpoint, HttpRequest, HttpTrace, message_of, send
from turbojax.bench.errors import BenchError
from turbojax.bench.latency import latencies_ms
from turbojax.bench.latency_plot import plot_latencies
from turbojax.bench.load import arrival_times
from turbojax.bench.report import ResultFile, Row, make_row, print_latencies, print_rows
from turbojax.figure import require_matplotlib


@dataclass(frozen=True)
class Pace:
    """When requests are sent.

    Attributes:
        rate: requests a second, at random times as a Poisson process has them; None: as soon as they may.
        max_concurrency: requests under way at most; others wait for their turn, and their clocks with them. None: any.
        timeout_s: most seconds of one request.
        seed: of the random times.
    """

    rate: float | None = None
    max_concurrency: int | None = None
    timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None:
            arrival_times(1, self.rate)  # checks it
        if self.rate is None and self.max_concurrency is None:
            raise BenchError("give request-rate, max-concurrency or both")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise BenchError(f"max-concurrency: {self.max_concurrency}, an integer >= 1 is expected")
        if not 0 < self.timeout_s < float("inf"):
            raise BenchError(f"timeout: {self.timeout_s}, a number of seconds above 0 is expected")

    def times_s(self, num_requests: int) -> np.ndarray:
        """Seconds from the start at which requests may be sent."""
        return np.zeros(num_requests) if self.rate is None else arrival_times(num_requests, self.rate, self.seed)

    @property
    def name(self) -> str:
        rate = () if self.rate is None else (f"rate {self.rate:g}",)
        most = () if self.max_concurrency is None else (f"at most {self.max_concurrency}",)
        return " ".join((*rate, *most))


async def drive(
    endpoint: Endpoint, requests: Sequence[HttpRequest], pace: Pace, on_finish: Callable[[], object] = lambda: None
) -> list[HttpTrace]:
    """Sends the requests; traces in their order."""
    timeout = aiohttp.ClientTimeout(total=pace.timeout_s)
    room: contextlib.AbstractAsyncContextManager[Any] = contextlib.nullcontext()
    if pace.max_concurrency is not None:
        room = asyncio.Semaphore(pace.max_concurrency)
    start_s = time.perf_counter()

    async def one(request: HttpRequest, at_s: float) -> HttpTrace:
        await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
        async with room:
            trace = await send(session, endpoint, request)
        on_finish()
        return trace

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=LINE_BYTES) as session:
        times_s = pace.times_s(len(requests)).tolist()
        return list(await asyncio.gather(*map(one, requests, times_s)))


async def find_model(base_url: str, api_key: str | None) -> str:
    """The name of the first model that the server has.

    Raises:
        BenchError: nobody answers there, or it is no such server.
    """
    headers, timeout = Endpoint(base_url, "", api_key=api_key).headers, aiohttp.ClientTimeout(total=30)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{base_url}/models") as answer,
        ):
            text = await answer.read()
            if answer.status != 200:
                raise BenchError(f"{base_url}/models: {answer.status} {message_of(text)}")
            return str(json.loads(text)["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchError(f"{base_url}/models does not answer: {error or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{base_url}/models is no list of models; give model, and the url with its /v1") from error


def serving_row(case: str, traces: Sequence[HttpTrace], pace: Pace) -> Row:
    """Output tokens a second, with all that was measured.

    Raises:
        BenchError: no request was answered; says why.
    """
    whole = [trace for trace in traces if trace.is_whole]
    errors = Counter(trace.error for trace in traces if trace.error is not None)
    if not whole:
        [(most, count), *_] = errors.most_common(1)
        raise BenchError(f"none of {len(traces)} requests was answered; {count} of them: {most}")
    seconds = max(trace.events[-1][0] for trace in whole) - min(trace.arrival_s for trace in traces)
    num_input, num_output = sum(t.num_input_tokens for t in whole), sum(t.num_output_tokens for t in whole)
    return make_row(
        case, num_output / seconds, "tok/s", None, **latencies_ms(whole), requests=len(traces), answered=len(whole),
        errors=dict(errors) or None, rate=pace.rate, max_concurrency=pace.max_concurrency, duration_s=seconds,
        requests_per_s=len(whole) / seconds, input_tokens=num_input, output_tokens=num_output,
        input_tokens_per_s=num_input / seconds, output_tokens_per_s=num_output / seconds,
        counts_parts=True if any(t.num_reported_tokens is None for t in whole) else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Report:
    """Where results go: a terminal, a JSON file that runs add to, a picture."""

    console: Console
    json: Path | None = None
    plot: Path | None = None

    def check(self, endpoint: Endpoint) -> ResultFile | None:
        """Says early what cannot be written.

        Raises:
            MissingExtraError: matplotlib is not installed.
            BenchError: the file holds other results.
        """
        if self.plot is not None:
            require_matplotlib()
        return None if self.json is None else ResultFile(self.json, endpoint.base_url)

    def show(self, row: Row) -> None:
        print_rows([row], self.console)
        print_latencies({name: row[name] for name in row if name.endswith("_ms")}, self.console)
        facts = (
            f"{row['answered']} of {row['requests']} requests answered in {row['duration_s']:.1f} s: "
            f"{row['requests_per_s']:.3g} a second, {row['input_tokens_per_s']:,.0f} input and "
            f"{row['output_tokens_per_s']:,.0f} output tokens a second"
        )
        self.console.print(facts, soft_wrap=True)
        if row.get("counts_parts"):
            self.console.print("the server reports no usage: a part of an answer counts as a token")
        if "errors" in row:
            table = Table("error", box=None, pad_edge=False)
            table.add_column("requests", justify="right")
            for error, count in row["errors"].items():
                table.add_row(error, str(count))
            self.console.print(table)


def run(
    endpoint: Endpoint, requests: Sequence[HttpRequest], pace: Pace, report: Report, *, case: str, command: str,
    num_warm_up: int = 1, on_finish: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Drives the endpoint, shows the results and writes them.

    Args:
        endpoint: where to.
        requests: what.
        pace: when.
        report: where results go.
        case: its name in the results.
        command: that asked, for the results.
        num_warm_up: requests sent before, one after the other, that do not count.
        on_finish: is called as each finishes.

    Raises:
        BenchError: no request was answered, or a file cannot be written.
    """
    results = report.check(endpoint)
    asyncio.run(drive(endpoint, requests[:num_warm_up], Pace(max_concurrency=1, timeout_s=pace.timeout_s)))
    traces = asyncio.run(drive(endpoint, requests, pace, on_finish))
    row = serving_row(case, traces, pace)
    report.show(row)
    if results is not None:
        versions = {"turbojax": __version__, "python": platform.python_version()}
        today = datetime.date.today().isoformat()
        results.update([row], {"versions": versions, "date": today, "command": command})
    if report.plot is not None:
        plot_latencies(report.plot, [t for t in traces if t.is_whole], f"{endpoint.model}: {case}")
