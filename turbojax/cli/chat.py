"""`turbojax chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from turbojax.cli import options, session
from turbojax.cli.console import say, say_error
from turbojax.errors import EngineFailedError, TurbojaxError

if TYPE_CHECKING:
    from turbojax.session import Session

HELP = "/exit leaves (so does Ctrl-D), /clear starts over, Ctrl-C stops an answer"


def chat(
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    model: options.Model = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    stop: options.Stop = None,
    bad_word: options.BadWord = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    choice: options.Choice = None,
    dtype: options.Dtype = None,
    model_format: options.ModelFormat = None,
    session_len: options.SessionLen = None,
    quant_policy: options.QuantPolicy = None,
    cache_max_entry_count: options.CacheMaxEntryCount = None,
) -> None:
    """Talk with a model; it sees the whole conversation. /exit leaves, Ctrl-C stops an answer."""
    gen_config = options.generation_config(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, random_seed=seed,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        stop_words=stop, bad_words=bad_word, response_format=options.response_format(json_schema, regex, choice),
    )  # fmt: skip
    config = options.engine_config(
        dtype=dtype,
        model_format=model_format,
        session_len=session_len,
        max_batch_size=1,
        quant_policy=quant_policy,
        cache_max_entry_count=cache_max_entry_count,
    )
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
