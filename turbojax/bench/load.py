"""What a benchmark asks of the engine: requests, made up or from a file, and when they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turbojax.bench.errors import BenchError
from turbojax.rules import is_int

PROMPT_KEYS = ("input_len", "token_ids", "prompt")
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class LoadRequest:
    """A request of a load: its prompt (int32 [T]) and how many tokens it generates, whatever they are."""

    prompt_ids: np.ndarray
    num_new_tokens: int


def random_prompt(rng: np.random.Generator, num_tokens: int, vocab_size: int) -> np.ndarray:
    return rng.integers(0, vocab_size, num_tokens, np.int32)


def synthetic_load(
    num_requests: int, input_len: int, output_len: int, *, vocab_size: int, seed: int = 0
) -> list[LoadRequest]:
    """Requests of one length with random prompts; loads of different lengths share no beginnings."""
    rng = np.random.default_rng((seed, num_requests, input_len))
    return [LoadRequest(random_prompt(rng, input_len, vocab_size), output_len) for _ in range(num_requests)]


def read_load(path: Path, *, vocab_size: int, encode: Encode | None = None, seed: int = 0) -> list[LoadRequest]:
    """Requests of a JSONL file: {"input_len" | "token_ids" | "prompt": ..., "output_len": ...} a line.

    Args:
        path: the file.
        vocab_size: of the model.
        encode: text -> token ids; None where the model has no tokenizer.
        seed: of the prompts of which only the length is given.

    Raises:
        BenchError: the file is empty or a line is broken; names the line.
    """
    rng, requests = np.random.default_rng(seed), []
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if raw.strip():
                try:
                    requests.append(_parse(raw, rng, vocab_size, encode))
                except ValueError as error:  # of JSON and of UTF-8 too
                    raise BenchError(f"{path}, line {number}: {error}") from error
    if not requests:
        raise BenchError(f"{path} has no requests; a line is an object with {', '.join(PROMPT_KEYS)} and output_len")
    return requests


def _parse(raw: bytes, rng: np.random.Generator, vocab_size: int, encode: Encode | None) -> LoadRequest:
    """A line as a request.

    Raises:
        ValueError: says what is wrong with it.
    """
    record = json.loads(raw)
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, not {type(record).__name__}")
    kinds = [key for key in PROMPT_KEYS if key in record]
    if len(kinds) != 1 or record.keys() != {kinds[0], "output_len"}:
        raise ValueError(f"one of {', '.join(PROMPT_KEYS)} and output_len are expected, found {sorted(record)}")
    num_new_tokens, value = _positive("output_len", record["output_len"]), record[kinds[0]]
    if kinds[0] == "input_len":
        return LoadRequest(random_prompt(rng, _positive("input_len", value), vocab_size), num_new_tokens)
    if kinds[0] == "prompt":
        if encode is None:
            raise ValueError("prompt: the model has no tokenizer; give token_ids or input_len")
        if not isinstance(value, str):
            raise ValueError("prompt: a text is expected")
        value = encode(value)
    if not isinstance(value, list) or not value or not all(is_int(t, 0, vocab_size - 1) for t in value):
        raise ValueError(f"token_ids: a list of integers of 0 .. {vocab_size - 1} that is not empty is expected")
    return LoadRequest(np.asarray(value, np.int32), num_new_tokens)


def _positive(name: str, value: Any) -> int:
    if not is_int(value, 1):
        raise ValueError(f"{name}: {value!r}, an integer >= 1 is expected")
    return int(value)


def arrival_times(num_requests: int, rate: float, seed: int = 0) -> np.ndarray:
    """Seconds from the start at which requests come, as a Poisson process does: `rate` a second on average.

    Raises:
        BenchError: the rate is not positive.
    """
    if not rate > 0 or rate == float("inf"):
        raise BenchError(f"rate: {rate}, a number of requests a second above 0 is expected")
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num_requests))
