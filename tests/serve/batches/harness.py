"""Batches on a fake engine: input files, runners, and answers that can be held back."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from turbojax.serve.batches.answers import Result
from turbojax.serve.batches.disk import Folder
from turbojax.serve.batches.protocol import Batch, BatchRequest
from turbojax.serve.batches.runner import BatchRunner
from turbojax.serve.settings import ServeConfig

CHAT = "/v1/chat/completions"
WAIT_S = 20


def line(custom_id: Any, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    """Lines of a file; a text stands for itself."""
    return "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines).encode()


def records(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(one) for one in data.splitlines()]


class FakeAnswers:
    """Answers with the text of a body.

    Attributes:
        num_answered: by text.
        most_at_once: requests that were in flight together.
        gate: texts that begin with "wait" are answered once it is set.
        num_busy: so many requests find no room first.
    """

    def __init__(self) -> None:
        self.num_answered, self.num_started = Counter[str](), 0
        self.gate, self.most_at_once, self._num_at_once, self.num_busy = asyncio.Event(), 0, 0, 0
        self.error: Exception | None = None

    async def __call__(self, url: str, body: dict[str, Any]) -> Result:
        text = body["text"]
        self.num_started += 1
        self._num_at_once += 1
        self.most_at_once = max(self.most_at_once, self._num_at_once)
        try:
            await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            if self.num_busy:
                self.num_busy -= 1
                return Result(429, {})
            if text.startswith("wait"):
                await self.gate.wait()
            self.num_answered[text] += 1
            return Result(400, {"error": {"message": text}}) if text.startswith("bad") else Result(200, {"text": text})
        finally:
            self._num_at_once -= 1


class Clock:
    """A time that tests set."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def running(
    path: Path, answers: FakeAnswers, num_in_flight: int = 3, clock: Clock | None = None, **config: Any
) -> AsyncGenerator[BatchRunner, None]:
    """A runner on a folder; leaving stops it as a server's end would."""
    settings = ServeConfig(batch_dir=str(path), **config)
    runner = BatchRunner(Folder(path), settings, answers, num_in_flight, clock or Clock())
    runner.start()
    try:
        yield runner
    finally:
        await runner.stop()


def begin(runner: BatchRunner, *lines: Any, **how: Any) -> Batch:
    """Uploads lines and begins a batch of them."""
    file = runner.files.create(io.BytesIO(jsonl(*lines)), "in.jsonl")
    request = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | how
    return runner.create(BatchRequest(**request))


async def until(condition: Any, what: str) -> None:
    """Waits, with an end."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)
    assert condition(), what


async def ended(runner: BatchRunner, batch: Batch) -> Batch:
    await until(lambda: runner.get(batch.id).is_final, "the batch did not end")
    return runner.get(batch.id)


def output(runner: BatchRunner, batch: Batch) -> list[dict[str, Any]]:
    return [] if batch.output_file_id is None else records(runner.files.content(batch.output_file_id).read_bytes())


def errors(runner: BatchRunner, batch: Batch) -> list[dict[str, Any]]:
    return [] if batch.error_file_id is None else records(runner.files.content(batch.error_file_id).read_bytes())
