"""Progress bars on standard error, where that is a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def progress(*columns: ProgressColumn) -> Progress:
    """A bar that vanishes when it is done, and that a file or pipe never sees."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
