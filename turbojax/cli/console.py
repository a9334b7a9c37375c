"""The terminal: standard error for everything that is not the answer itself."""

from __future__ import annotations

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
