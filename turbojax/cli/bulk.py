"""A JSONL file of prompts in, a JSONL file of results out, in whatever order they finish."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from turbojax.cli import session
from turbojax.cli.bulk_files import Job, LineError, ResultFile, count_lines, read_jobs
from turbojax.cli.console import say
from turbojax.cli.line_progress import LineProgress
from turbojax.configs import EngineConfig, GenerationConfig
from turbojax.errors import EngineFailedError, TurbojaxError

if TYPE_CHECKING:
    from turbojax.api import Pipeline
    from turbojax.engine.response import Response

INTERRUPT_POLL_S = 0.2


def run_bulk(
    model: str | None, config: EngineConfig, gen_config: GenerationConfig, source: Path, target: Path, *, raw: bool
) -> None:
    """Runs the lines of `source` that `target` has no record of.

    Raises:
        typer.Exit: with 1 when lines failed, with 130 after Ctrl-C.
        TurbojaxError: the target is not a file of results, or cannot be written; the engine cannot go on.
    """
    num_lines = count_lines(source)
    with ResultFile(target) as results:
        num_before = len(results.finished)
        if num_before >= num_lines:
            say(f"{target}: all {num_lines} lines are finished")
            return
        progress = LineProgress(num_lines, num_before)
        jobs = read_jobs(source, gen_config, skip=frozenset(results.finished))

        def emit(record: dict[str, Any]) -> None:
            results.append(record)
            progress.advance(
                record["line"],
                num_tokens=record.get("num_generated_tokens", 0),
                error=record.get("error"),
                is_engine_error=record.get("finish_reason") == "error",
            )
            progress.check_engine(num_in_flight)

        try:
            with session.open_pipeline(model, config) as pipe, progress:
                num_in_flight = 2 * pipe.max_batch_size  # a slot that becomes free finds the next request waiting
                run_jobs(pipe, jobs, num_in_flight, emit, raw=raw)
        except KeyboardInterrupt:
            say(f"stopped: {len(results.finished)} of {num_lines} lines are finished; the same command goes on")
            raise typer.Exit(130) from None
    if progress.num_failed:
        say(
            f'{progress.num_failed} lines failed: see "error" in {target}; the same command tries them again',
            style="red",
        )
        raise typer.Exit(1)


def run_jobs(
    pipe: Pipeline,
    jobs: Iterator[Job | LineError],
    num_in_flight: int,
    emit: Callable[[dict[str, Any]], None],
    *,
    raw: bool,
) -> None:
    """Runs jobs, at most `num_in_flight` at a time, and emits the record of each as it finishes.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once what had finished is emitted; the pipeline is then closed.
    """
    running: set[Future[dict[str, Any]]] = set()
    executor = ThreadPoolExecutor(num_in_flight, thread_name_prefix="turbojax-bulk")
    try:
        with _interrupt_flag() as interrupted:
            while not interrupted.is_set():
                for job in itertools.islice(jobs, num_in_flight - len(running)):
                    if isinstance(job, LineError):
                        emit({"line": job.line, "id": job.id, "error": job.error})
                    else:
                        running.add(executor.submit(_answer, pipe, job, raw))
                if not running:
                    return
                done, running = wait(running, timeout=INTERRUPT_POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    emit(future.result())
            done, running = wait(running, timeout=0)
            for future in done:
                emit(future.result())
        raise KeyboardInterrupt
    finally:
        if running:
            # Their threads wait for answers; a closed pipeline gives them errors instead.
            for future in running:
                future.cancel()
            pipe.close()
        executor.shutdown()


@contextmanager
def _interrupt_flag() -> Iterator[threading.Event]:
    """Ctrl-C sets the flag instead of raising between two arbitrary lines; a second one raises."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield flag
        return

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        flag.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


def _answer(pipe: Pipeline, job: Job, raw: bool) -> dict[str, Any]:
    """The record of one job; an error of the request is part of it."""
    record: dict[str, Any] = {"line": job.line, "id": job.id}
    try:
        response = pipe(job.prompt, job.gen_config, do_preprocess=not raw)
    except EngineFailedError:
        raise  # no line will run any more
    except TurbojaxError as error:
        return record | {"error": str(error)}
    samples = response if isinstance(response, list) else [response]
    errors = [sample.error for sample in samples if sample.error is not None]
    if errors:
        return record | {"finish_reason": "error", "error": errors[0]}
    if isinstance(response, list):  # n > 1
        num_generated = sum(sample.num_generated_tokens for sample in samples)
        return record | {
            "samples": [_fields(sample) for sample in samples],
            "num_input_tokens": samples[0].num_input_tokens,
            "num_generated_tokens": num_generated,
        }
    return record | _fields(response)


def _fields(response: Response) -> dict[str, Any]:
    """What a record says of an answer; log-probabilities where they were asked for."""
    found = {
        "text": response.text,
        "token_ids": list(response.token_ids),
        "finish_reason": response.finish_reason,
        "num_input_tokens": response.num_input_tokens,
        "num_generated_tokens": response.num_generated_tokens,
    }
    logprobs = {name: getattr(response, name) for name in ("logprobs", "processed_logprobs", "prompt_logprobs")}
    return found | {name: value for name, value in logprobs.items() if value is not None}
