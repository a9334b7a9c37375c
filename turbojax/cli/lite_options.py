"""The options that the commands of `turbojax lite` share, and how a run of theirs shows itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from turbojax.cli.console import say, shown_log
from turbojax.hub import resolve_model
from turbojax.progress import progress

if TYPE_CHECKING:
    from turbojax.lite.calibration import Calibration
    from turbojax.lite.grid import Grid
    from turbojax.lite.methods import Method
    from turbojax.lite.run import Progress

_CALIBRATION, _OUTPUT = "Calibration", "Output"
SECONDS_A_LINE = 60.0  # a layer of a 7B model takes a processor minutes

Model = Annotated[
    str | None,
    typer.Argument(help="A folder, a .gguf file or a Hugging Face repo id; default: SmolLM2-135M-Instruct."),
]
WorkDir = Annotated[
    Path, typer.Option(rich_help_panel=_OUTPUT, help="The checkpoint to write; a run under way keeps NAME.partial.")
]
Format = Annotated[
    str,
    typer.Option(
        rich_help_panel=_OUTPUT, help="awq, gptq, gptq_v2, compressed-tensors, smooth_quant, fp8 or native (Orbax)."
    ),
]


@dataclass(frozen=True)
class GridOptions:
    """Where rounded weights may lie."""

    w_bits: Annotated[int, typer.Option(help="Bits of a weight, 4 or 8.")] = 4
    w_group_size: Annotated[int, typer.Option(help="Inputs that share a scale: 32, 64 or 128.")] = 128
    w_sym: Annotated[bool, typer.Option("--w-sym/--w-asym", help="Zero points in the middle, or fitted.")] = False

    def config(self, format: str, *, float_offset: bool = False) -> Grid:
        """The grid of the options; version 1 of GPTQ has no place for a zero point of 0."""
        from turbojax.lite.grid import Grid

        min_zero = 1 if format == "gptq" else 0
        return Grid(self.w_bits, self.w_group_size, self.w_sym, float_offset, min_zero=min_zero)


@dataclass(frozen=True)
class CalibrationOptions:
    """The text that activations are measured on."""

    calib_dataset: Annotated[
        str, typer.Option(rich_help_panel=_CALIBRATION, help="builtin, or a Hugging Face data set (needs `datasets`).")
    ] = "builtin"
    calib_data: Annotated[
        Path | None, typer.Option(rich_help_panel=_CALIBRATION, help="A .txt or .jsonl file of your own instead.")
    ] = None
    calib_samples: Annotated[int, typer.Option(rich_help_panel=_CALIBRATION, help="Sequences.")] = 32
    calib_seqlen: Annotated[int, typer.Option(rich_help_panel=_CALIBRATION, help="Tokens of each.")] = 512
    batch_size: Annotated[
        int, typer.Option(rich_help_panel=_CALIBRATION, help="Sequences at once: memory and speed, not the result.")
    ] = 4

    def config(self) -> Calibration:
        from turbojax.lite.calibration import Calibration

        return Calibration(**vars(self))


def run(model: str | None, work_dir: Path, format: str, method: Method, calibration: Calibration | None = None) -> None:
    """Quantises with a progress bar on standard error; the report goes to standard output."""
    from turbojax.lite.run import Task, quantise

    task = Task(resolve_model(model), work_dir, method, format, calibration)
    with shown_log(), shown_progress() as hears:
        report = quantise(task, hears)
    typer.echo(report.table())
    say(f"the same as JSON: {report.json_path}")


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A bar for each kind of work; a line a minute at most where standard error is a file or a pipe."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with progress(*columns, TimeRemainingColumn()) as bar:
        tasks, start = {}, time.monotonic()
        next_line = start + SECONDS_A_LINE

        def hears(what: str, done: int, total: int) -> None:
            nonlocal next_line
            now = time.monotonic()
            if bar.disable and now >= next_line:
                next_line = now + SECONDS_A_LINE
                say(f"{what} {done} of {total} after {now - start:.0f} s")
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield hears
