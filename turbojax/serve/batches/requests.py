"""The lines of an input file: {"custom_id", "method": "POST", "url", "body"}, checked one by one."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from turbojax.serve.bodies import check_shape
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.settings import ServeConfig

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
FIELDS = ("custom_id", "method", "url", "body")
MAX_CUSTOM_ID_LEN = 512
# A file that is wrong from end to end is told by so many of its lines.
MAX_PROBLEMS = 100


class LineError(Exception):
    """A line is no request.

    Attributes:
        code: a word for programs.
        param: the field at fault.
        custom_id: of the line, where it has one.
    """

    def __init__(self, code: str, message: str, param: str | None = None, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param, self.custom_id = code, message, param, custom_id


class Problem(NamedTuple):
    """A line that is no request; lines count from 1, None is the file as a whole."""

    line: int | None
    error: LineError


class Entry(NamedTuple):
    """Where a request stands in its file."""

    custom_id: str
    start: int
    num_bytes: int


class BatchLine(NamedTuple):
    """A request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass
class Index:
    """What a file holds."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse_line(raw: bytes, config: ServeConfig, endpoint: str | None = None) -> BatchLine:
    """A line as a request; the fields of its body are for the endpoint to check.

    Args:
        raw: the line.
        config: its `max_body_bytes` and `max_json_depth` hold for each line.
        endpoint: what its url must be; None is any that there is.

    Raises:
        LineError: it is none.
    """
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    if len(raw) > config.max_body_bytes:
        raise LineError("line_too_large", f"the line is larger than {config.max_body_bytes} bytes")
    try:
        check_shape(raw, config.max_json_depth)
        record = json.loads(raw)
    except ApiError as error:
        raise LineError(error.code or "invalid_json_line", error.message) from error
    except ValueError as error:  # of JSON and of UTF-8
        raise LineError("invalid_json_line", f"the line is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise LineError("invalid_json_line", f"a JSON object is expected, not {type(record).__name__}")
    return checked(record, (endpoint,) if endpoint else ENDPOINTS)


def checked(record: dict[str, Any], urls: Collection[str]) -> BatchLine:
    """A JSON object as a request.

    Raises:
        LineError: it is none.
    """
    custom_id = record.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_LEN:
        accepted = f"custom_id: a text of 1 .. {MAX_CUSTOM_ID_LEN} characters is expected"
        raise LineError("missing_required_parameter", accepted, "custom_id")
    if unknown := sorted(record.keys() - set(FIELDS)):
        message = f"unknown fields {unknown}; known: {', '.join(FIELDS)}"
        raise LineError("unknown_parameter", message, unknown[0], custom_id)
    if record.get("method") != "POST":
        raise LineError("invalid_method", 'method: "POST" is expected', "method", custom_id)
    url = record.get("url")
    if not isinstance(url, str) or url not in urls:
        raise LineError("invalid_url", f"url: {' or '.join(urls)} is expected", "url", custom_id)
    if not isinstance(record.get("body"), dict):
        raise LineError("missing_required_parameter", "body: a JSON object is expected", "body", custom_id)
    return BatchLine(custom_id, url, record["body"])


def index_requests(path: Path, endpoint: str, config: ServeConfig) -> Index:
    """Reads a whole file, a line at a time; blank lines count as none."""
    index, seen = Index(), set[str]()
    try:
        with path.open("rb") as file:
            for number, start, raw in numbered_lines(file, config.max_body_bytes):
                if raw.strip():
                    _take(index, seen, number, raw, start, endpoint, config)
                if len(index.problems) >= MAX_PROBLEMS:
                    return index
    except OSError as error:
        index.problems.append(Problem(None, LineError("file_not_readable", f"the file: {error.strerror}")))
    if not index.entries and not index.problems:
        index.problems.append(Problem(None, LineError("empty_file", "the file has no requests")))
    return index


def numbered_lines(file: IO[bytes], max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, where it begins, line); of one that is larger than `max_bytes`, no more than shows it."""
    number, start = 0, 0
    while raw := file.readline(max_bytes + 2):
        number += 1
        piece, end = raw, start + len(raw)
        while not piece.endswith(b"\n") and (piece := file.readline(max_bytes)):
            end += len(piece)
        yield number, start, raw
        start = end


def _take(
    index: Index, seen: set[str], number: int, raw: bytes, start: int, endpoint: str, config: ServeConfig
) -> None:
    try:
        custom_id = parse_line(raw, config, endpoint).custom_id
        if custom_id in seen:
            raise LineError("duplicate_custom_id", f"an earlier line has custom_id {custom_id!r}", "custom_id")
        if len(seen) >= config.max_batch_requests:
            raise LineError("too_many_requests", f"at most {config.max_batch_requests} requests are taken")
    except LineError as error:
        index.problems.append(Problem(number, error))
        return
    seen.add(custom_id)
    index.entries.append(Entry(custom_id, start, len(raw)))


def read_requests(path: Path, entries: Collection[Entry], config: ServeConfig) -> Generator[BatchLine]:
    """The requests that entries of an index point at, read as they are asked for."""
    with path.open("rb") as file:
        for entry in entries:
            file.seek(entry.start)
            yield parse_line(file.read(entry.num_bytes), config)
