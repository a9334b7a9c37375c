"""How models write tool calls: a reader for each style, over what comes after the reasoning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from turbojax.serve.bounds import MAX_CALL_NAME_LEN
from turbojax.serve.parsing.calls import Calls, expect, read_arguments, read_call
from turbojax.serve.parsing.deltas import Content
from turbojax.serve.parsing.json_scanner import EndedError, MalformedError
from turbojax.serve.parsing.qwen_xml import FUNCTION, read_function
from turbojax.serve.parsing.source import SPACE, Reading, Source, text_until

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters of each tool, a JSON schema, by name."""

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def read_text(source: Source, calls: Calls, schemas: Schemas) -> Reading[None]:
    """All of it is content."""
    yield from text_until(source, (), Content)


def read_hermes(source: Source, calls: Calls, schemas: Schemas) -> Reading[None]:
    """Qwen and Hermes: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""
    yield from _read_tagged(source, calls, schemas, (TOOL_CALL,))


def read_qwen3_coder(source: Source, calls: Calls, schemas: Schemas) -> Reading[None]:
    """Qwen3-Coder: <tool_call><function=...>; it forgets the outer tag at times."""
    yield from _read_tagged(source, calls, schemas, (TOOL_CALL, FUNCTION))


def _read_tagged(source: Source, calls: Calls, schemas: Schemas, tags: tuple[str, ...]) -> Reading[None]:
    stray: tuple[str, ...] = ()  # the closing tag of a call that has been sent, and went wrong: it is no content
    while (tag := (yield from text_until(source, (*tags, *stray), Content))) is not None:
        num_before, is_right = calls.num_started, True
        if tag in stray:
            source.marked()
            yield from source.skip_space()
        else:
            is_right = yield from calls.attempt(source, _tool_call(source, calls, schemas, is_bare=tag == FUNCTION))
        stray = () if is_right or calls.num_started == num_before else (TOOL_CALL_END,)


def _tool_call(source: Source, calls: Calls, schemas: Schemas, *, is_bare: bool) -> Reading[None]:
    if is_bare:
        yield from read_function(source, calls, schemas)
    elif (yield from source.skip_space()) == "<":
        yield from _function(source, calls, schemas)
    else:
        yield from _json_calls(source, calls)
    yield from source.skip_space()
    source.mark()
    if not (yield from source.reads(TOOL_CALL_END, partly=True)) and not is_bare:
        raise MalformedError("text behind a call")
    yield from source.skip_space()


def _function(source: Source, calls: Calls, schemas: Schemas) -> Reading[None]:
    if not (yield from source.reads(FUNCTION)):
        raise MalformedError("neither an object nor a function")
    yield from read_function(source, calls, schemas)


def _json_calls(source: Source, calls: Calls) -> Reading[None]:
    """An object, or a list of them."""
    if (yield from source.skip_space()) != "[":
        return (yield from read_call(source, calls))
    source.take(source.position + 1)
    while True:
        yield from read_call(source, calls)
        if (yield from source.skip_space()) != ",":
            break
        source.take(source.position + 1)
    yield from expect(source, "]")
    return None


def read_llama3(source: Source, calls: Calls, schemas: Schemas) -> Reading[None]:
    """Llama 3.1 and later: {"name": ..., "parameters": ...} as the whole answer or behind <|python_tag|>; more with ;.

    Without the tag only an object that names one of the tools is a call.
    """
    source.mark()
    if (yield from source.skip_space()) == "{":
        yield from calls.attempt(source, _separated(source, calls, schemas), is_announced=False)
    else:
        source.back()
    while (yield from text_until(source, (PYTHON_TAG,), Content)) is not None:
        yield from calls.attempt(source, _separated(source, calls, None))


def _separated(source: Source, calls: Calls, names: Schemas | None) -> Reading[None]:
    while True:
        yield from read_call(source, calls, names)
        if (yield from source.skip_space()) not in (";", "{"):
            return
        if source.text[source.position] == ";":
            source.take(source.position + 1)
            if (yield from source.skip_space()) == "":
                return


def read_mistral(source: Source, calls: Calls, schemas: Schemas) -> Reading[None]:
    """Mistral: [TOOL_CALLS] before a list of objects, or before name[ARGS]{...} of each call (since version 11)."""
    while (yield from text_until(source, (TOOL_CALLS,), Content)) is not None:
        yield from calls.attempt(source, _mistral_calls(source, calls))


def _mistral_calls(source: Source, calls: Calls) -> Reading[None]:
    first = yield from source.skip_space()
    if first in ("[", "{"):
        yield from _json_calls(source, calls)
    else:
        yield from calls.start((yield from _name(source)))
        if (yield from source.reads(CALL_ID)):
            yield from _name(source)  # the model's own id, which is not unique
        yield from source.reads(ARGS)
        if (yield from source.skip_space()) != "{":
            raise MalformedError("a call without arguments")
        yield from read_arguments(source, calls)
        calls.end(source)
    yield from source.skip_space()


def _name(source: Source) -> Reading[str]:
    """A word up to white space or a bracket."""
    name = ""
    while (yield from source.more()):
        end = source.position
        while end < len(source.text) and source.text[end] not in SPACE + "[{":
            end += 1
        name += source.take(end)
        if end < len(source.text):
            return name
        if len(name) > MAX_CALL_NAME_LEN:
            raise MalformedError("no tool has so long a name")
    raise EndedError("the text ends within a name")


READERS: dict[str | None, Callable[[Source, Calls, Schemas], Reading[None]]] = {
    None: read_text,
    "hermes": read_hermes,
    "qwen3_coder": read_qwen3_coder,
    "llama3": read_llama3,
    "mistral": read_mistral,
}
