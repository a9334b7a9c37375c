"""`turbojax bench`: how fast the engine is here, and how far from the machine's own limits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from turbojax.bench.errors import BenchError
from turbojax.cli.bench_options import Common
from turbojax.cli.console import say
from turbojax.cli.grouped import grouped

_PRIVATE = ("--json", "--plot", "--api-key")

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure the engine against the limits of the machine.",
    add_completion=False,
)


def _integers(name: str, text: str) -> tuple[int, ...]:
    """ "1,16,64" as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise BenchError(f"{name}: {text!r}, integers with commas between are expected") from error


def _pair(cell: str) -> tuple[int, int]:
    """64x4096 as numbers."""
    numbers = _integers("cells", cell.replace("x", ","))
    if len(numbers) != 2:
        raise BenchError(f"cells: {cell!r}, a batch and a context with x between are expected")
    return numbers[0], numbers[1]


def command_line(arguments: list[str]) -> str:
    """What was asked for, without what is nobody else's: the files that results go to, and keys."""
    words, rest = ["turbojax"], iter(arguments)
    for word in rest:
        if word in _PRIVATE:
            next(rest, None)
        elif not word.startswith(tuple(f"{name}=" for name in _PRIVATE)):
            words.append(word)
    return " ".join(words)


def _run(common: Common, measure: Callable[[Any], Any]) -> None:
    from turbojax.bench.session import run

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    run(common.settings(), measure, command=command_line(sys.argv[1:]), console=console, say=say)


@bench.command()
@grouped
def decode(
    common: Common,
    batch: Annotated[
        str | None, typer.Option(help="Sequences that decode together; 1,16,64 by default.", metavar="N,N,...")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens of each prompt; 1024 by default.", metavar="N,N,...")
    ] = None,
    cells: Annotated[
        str | None, typer.Option(help="Batches and contexts instead of every pair of the two.", metavar="BxC,BxC,...")
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps to time.")] = 128,
    loop: Annotated[bool, typer.Option("--loop", help="Also time the steps in a bare loop on the device.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Also sum the GPU kernels of a step.")] = False,
    against_greedy: Annotated[
        bool, typer.Option("--against-greedy", help="Also time greedy steps, beside sampled ones.")
    ] = False,
) -> None:
    """Time the engine's decode steps while a whole batch decodes, for each batch and context."""
    from turbojax.bench.decode import Grid, measure

    if cells is None:
        batches, contexts = _integers("batch", batch or "1,16,64"), _integers("context", context or "1024")
        pairs = tuple((b, c) for c in contexts for b in batches)
    elif batch is None and context is None:
        pairs = tuple(_pair(cell) for cell in cells.split(","))
    else:
        raise BenchError("cells says batches and contexts already: give it without batch and context")
    grid = Grid(pairs, steps, loop=loop, profile=profile, against_greedy=against_greedy)
    grid.config(common.settings())  # raises before anything is loaded
    _run(common, lambda opened: measure(opened, grid))


@bench.command()
@grouped
def prefill(
    common: Common,
    tokens: Annotated[str, typer.Option(help="Tokens of the prompt.", metavar="N,N,...")] = "8192",
    repeats: Annotated[int, typer.Option(help="Prompts to time, one after the other; their median counts.")] = 5,
) -> None:
    """Time the first token of one prompt alone in the engine."""
    from turbojax.bench.serving import Prefill, measure_prefill

    plan = Prefill(_integers("tokens", tokens), repeats)
    _run(common, lambda opened: measure_prefill(opened, plan))


@bench.command()
@grouped
def throughput(
    common: Common,
    requests: Annotated[int, typer.Option(help="How many requests.")] = 512,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1000,
    output_len: Annotated[int, typer.Option(help="Tokens that each generates.")] = 1000,
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A JSONL file of requests instead, of any lengths."),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests under way at any time; 64 by default.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second instead, at random times, however many are under way.")
    ] = None,
) -> None:
    """Run many requests and count tokens; prints the latencies that users of the engine would see.

    A line of --file is {"input_len": N or "token_ids": [...] or "prompt": "...", "output_len": N}.
    """
    from turbojax.bench.serving import Serving, measure_serving

    if concurrency is None and rate is None:
        concurrency = common.max_batch_size or 64
    plan = Serving("throughput", requests, input_len, output_len, file, concurrency, rate)
    _run(common, lambda opened: measure_serving(opened, plan))


@bench.command()
@grouped
def latency(
    common: Common,
    requests: Annotated[int, typer.Option(help="How many requests.")] = 10,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1024,
    output_len: Annotated[int, typer.Option(help="Tokens that each generates.")] = 128,
    concurrency: Annotated[int, typer.Option(help="Requests under way at any time.")] = 1,
) -> None:
    """Time requests one after the other: first token, each further token, the whole."""
    from turbojax.bench.serving import Serving, measure_serving

    plan = Serving("latency", requests, input_len, output_len, concurrency=concurrency)
    _run(common, lambda opened: measure_serving(opened, plan))


@bench.command()
@grouped
def interleave(
    common: Common,
    streams: Annotated[int, typer.Option(help="Sequences that decode all the time.")] = 64,
    context: Annotated[int, typer.Option(help="Tokens of the prompt of each.")] = 1024,
    prompt: Annotated[int, typer.Option(help="Tokens of the long prompt.")] = 16384,
    steps: Annotated[int, typer.Option(help="Tokens of each stream before each long prompt.")] = 128,
    repeats: Annotated[int, typer.Option(help="Long prompts to time.")] = 3,
) -> None:
    """Time the gaps between tokens of running streams, alone and while a long prompt is prefilled beside them.

    The prompt goes in chunks of --max-prefill-token-num tokens, 512 unless it is given.
    """
    from turbojax.bench.interleave import Interleave, measure_interleave

    plan = Interleave(streams, context, prompt, steps, repeats)
    plan.config(common.settings())  # raises before anything is loaded
    _run(common, lambda opened: measure_interleave(opened, plan))


@bench.command()
@grouped
def guided(
    common: Common,
    batch: Annotated[str, typer.Option(help="Sequences at once.", metavar="N,N,...")] = "1,16,64",
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    schema: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A JSON schema; by default one whose answers never end."),
    ] = None,
) -> None:
    """Time answers that follow a JSON schema beside free ones, and the host's masks."""
    from turbojax.bench.guided import ENDLESS_SCHEMA, Guided, measure_guided, read_schema

    found = ENDLESS_SCHEMA if schema is None else read_schema(schema)
    plan = Guided(_integers("batch", batch), input_len, output_len, found)
    plan.config(common.settings())  # raises before anything is loaded
    _run(common, lambda opened: measure_guided(opened, plan))
