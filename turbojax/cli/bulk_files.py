"""The two files of a bulk run: lines that become jobs, and results that survive an interruption."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from turbojax.cli import options
from turbojax.cli.session import Prompt
from turbojax.configs import GenerationConfig
from turbojax.errors import TurbojaxError
from turbojax.json_lines import RecordFile

PROMPT_KEYS = ("prompt", "messages", "token_ids")
# Arrays do not go into a line of text.
GENERATION_KEYS = frozenset(f.name for f in fields(GenerationConfig)) - {"output_logits", "output_last_hidden_state"}


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


class ResultFile(RecordFile[int]):
    """Results by the numbers of their input lines.

    Going on drops the records with an error: their lines are tried again, in case the cause is gone.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file to go on with it.

        Raises:
            RecordFileError: it holds something else, or cannot be written.
        """
        super().__init__(path, finished_line)


def finished_line(record: Any) -> int | None:
    """The input line that a record answers; None of an error."""
    if not isinstance(record, dict) or not isinstance(record.get("line"), int):
        raise ValueError("no result of a bulk run; give another --output")
    line: int = record["line"]
    return None if "error" in record else line
