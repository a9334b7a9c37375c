"""`turbojax lite perplexity`, `audit` and `calibrate`: what a precision costs, measured on a text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from turbojax.cli import options
from turbojax.cli.console import say
from turbojax.cli.grouped import grouped
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


@dataclass(frozen=True)
class Measuring:
    """What is run, of `AuditTask`."""

    text: Text = None
    window_len: WindowLen = 1024
    num_windows: NumWindows = 4
    num_layer_windows: Annotated[
        int, typer.Option("--num-layer-windows", min=1, help="Windows for what is measured layer by layer.")
    ] = 1
    kv_hadamard: Annotated[
        bool,
        typer.Option(
            "--kv-hadamard/--no-kv-hadamard", help="Turn keys of 4 bits, layer by layer and in what is proposed."
        ),
    ] = True
    calib_data: Annotated[
        Path | None,
        typer.Option(
            "--calib-data",
            exists=True,
            dir_okay=False,
            help="A UTF-8 text to find the scale of keys on; default: built-in.",
        ),
    ] = None


@dataclass(frozen=True)
class Results:
    """Where what was found goes."""

    write: Annotated[bool, typer.Option("--write", help="Write the proposed policy into the checkpoint itself.")] = (
        False
    )
    work_dir: Annotated[
        Path | None,
        typer.Option("--work-dir", help="Copy the checkpoint there, with the proposed policy in its config."),
    ] = None
    json: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="All figures as JSON.")] = None
    plot: Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="A PNG; needs the extra `plot`.")] = None

    @property
    def saves(self) -> bool:
        """Whether a policy is written."""
        return self.write or self.work_dir is not None


@grouped
def audit(
    measuring: Measuring,
    results: Results,
    model: Model = None,
    per_layer: Annotated[bool, typer.Option("--per-layer/--no-per-layer", help="Measure every layer alone.")] = True,
    w_bits: Annotated[
        list[int] | None,
        typer.Option("--w-bits", help="Round the weights to 8 or 4 bits; by default to what is less than they have."),
    ] = None,
    w_group_size: Annotated[int, typer.Option("--w-group-size", min=1, help="Inputs that share a scale.")] = 128,
    budget: Annotated[
        float | None,
        typer.Option("--budget", min=0, help="Propose the fewest KV bits by layer within this KL from float32, nats."),
    ] = None,
) -> None:
    """What each precision of weights, keys and values costs, beside the same model in float32.

    For all layers: perplexity, KL, the first token of a greedy continuation that differs, bytes. For each layer alone:
    KL. Weights are rounded to nearest from what is loaded. A proposed policy is used by every engine that leaves the
    bits of its KV cache open.
    """
    from turbojax.lite.audit_run import AuditTask

    if results.saves and budget is None:
        raise typer.BadParameter("--write and --work-dir need a --budget")
    if results.write and results.work_dir:
        raise typer.BadParameter("give either --write or --work-dir")
    if any(bits not in (4, 8) for bits in w_bits or ()):
        raise typer.BadParameter("--w-bits is 4 or 8")
    task = AuditTask(
        model=resolve_model(model), per_layer=per_layer, w_bits=tuple(w_bits) if w_bits else None,
        w_group_size=w_group_size, budget=budget, **vars(measuring),
    )  # fmt: skip
    _run(task, results)


@grouped
def calibrate(
    measuring: Measuring,
    results: Results,
    model: Model = None,
    budget: Annotated[
        float, typer.Option("--budget", min=0, help="KL from float32 that the policy stays within, in nats a token.")
    ] = 0.01,
) -> None:
    """Finds how many bits keys and values need in each layer, and writes that into the checkpoint.

    The KV part of `audit` alone.
    """
    from turbojax.lite.audit_run import AuditTask

    if results.write == (results.work_dir is not None):
        raise typer.BadParameter("give either --write or --work-dir")
    _run(AuditTask(model=resolve_model(model), w_bits=(), budget=budget, **vars(measuring)), results)


def _run(task: AuditTask, results: Results) -> None:
    """Audits, shows, and saves what is to be saved; what can fail early does."""
    from turbojax.figure import require_matplotlib
    from turbojax.lite.audit_report import plot_audit
    from turbojax.lite.audit_run import check_target, run_audit, save_policy

    if results.plot is not None:
        require_matplotlib()
    if results.saves:
        check_target(task.model, results.work_dir)
    report = run_audit(task, say)
    _show(report)
    if results.json is not None:
        report.write_json(results.json)
    if results.plot is not None:
        plot_audit(results.plot, report)
    if results.saves and report.proposal is not None:
        written = save_policy(task.model, report.proposal.policy, report.k_scale, results.work_dir)
        say(f"engines find the policy in {written}")


def _show(report: AuditReport) -> None:
    """Tables on standard output, and what is proposed."""
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)
    for table in report.tables():
        console.print(table)
    if report.proposal is not None:
        console.print(report.proposal_text(), soft_wrap=True)
