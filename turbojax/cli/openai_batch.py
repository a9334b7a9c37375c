"""`turbojax generate --openai-batch`: OpenAI's batch file in, its answers out, without a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from turbojax.cli import session
from turbojax.cli.bulk_files import count_lines
from turbojax.cli.console import say
from turbojax.cli.line_progress import LineProgress
from turbojax.configs import EngineConfig
from turbojax.errors import MissingExtraError
from turbojax.json_lines import RecordFile

if TYPE_CHECKING:
    from turbojax.serve.batches.answers import Result
    from turbojax.serve.batches.requests import BatchLine, LineError
    from turbojax.serve.service import Service


class Job(NamedTuple):
    """A line of the input, and what it asks for, or why it is no request."""

    number: int
    line: BatchLine | LineError


def finished_id(record: Any) -> str | None:
    """The `custom_id` of a request that was answered; None of an error, whose line is tried again."""
    if not isinstance(record, dict) or not {"custom_id", "response", "error"} <= record.keys():
        raise ValueError("no answer of a batch; give another file")
    response = record["response"]
    is_answer = record["error"] is None and isinstance(response, dict) and response.get("status_code") == 200
    custom_id: str | None = record["custom_id"] if is_answer else None
    return custom_id


def run_openai_batch(model: str | None, config: EngineConfig, source: Path, target: Path) -> None:
    """Answers the lines of `source` that `target` has no answer to.

    Raises:
        typer.Exit: with 1 when lines failed, with 130 after Ctrl-C.
        TurbojaxError: the target is not a file of answers, or cannot be written; the engine cannot go on; the extra
            `serve` is not installed.
    """
    try:
        from turbojax.serve.batches.runner import root_of
        from turbojax.serve.service import Service
        from turbojax.serve.settings import ServeConfig
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed: pip install 'turbojax[serve]'") from error
    from turbojax.cli.serve import default_name

    num_lines = count_lines(source)
    with RecordFile(target, finished_id) as results:
        num_before = len(results.finished)
        if num_before >= num_lines:
            say(f"{target}: all {num_lines} lines are answered")
            return
        progress = LineProgress(num_lines, num_before)
        try:
            with session.open_pipeline(model, config) as pipe, progress:
                service = Service(pipe, ServeConfig(min_priority=-(2**31)), default_name(model))
                with quiet_log():
                    asyncio.run(answer_lines(service, source, results, progress))
        except ExceptionGroup as error:
            raise root_of(error) from error
        except KeyboardInterrupt:
            say(f"stopped: {len(results.finished)} of {num_lines} lines are answered; the same command goes on")
            raise typer.Exit(130) from None
    if progress.num_failed:
        say(f"{progress.num_failed} lines failed: see {target}; the same command tries them again", style="red")
        raise typer.Exit(1)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Without the line that a server logs for each answer."""
    log = logging.getLogger("turbojax.serve")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


async def answer_lines(service: Service, source: Path, results: RecordFile[str], progress: LineProgress) -> None:
    """Answers what is missing: twice as many lines at a time as the engine has slots, so that none waits for a line."""
    from turbojax.serve.batches.answers import answer, record_of, run_few, unanswered
    from turbojax.serve.batches.requests import LineError

    num_in_flight = 2 * service.pipe.max_batch_size

    async def answer_one(job: Job) -> None:
        number, line = job
        if isinstance(line, LineError):
            results.append(unanswered(line.custom_id, line.code, line.message))
            progress.advance(number, error=line.message)
            return
        result = await answer(service, line.url, line.body, priority=0)
        results.append(record_of(line.custom_id, result))
        progress.advance(
            number, num_tokens=num_generated(result), error=error_of(result), is_engine_error=result.status >= 500
        )
        progress.check_engine(num_in_flight)

    await run_few(jobs_of(service, source, results.finished), answer_one, asyncio.Semaphore(num_in_flight))


def jobs_of(service: Service, source: Path, finished: set[str]) -> Iterator[Job]:
    """The lines that are not finished, read as they are asked for."""
    from turbojax.serve.batches.requests import LineError, numbered_lines, parse_line

    seen = set[str]()
    before = frozenset(finished)
    with source.open("rb") as file:
        for number, _, raw in numbered_lines(file, service.config.max_body_bytes):
            if not raw.strip():
                continue
            try:
                line = parse_line(raw, service.config)
                if line.custom_id in seen:
                    raise LineError("duplicate_custom_id", f"an earlier line has custom_id {line.custom_id!r}")
            except LineError as error:
                yield Job(number, error)
                continue
            seen.add(line.custom_id)
            if line.custom_id not in before:
                yield Job(number, line)


def num_generated(result: Result) -> int:
    usage = result.body.get("usage") or {}
    return int(usage.get("completion_tokens") or 0)


def error_of(result: Result) -> str | None:
    return None if result.is_success else result.body["error"]["message"]
