"""A command has the options of its groups as its own, in the help, with their defaults, and gets them as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from turbojax.cli.grouped import grouped


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(min=1, help="Of the picture.")] = 4
    names: Annotated[list[str] | None, typer.Option("--name")] = None


@dataclass(frozen=True)
class Colour:
    red: bool = False


@pytest.fixture
def run():
    calls = []
    app = typer.Typer()

    @app.command()
    @grouped
    def draw(size: Size, colour: Colour, what: Annotated[str, typer.Argument()] = "a line", depth: int = 1) -> None:
        """Draws."""
        calls.append((size, colour, what, depth))

    return lambda *args: (CliRunner().invoke(app, args), calls)


def test_groups_are_made_of_their_options_and_of_defaults(run):
    done, calls = run()
    assert done.exit_code == 0
    done, calls = run("a box", "--name", "a", "--depth", "2", "--name", "b", "--red", "--width", "9")
    assert done.exit_code == 0
    assert calls == [
        (Size(4, None), Colour(False), "a line", 1),
        (Size(9, ["a", "b"]), Colour(True), "a box", 2),
    ]


def test_options_of_groups_are_checked_and_shown_like_others(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run("--width", "0")[0].exit_code == run("--size", "1")[0].exit_code == 2
    shown = run("--help")[0].stdout
    assert "Draws." in shown
    assert all(option in shown for option in ("--width", "Of the picture.", "--name", "--red", "--depth"))
