"""The parser of one answer: its reasoning first, then content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from turbojax.serve.parsing.calls import Calls, call_id
from turbojax.serve.parsing.deltas import Delta, merged
from turbojax.serve.parsing.reasoning import TAGS, is_opened, read_reasoning
from turbojax.serve.parsing.source import Reading, Source
from turbojax.serve.parsing.styles import Styles
from turbojax.serve.parsing.tool_styles import READERS, Schemas


class OutputParser:
    """Takes the text of an answer in pieces and gives what it consists of, which does not depend on how it was cut.

    White space around tags is left out; everything else comes out once, and what is no proper call comes as content.
    Feed the text of one answer, then call `finish`: what was held back as the possible beginning of a tag comes then.
    """

    def __init__(self, read: Callable[[Source, Calls], Reading[None]], calls: Calls) -> None:
        self._source, self._calls = Source(), calls
        self._deltas = read(self._source, calls)

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun: with any, an answer that stopped by itself has finish reason `tool_calls`."""
        return self._calls.num_started

    @property
    def num_malformed_calls(self) -> int:
        """Calls that came back as content, in whole or from where they went wrong; the first is logged."""
        return self._calls.num_malformed

    def feed(self, text: str) -> list[Delta]:
        """What more text gives, as far as it is clear."""
        self._source.push(text)
        return self._read()

    def finish(self) -> list[Delta]:
        """What is left when the text has ended."""
        self._source.is_whole = True
        return self._read()

    def _read(self) -> list[Delta]:
        deltas: list[Delta] = []
        for delta in self._deltas:
            if delta is None:
                break
            deltas.append(delta)
        return merged(deltas)


def make_parser(
    styles: Styles,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    prompt: str = "",
    parallel_tool_calls: bool = True,
    new_call_id: Callable[[], str] | None = None,
) -> OutputParser:
    """A parser for one answer.

    Args:
        styles: of the model, see `detect_styles`.
        tools: those that may be called, in OpenAI's form; without any, calls are not looked for.
        prompt: as the chat template wrote it (or its end): it may have opened the reasoning.
        parallel_tool_calls: False keeps the first call alone.
        new_call_id: makes the ids; None makes random ones as the style wants them.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    style = styles.tool if tools else None
    new_id = new_call_id or partial(call_id, is_short=style == "mistral")
    calls = Calls(new_id, max_calls=None if parallel_tool_calls else 1)
    return OutputParser(partial(_read, styles.reasoning, is_opened(prompt, styles.reasoning), style, schemas), calls)


def _read(
    reasoning: str | None, is_open: bool | None, style: str | None, schemas: Schemas, source: Source, calls: Calls
) -> Reading[None]:
    # Where the prompt has closed it, tags in the answer are text.
    if reasoning is not None and is_open is not False:
        yield from read_reasoning(source, TAGS[reasoning], is_open=bool(is_open))
    yield from READERS[style](source, calls, schemas)
