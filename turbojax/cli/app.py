"""The command line's frame: its subcommands, and errors as one line instead of a traceback."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from checkpoints.errors import CheckpointError
from turbojax import __version__
from turbojax.cli.bench import bench
from turbojax.cli.bench_serve import serve as bench_serve
from turbojax.cli.chat import chat
from turbojax.cli.check_env import check_env
from turbojax.cli.console import say_error
from turbojax.cli.environment import prepare_environment
from turbojax.cli.generate import generate
from turbojax.cli.lite import lite
from turbojax.cli.lite_audit import audit, calibrate, perplexity
from turbojax.cli.serve import serve
from turbojax.errors import TurbojaxError


class _Group(TyperGroup):
    """Turns what can go wrong in a run into `error: ...` and exit status 1; usage errors exit with 2."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except (TurbojaxError, CheckpointError, OSError) as error:
            if ctx.params.get("debug") or isinstance(error, BrokenPipeError):
                raise
            say_error(error)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Group,
    name="turbojax",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"turbojax {__version__}")
        raise typer.Exit


@app.callback()
def _main_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Mixed-precision LLM inference in JAX."""
    del debug, version  # read by _Group.invoke and by _print_version
    prepare_environment()


app.command()(generate)
app.command()(chat)
app.command("check_env")(check_env)
bench.command("serve")(bench_serve)
app.add_typer(bench)
lite.command()(perplexity)
lite.command()(audit)
lite.command()(calibrate)
app.add_typer(lite)
app.add_typer(serve)


def main() -> None:
    """Runs the command line."""
    app(prog_name="turbojax")
