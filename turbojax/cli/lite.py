"""`turbojax lite`: the commands that make quantised checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from turbojax.cli import lite_options as options
from turbojax.cli.grouped import grouped

lite = typer.Typer(
    name="lite",
    no_args_is_help=True,
    help="Quantise checkpoints, and measure what that costs.",
    add_completion=False,
)


@lite.command("auto_awq")
@grouped
def auto_awq(
    grid: options.GridOptions,
    calibration: options.CalibrationOptions,
    model: options.Model = None,
    work_dir: options.WorkDir = Path("work_dir"),
    search_scale: Annotated[
        bool, typer.Option("--search-scale/--no-search-scale", help="Look for scales of the input channels.")
    ] = True,
    search_clip: Annotated[
        bool, typer.Option("--search-clip/--no-search-clip", help="Look for the range that each group keeps.")
    ] = True,
    format: options.Format = "awq",
) -> None:
    """Quantise with AWQ: scales of the input channels by their activations, then clipped ranges."""
    from turbojax.lite.methods import Awq

    method = Awq(grid.config(format), search_scale, search_clip)
    options.run(model, work_dir, format, method, calibration.config())


@lite.command("auto_gptq")
@grouped
def auto_gptq(
    grid: options.GridOptions,
    calibration: options.CalibrationOptions,
    model: options.Model = None,
    work_dir: options.WorkDir = Path("work_dir"),
    act_order: Annotated[
        bool, typer.Option("--act-order/--no-act-order", help="Round the inputs with the largest power first.")
    ] = True,
    static_groups: Annotated[
        bool, typer.Option("--static-groups/--no-static-groups", help="Groups stay runs of neighbouring inputs.")
    ] = True,
    damping: Annotated[float, typer.Option(help="Share of the mean power that is added to each input's.")] = 0.01,
    format: options.Format = "gptq",
) -> None:
    """Quantise with GPTQ: weights that are not rounded yet make up for the errors of those that are."""
    from turbojax.lite.gptq import GptqOptions
    from turbojax.lite.methods import Gptq

    method = Gptq(grid.config(format), GptqOptions(act_order, static_groups, damping))
    options.run(model, work_dir, format, method, calibration.config())


@lite.command("rtn")
@grouped
def rtn(
    grid: options.GridOptions,
    model: options.Model = None,
    work_dir: options.WorkDir = Path("work_dir"),
    float_offset: Annotated[
        bool, typer.Option("--float-offset/--no-float-offset", help="Offsets are any numbers; needs --format native.")
    ] = False,
    format: options.Format = "compressed-tensors",
) -> None:
    """Quantise by rounding to nearest; needs no calibration."""
    from turbojax.lite.methods import Rtn

    method = Rtn(grid.config(format, float_offset=float_offset))
    options.run(model, work_dir, format, method)


@lite.command("smooth_quant")
@grouped
def smooth_quant(
    calibration: options.CalibrationOptions,
    model: options.Model = None,
    work_dir: options.WorkDir = Path("work_dir"),
    quant_dtype: Annotated[str, typer.Option(help="int8 or fp8.")] = "int8",
    format: options.Format = "compressed-tensors",
) -> None:
    """Quantise weights and activations to 8 bits, with factors that share what is hard to round between the two."""
    from turbojax.lite.methods import SmoothQuant

    dtype: Any = "float8_e4m3fn" if quant_dtype == "fp8" else quant_dtype
    options.run(model, work_dir, format, SmoothQuant(dtype), calibration.config())


@lite.command("fp8")
def fp8(
    model: options.Model = None,
    work_dir: options.WorkDir = Path("work_dir"),
    blocks: Annotated[
        bool, typer.Option("--blocks/--no-blocks", help="A scale for 128 x 128 weights instead of for each output.")
    ] = False,
    format: Annotated[
        str | None,
        typer.Option(help="compressed-tensors (the default), smooth_quant or native; with --blocks fp8 or native."),
    ] = None,
) -> None:
    """Quantise weights and activations to e4m3; needs no calibration."""
    from turbojax.lite.methods import Fp8

    options.run(model, work_dir, format or ("fp8" if blocks else "compressed-tensors"), Fp8(blocks))
