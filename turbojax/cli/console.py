"""The terminal: standard error for everything that is not the answer itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

# Standard output carries generated text alone, so that it can be piped.
stderr = Console(stderr=True)


def say(text: str, style: str = "dim") -> None:
    """One line on standard error, never wrapped and with nothing in it taken for markup."""
    stderr.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def say_error(error: Exception) -> None:
    """`error: ...` on one line."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = " ".join(str(error).split())
    say(f"error: {text}", style="red")


class _SayHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), style="dim" if record.levelno < logging.WARNING else "yellow")


@contextmanager
def shown_log() -> Iterator[None]:
    """Shows what turbojax logs meanwhile: the memory plan, and steps that failed and were recovered from."""
    log, handler = logging.getLogger("turbojax"), _SayHandler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
