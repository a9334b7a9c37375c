"""The two files of a bulk run: lines that become jobs, and results that survive an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from turbojax.cli import options
from turbojax.cli.session import Prompt
from turbojax.configs import GenerationConfig
from turbojax.errors import TurbojaxError

COPY_BYTES = 1 << 20
PROMPT_KEYS = ("prompt", "messages", "token_ids")
# Arrays do not go into a line of text.
GENERATION_KEYS = frozenset(f.name for f in fields(GenerationConfig)) - {"output_logits", "output_last_hidden_state"}


class BulkFileError(TurbojaxError):
    """A file of a bulk run cannot be read or written."""


@dataclass(frozen=True)
class Job:
    """A line that can be run. `line` counts from 1; `id` is the line's own."""

    line: int
    id: Any
    prompt: Prompt
    gen_config: GenerationConfig


@dataclass(frozen=True)
class LineError:
    """A line that cannot be run, and why."""

    line: int
    id: Any
    error: str


def read_jobs(source: Path, base: GenerationConfig, skip: Container[int] = ()) -> Iterator[Job | LineError]:
    """The lines of a JSONL file, blank ones and those in `skip` left out; read as they are asked for."""
    with source.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if number not in skip and raw.strip():
                yield parse_line(number, raw, base)


def count_lines(source: Path) -> int:
    """Lines that are not blank."""
    with source.open("rb") as lines:
        return sum(1 for raw in lines if raw.strip())


def parse_line(number: int, raw: bytes, base: GenerationConfig) -> Job | LineError:
    """One line as a job: {"prompt" | "messages" | "token_ids": ..., "id": ..., generation parameters}."""
    try:
        record = json.loads(raw)
    except ValueError as error:  # of JSON and of UTF-8
        return LineError(number, None, f"no JSON: {error}")
    if not isinstance(record, dict):
        return LineError(number, None, f"a JSON object is expected, not {type(record).__name__}")
    own_id = record.pop("id", None)
    prompts = [key for key in PROMPT_KEYS if key in record]
    if len(prompts) != 1:
        return LineError(number, own_id, f"one of {', '.join(PROMPT_KEYS)} is expected, found {prompts or 'none'}")
    kind = prompts[0]
    prompt = record.pop(kind)
    if problem := _prompt_problem(kind, prompt):
        return LineError(number, own_id, problem)
    if unknown := sorted(record.keys() - GENERATION_KEYS):
        return LineError(number, own_id, f"unknown fields {unknown}; known: {', '.join(sorted(GENERATION_KEYS))}")
    try:
        return Job(number, own_id, prompt, options.generation_config(base, **record))
    except TurbojaxError as error:
        return LineError(number, own_id, str(error))


def _prompt_problem(kind: str, prompt: Any) -> str | None:
    if kind == "prompt":
        return None if isinstance(prompt, str) else "prompt: a text is expected"
    if not isinstance(prompt, list) or not prompt:
        return f"{kind}: a list that is not empty is expected"
    if kind == "messages" and not all(isinstance(m, dict) and "role" in m for m in prompt):
        return 'messages: objects with "role" and "content" are expected'
    if kind == "token_ids" and not all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in prompt):
        return "token_ids: integers >= 0 are expected"
    return None


class ResultFile:
    """JSON lines, each written whole before the next is begun, so that a stopped run can go on.

    Going on drops the records with an error: their lines are tried again, in case the cause is gone.

    Attributes:
        finished: numbers of the input lines that have a record.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file to go on with it.

        Raises:
            BulkFileError: it holds something else, or cannot be written.
        """
        self.path = path
        self.finished: set[int] = set()
        kept = self._read_finished() if path.is_file() else None
        try:
            if kept is not None:
                self._rewrite(kept)
            # Unbuffered: what append() returned from is with the operating system.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise BulkFileError(f"cannot write {path}: {error.strerror}") from error

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _read_finished(self) -> list[range]:
        """Collects the finished lines; returns where their records stand, as runs of bytes."""
        kept: list[range] = []
        start = 0
        with self.path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if not raw.endswith(b"\n"):  # was not written to its end
                    break
                end = start + len(raw)
                record = self._record(number, raw)
                if "error" not in record:
                    self.finished.add(record["line"])
                    if kept and kept[-1].stop == start:
                        kept[-1] = range(kept[-1].start, end)
                    else:
                        kept.append(range(start, end))
                start = end
        return kept

    def _record(self, number: int, raw: bytes) -> dict[str, Any]:
        try:
            record = json.loads(raw)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("line"), int):
            raise BulkFileError(f"{self.path}, line {number} is no result of a bulk run; give another --output")
        return record

    def _rewrite(self, kept: list[range]) -> None:
        """Leaves only these bytes; a file that must lose some from its middle is replaced in one go."""
        if len(kept) <= 1 and (not kept or kept[0].start == 0):
            os.truncate(self.path, kept[0].stop if kept else 0)
            return
        clean = self.path.with_name(self.path.name + ".tmp")
        try:
            with self.path.open("rb") as old, clean.open("wb") as new:
                for run in kept:
                    old.seek(run.start)
                    for start in range(run.start, run.stop, COPY_BYTES):
                        new.write(old.read(min(COPY_BYTES, run.stop - start)))
            clean.replace(self.path)
        except OSError:
            clean.unlink(missing_ok=True)
            raise

    def append(self, record: dict[str, Any]) -> None:
        """Writes a record.

        Raises:
            BulkFileError: the disk is full, for example; what was appended before is safe.
        """
        # A lone surrogate cannot be encoded; as an escape it is what JSON makes of it.
        rest = memoryview((json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise BulkFileError(
                f"cannot write {self.path}: {error.strerror}; what it holds is safe, the same command goes on"
            ) from error
        self.finished.add(record["line"])
