"""Prompts for an endpoint whose tokenizer nobody here has: random token ids, words, or the lines of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turbojax.bench.client import HttpRequest
from turbojax.bench.errors import BenchError

# Common words, most of which are one token in most vocabularies.
WORDS_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
WORDS = tuple(WORDS_TEXT.split())


def lengths(text: str, name: str) -> tuple[int, int]:
    """ "128" or "64-256" as the least and the most.

    Raises:
        BenchError: neither.
    """
    parts = text.split("-")
    try:
        low, high = int(parts[0]), int(parts[-1])
    except ValueError:
        low, high = 0, -1
    if len(parts) > 2 or not 1 <= low <= high:
        raise BenchError(f"{name}: {text!r}, a number of tokens (128) or a range of them (64-256) is expected")
    return low, high


def random_requests(
    num_requests: int, input_len: str, output_len: str, *, is_chat: bool, vocab_size: int, seed: int
) -> list[HttpRequest]:
    """Prompts of random lengths, without a common beginning.

    Args:
        num_requests: how many.
        input_len, output_len: see `lengths`; of a chat, words of a prompt, about as many tokens.
        is_chat: texts of random words; else random token ids.
        vocab_size: ids are below it.
        seed: of all that is random.
    """
    rng = np.random.default_rng(seed)
    (in_low, in_high), (out_low, out_high) = lengths(input_len, "input-len"), lengths(output_len, "output-len")
    if vocab_size < 2:
        raise BenchError(f"vocab-size: {vocab_size}, an integer >= 2 is expected")
    requests = []
    for _ in range(num_requests):
        num_in, num_out = int(rng.integers(in_low, in_high + 1)), int(rng.integers(out_low, out_high + 1))
        prompt: str | list[int] = rng.integers(0, vocab_size, num_in).tolist()
        if is_chat:
            prompt = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), num_in))
        requests.append(HttpRequest(prompt, num_out))
    return requests


def read_prompts(path: Path, num_requests: int, output_len: str, *, seed: int) -> list[HttpRequest]:
    """The lines of a text file, from the first one again where there are fewer than requests.

    Raises:
        BenchError: it has no prompt, or is no text.
    """
    try:
        lines: Sequence[str] = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise BenchError(f"{path} is no text in UTF-8: {error}") from error
    lines = [line for line in lines if line]
    if not lines:
        raise BenchError(f"{path} has no prompts; one a line is expected")
    low, high = lengths(output_len, "output-len")
    counts = np.random.default_rng(seed).integers(low, high + 1, num_requests)
    return [HttpRequest(lines[i % len(lines)], int(count)) for i, count in enumerate(counts)]
