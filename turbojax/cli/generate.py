"""`turbojax generate`: one answer, or a file of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from turbojax.cli import options, session
from turbojax.cli.bulk import run_bulk
from turbojax.cli.console import say
from turbojax.cli.grouped import grouped
from turbojax.cli.openai_batch import run_openai_batch
from turbojax.configs import GenerationConfig


@grouped
def generate(
    generation: options.Generation,
    engine: options.Engine,
    processes: options.Processes,
    prompt: Annotated[str | None, typer.Argument(help="What to answer.", show_default=False)] = None,
    input: Annotated[
        Path | None, typer.Option("--input", exists=True, dir_okay=False, help="A JSONL file of prompts.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", dir_okay=False, help="Where --input's results go, a JSON line each.")
    ] = None,
    openai_batch: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--openai-batch",
            metavar="IN OUT",
            help="A JSONL file of OpenAI's batches, and where the answers go; resumed like --input.",
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text as it is, without the chat template.")] = False,
    model: options.Model = None,
    max_batch_size: options.MaxBatchSize = None,
    tp: options.Tp = None,
    dp: options.Dp = None,
) -> None:
    """Answer a prompt, or every line of a file.

    The text goes to standard output, all else to standard error. Sampling is off until one of its options is given.

    A line of --input is a JSON object with "prompt", "messages" or "token_ids", an optional "id", and generation
    parameters by their Python names ("max_new_tokens", "temperature", "stop_words", ...). Each result is written as it
    finishes; started again, the run goes on with the lines that --output does not have. A line that cannot be run
    gets a record with "error", and the exit status is 1.

    A line of --openai-batch has "custom_id", "method" ("POST"), "url" (/v1/chat/completions or /v1/completions) and
    "body", which says how to generate.
    """
    if sum(source is not None for source in (prompt, input, openai_batch)) != 1:
        raise typer.BadParameter("give a prompt, --input or --openai-batch")
    if (input is None) != (output is None):
        raise typer.BadParameter("--input and --output go together")
    config = engine.config(max_batch_size=max_batch_size, tp=tp, dp=dp, cluster=processes.cluster())
    gen_config = generation.config()
    if input is not None or openai_batch is not None:
        # On a GPU a run of many lines should not stop to compile in the middle.
        config = dataclasses.replace(config, compile_ahead=None)
    session.follow(model, config)
    if openai_batch is not None:
        if raw or gen_config != GenerationConfig():
            raise typer.BadParameter("each line of --openai-batch says itself how to generate")
        run_openai_batch(model, config, *openai_batch)
        return
    if input is not None and output is not None:
        run_bulk(model, config, gen_config, input, output, raw=raw)
        return
    assert prompt is not None
    with session.open_pipeline(model, config) as pipe:
        stats = session.stream_answer(pipe.stream_infer(prompt, gen_config, do_preprocess=not raw), _write)
    typer.echo()
    say(str(stats))


def _write(text: str) -> None:
    typer.echo(text, nl=False)  # flushes
