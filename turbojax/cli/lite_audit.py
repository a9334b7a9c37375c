"""`turbojax lite perplexity`, `audit` and `calibrate`: what a precision costs, measured on a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from turbojax.cli import options
from turbojax.cli.console import say
from turbojax.cli.lite_options import Model
from turbojax.hub import resolve_model

if TYPE_CHECKING:
    from turbojax.lite.audit_report import AuditReport
    from turbojax.lite.audit_run import AuditTask

TABLE_WIDTH = 120  # of output that goes to a file

Text = Annotated[
    Path | None,
    typer.Option("--text", exists=True, dir_okay=False, help="A UTF-8 text to measure on; default: a built-in one."),
]
WindowLen = Annotated[int, typer.Option("--window-len", min=2, help="Tokens of a window; each is run alone.")]
NumWindows = Annotated[
    int | None, typer.Option("--num-windows", min=1, help="Most windows, from the text's beginning; default: all.")
]
KBits = Annotated[int | None, typer.Option("--k-bits", help="Bits of K where they differ: 16, 8 or 4.")]
VBits = Annotated[int | None, typer.Option("--v-bits", help="Bits of V where they differ: 16, 8 or 4.")]


def perplexity(
    model: Model = None,
    text: Text = None,
    window_len: WindowLen = 1024,
    num_windows: NumWindows = None,
    dtype: options.Dtype = None,
    quant_policy: options.QuantPolicy = None,
    k_bits: KBits = None,
    v_bits: VBits = None,
    kv_hadamard: Annotated[
        bool | None, typer.Option("--kv-hadamard/--no-kv-hadamard", help="Turn queries and keys where K has 4 bits.")
    ] = None,
) -> None:
    """Perplexity of a model on a text, with the engine's own steps.

    The text is cut into windows that do not overlap; each is run alone from position 0, without a start token, and all
    its tokens but the first are scored.
    """
    from turbojax.lite.perplexity import measure_perplexity

    config = options.engine_config(
        dtype=dtype, quant_policy=quant_policy, k_bits=k_bits, v_bits=v_bits, kv_hadamard=kv_hadamard
    )
    found = measure_perplexity(model, text, config, window_len=window_len, num_windows=num_windows, say=say)
    say(f"{found.nll:.5f} nats a token over {found.num_scored_tokens} tokens; perplexity:")
    typer.echo(f"{found.perplexity:.4f}")


LayerWindows = Annotated[
    int, typer.Option("--num-layer-windows", min=1, help="Windows for what is measured layer by layer.")
]
KVHadamard = Annotated[
    bool,
    typer.Option("--kv-hadamard/--no-kv-hadamard", help="Turn keys of 4 bits, layer by layer and in what is proposed."),
]
CalibData = Annotated[
    Path | None,
    typer.Option(
        "--calib-data",
        exists=True,
        dir_okay=False,
        help="A UTF-8 text to find the scale of keys on; default: built-in.",
    ),
]
WorkDir = Annotated[
    Path | None, typer.Option("--work-dir", help="Copy the checkpoint there, with the proposed policy in its config.")
]
Write = Annotated[bool, typer.Option("--write", help="Write the proposed policy into the checkpoint itself.")]
Json = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="All figures as JSON.")]
Plot = Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="A PNG; needs the extra `plot`.")]


def audit(
    model: Model = None,
    text: Text = None,
    window_len: WindowLen = 1024,
    num_windows: NumWindows = 4,
    num_layer_windows: LayerWindows = 1,
    per_layer: Annotated[bool, typer.Option("--per-layer/--no-per-layer", help="Measure every layer alone.")] = True,
    w_bits: Annotated[
        list[int] | None,
        typer.Option("--w-bits", help="Round the weights to 8 or 4 bits; by default to what is less than they have."),
    ] = None,
    w_group_size: Annotated[int, typer.Option("--w-group-size", min=1, help="Inputs that share a scale.")] = 128,
    kv_hadamard: KVHadamard = True,
    calib_data: CalibData = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", min=0, help="Propose the fewest KV bits by layer within this KL from float32, nats."),
    ] = None,
    write: Write = False,
    work_dir: WorkDir = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """What each precision of weights, keys and values costs, beside the same model in float32.

    For all layers: perplexity, KL, the first token of a greedy continuation that differs, bytes. For each layer alone:
    KL. Weights are rounded to nearest from what is loaded. A proposed policy is used by every engine that leaves the
    bits of its KV cache open.
    """
    from turbojax.lite.audit_run import AuditTask

    if (write or work_dir) and budget is None:
        raise typer.BadParameter("--write and --work-dir need a --budget")
    if write and work_dir:
        raise typer.BadParameter("give either --write or --work-dir")
    if any(bits not in (4, 8) for bits in w_bits or ()):
        raise typer.BadParameter("--w-bits is 4 or 8")
    task = AuditTask(
        model=resolve_model(model), text=text, window_len=window_len, num_windows=num_windows,
        num_layer_windows=num_layer_windows, per_layer=per_layer, w_bits=tuple(w_bits) if w_bits else None,
        w_group_size=w_group_size, kv_hadamard=kv_hadamard, calib_data=calib_data,
        budget=budget,
    )  # fmt: skip
    _run(task, json, plot, saves=write or work_dir is not None, work_dir=work_dir)


def calibrate(
    model: Model = None,
    text: Text = None,
    window_len: WindowLen = 1024,
    num_windows: NumWindows = 4,
    num_layer_windows: LayerWindows = 1,
    kv_hadamard: KVHadamard = True,
    calib_data: CalibData = None,
    budget: Annotated[
        float, typer.Option("--budget", min=0, help="KL from float32 that the policy stays within, in nats a token.")
    ] = 0.01,
    write: Write = False,
    work_dir: WorkDir = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Finds how many bits keys and values need in each layer, and writes that into the checkpoint.

    The KV part of `audit` alone.
    """
    from turbojax.lite.audit_run import AuditTask

    if write == (work_dir is not None):
        raise typer.BadParameter("give either --write or --work-dir")
    task = AuditTask(
        model=resolve_model(model), text=text, window_len=window_len, num_windows=num_windows,
        num_layer_windows=num_layer_windows, w_bits=(), kv_hadamard=kv_hadamard, calib_data=calib_data,
        budget=budget,
    )  # fmt: skip
    _run(task, json, plot, saves=True, work_dir=work_dir)


def _run(task: AuditTask, json: Path | None, plot: Path | None, *, saves: bool, work_dir: Path | None) -> None:
    """Audits, shows, and saves what is to be saved; what can fail early does."""
    from turbojax.figure import require_matplotlib
    from turbojax.lite.audit_report import plot_audit
    from turbojax.lite.audit_run import check_target, run_audit, save_policy

    if plot is not None:
        require_matplotlib()
    if saves:
        check_target(task.model, work_dir)
    report = run_audit(task, say)
    _show(report)
    if json is not None:
        report.write_json(json)
    if plot is not None:
        plot_audit(plot, report)
    if saves and report.proposal is not None:
        say(f"engines find the policy in {save_policy(task.model, report.proposal.policy, report.k_scale, work_dir)}")


def _show(report: AuditReport) -> None:
    """Tables on standard output, and what is proposed."""
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)
    for table in report.tables():
        console.print(table)
    if report.proposal is not None:
        console.print(report.proposal_text(), soft_wrap=True)
