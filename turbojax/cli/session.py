"""What the commands need of a pipeline: opening it, and one streamed answer with its timings."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turbojax.cli.console import shown_log
from turbojax.configs import EngineConfig
from turbojax.distributed.places import place_of
from turbojax.engine.response import Response
from turbojax.errors import TurbojaxError

if TYPE_CHECKING:
    from turbojax.api import Pipeline

log = logging.getLogger(__name__)

Prompt = str | list[dict[str, Any]] | list[int]
"""A text, chat messages or token ids."""


@contextmanager
def open_pipeline(
    model: str | None, config: EngineConfig, shown: Callable[[], AbstractContextManager[None]] = shown_log
) -> Iterator[Pipeline]:
    """A pipeline that is closed at the end; `shown` is who shows what it logs. Imports the engine, and with it jax."""
    from turbojax.api import pipeline

    with shown():
        log.info("loading %s", model or "the default model")
        with pipeline(model, backend_config=config) as pipe:
            yield pipe


def follow(
    model: str | None, config: EngineConfig, shown: Callable[[], AbstractContextManager[None]] = shown_log
) -> None:
    """Where this process is not the first of several, it runs the steps of the first one and then ends (SystemExit):
    files, ports and answers are the first one's alone."""
    if config.cluster is None or place_of(config.cluster).is_leader:
        return
    # Sent to all processes at once, it would cut the requests that the first one still answers: that one ends this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open_pipeline(model, config, shown):
        raise AssertionError("a follower does not come back")


@dataclass
class AnswerStats:
    """Counts and times of one answer."""

    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str | None = None

    def __str__(self) -> str:
        decode_s = self.total_s - self.first_token_s
        num_decoded = self.num_generated_tokens - 1
        rate = f", {num_decoded / decode_s:.1f} tokens/s after it" if num_decoded > 0 and decode_s > 0 else ""
        ended = " (stopped by max-new-tokens or session-len)" if self.finish_reason == "length" else ""
        return (
            f"{self.num_input_tokens} prompt tokens, first token after {self.first_token_s:.2f} s; "
            f"{self.num_generated_tokens} tokens{rate}{ended}"
        )


def stream_answer(stream: Generator[Response, None, None], write: Callable[[str], None]) -> AnswerStats:
    """Streams one answer into `write`.

    Args:
        stream: its pieces.
        write: called with each piece of text.

    Raises:
        TurbojaxError: the request failed.
    """
    stats, start = AnswerStats(), time.perf_counter()
    try:
        for delta in stream:
            if delta.error is not None:
                raise TurbojaxError(delta.error)
            stats.first_token_s = stats.first_token_s or time.perf_counter() - start
            stats.num_input_tokens, stats.num_generated_tokens = delta.num_input_tokens, delta.num_generated_tokens
            stats.finish_reason = delta.finish_reason
            write(delta.text)
    finally:
        stream.close()  # cancels the request where it was left early (Ctrl-C)
    stats.total_s = time.perf_counter() - start
    return stats
