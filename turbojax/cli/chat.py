"""`turbojax chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from turbojax.cli import options, session
from turbojax.cli.console import say, say_error
from turbojax.cli.grouped import grouped
from turbojax.errors import EngineFailedError, TurbojaxError

if TYPE_CHECKING:
    from turbojax.session import Session

HELP = "/exit leaves (so does Ctrl-D), /clear starts over, Ctrl-C stops an answer"


@grouped
def chat(
    generation: options.Generation,
    engine: options.Engine,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    model: options.Model = None,
) -> None:
    """Talk with a model; it sees the whole conversation. /exit leaves, Ctrl-C stops an answer."""
    gen_config, config = generation.config(), engine.config(max_batch_size=1)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in input())
    with session.open_pipeline(model, config) as pipe:
        say(HELP)
        talk = pipe.session(gen_config)
        while (line := _read_line()) is not None:
            if line == "/exit":
                break
            if line == "/clear":
                talk = pipe.session(gen_config)
            elif line.startswith("/"):
                say(HELP)
            elif line:
                _turn(talk, line, system)


def _read_line() -> str | None:
    """The next line, stripped; None at the end of input or Ctrl-C at the prompt."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        typer.echo(err=True)
        return None


def _turn(talk: Session, line: str, system: str | None) -> None:
    """The next turn; the system message comes with the first one."""
    opening = [] if system is None or talk.history else [{"role": "system", "content": system}]
    try:
        talk.ask([*opening, {"role": "user", "content": line}])
        assert talk.generator is not None
        stats = str(session.stream_answer(talk.generator, _write))
    except KeyboardInterrupt:
        stats = "stopped"
    except EngineFailedError:
        raise  # no further turn will run
    except TurbojaxError as error:
        say_error(error)
        return
    typer.echo()
    say(stats)


def _write(text: str) -> None:
    typer.echo(text, nl=False)  # flushes
