"""How far a run over the lines of a file is, on standard error."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from turbojax.cli.console import say, stderr
from turbojax.errors import TurbojaxError


class LineProgress:
    """A bar, and one line for each line of the file that failed.

    Attributes:
        num_failed: lines with an error.
    """

    def __init__(self, num_lines: int, num_before: int) -> None:
        self.num_failed = 0
        self._num_engine_errors_in_a_row, self._last_error = 0, ""
        self._num_tokens = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=stderr,
        )
        self._task = self._bar.add_task("lines", total=num_lines, completed=num_before, rate="")

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(
        self, line: int, *, num_tokens: int = 0, error: str | None = None, is_engine_error: bool = False
    ) -> None:
        """A line is done."""
        self._num_tokens += num_tokens
        elapsed_s = self._bar.tasks[0].elapsed or 0.0
        rate = f"{self._num_tokens / elapsed_s:,.0f} tokens/s" if elapsed_s > 0 else ""
        self._bar.update(self._task, advance=1, rate=rate)
        self._num_engine_errors_in_a_row = self._num_engine_errors_in_a_row + 1 if is_engine_error else 0
        if error is not None:
            self.num_failed, self._last_error = self.num_failed + 1, error
            say(f"line {line}: {error}", style="red")

    def check_engine(self, num_in_flight: int) -> None:
        """
        Raises:
            TurbojaxError: it has failed more requests in a row than are in flight together.
        """
        if self._num_engine_errors_in_a_row > num_in_flight:
            raise TurbojaxError(f"the engine fails again and again, the last time with: {self._last_error}")
