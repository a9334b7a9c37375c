"""`turbojax lite`: the group of commands that make, measure and check quantised checkpoints."""

from __future__ import annotations

import typer

lite = typer.Typer(
    name="lite",
    no_args_is_help=True,
    help="Quantise checkpoints, and measure what that costs.",
    add_completion=False,
)


@lite.callback()
def _group() -> None:
    """Keeps the group a group while it has a single command."""
