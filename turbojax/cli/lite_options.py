"""The options that the commands of `turbojax lite` share, and how a run of theirs shows itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
Bits = Annotated[int, typer.Option(help="Bits of a weight, 4 or 8.")]
GroupSize = Annotated[int, typer.Option(help="Inputs that share a scale: 32, 64 or 128.")]
Symmetric = Annotated[bool, typer.Option("--w-sym/--w-asym", help="Zero points in the middle, or fitted.")]
CalibDataset = Annotated[
    str, typer.Option(rich_help_panel=_CALIBRATION, help="builtin, or a Hugging Face data set (needs `datasets`).")
]
CalibData = Annotated[
    Path | None, typer.Option(rich_help_panel=_CALIBRATION, help="A .txt or .jsonl file of your own instead.")
]
CalibSamples = Annotated[int, typer.Option(rich_help_panel=_CALIBRATION, help="Sequences.")]
CalibSeqlen = Annotated[int, typer.Option(rich_help_panel=_CALIBRATION, help="Tokens of each.")]
BatchSize = Annotated[
    int, typer.Option(rich_help_panel=_CALIBRATION, help="Sequences at once: memory and speed, not the result.")
]


def grid(bits: int, group_size: int, symmetric: bool, format: str, *, float_offset: bool = False) -> Grid:
    """The grid of the options; version 1 of GPTQ has no place for a zero point of 0."""
    from turbojax.lite.grid import Grid

    return Grid(bits, group_size, symmetric, float_offset, min_zero=1 if format == "gptq" else 0)


def calibration(dataset: str, data: Path | None, samples: int, seqlen: int, batch_size: int) -> Calibration:
    """The calibration of the options."""
    from turbojax.lite.calibration import Calibration

    return Calibration(dataset, data, samples, seqlen, batch_size)


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
    """A bar for each kind of work."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with progress(*columns, TimeRemainingColumn()) as bar:
        tasks = {}

        def hears(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield hears
