"""Qwen3-Coder's calls: <function=name> with <parameter=key> elements, whose values become JSON by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from turbojax.serve.bounds import MAX_CALL_NAME_LEN
from turbojax.serve.parsing.calls import Calls
from turbojax.serve.parsing.json_scanner import EndedError, MalformedError
from turbojax.serve.parsing.source import Reading, Source

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def read_function(source: Source, calls: Calls, schemas: Mapping[str, Mapping[str, Any]]) -> Reading[None]:
    """What comes behind "<function="; each parameter is handed on when it is complete.

    Raises:
        MalformedError: it is no function.
    """
    name = yield from _up_to(source, ">", MAX_CALL_NAME_LEN)
    yield from calls.start(name)
    properties = schemas.get(name, {}).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    keys: set[str] = set()
    while True:
        yield from source.skip_space()
        if (yield from source.reads(FUNCTION_END)):
            break
        if not (yield from source.reads(PARAMETER)):
            ended = source.position == len(source.text)
            raise EndedError("the text ends") if ended else MalformedError("text outside of parameters")
        key = yield from _up_to(source, ">", MAX_CALL_NAME_LEN)
        if key in keys:
            raise MalformedError(f"parameter {key!r} stands there twice")
        opening = f"{', ' if keys else '{'}{_dumps(key)}: "
        keys.add(key)
        try:
            value = yield from _up_to(source, PARAMETER_END, None)
        except EndedError:  # as much as there is, as a text without an end
            yield from calls.arguments(opening + _dumps(_unframed(source.take(len(source.text))))[:-1])
            raise
        yield from calls.arguments(opening + as_json(_unframed(value), properties.get(key)))
    yield from calls.arguments("}" if keys else "{}")
    calls.end(source)


def _up_to(source: Source, end: str, max_len: int | None) -> Reading[str]:
    """The text before `end`, which is read too.

    Raises:
        MalformedError: there is none; then nothing is read.
    """
    searched = source.position
    while (at := source.text.find(end, searched)) < 0:
        if max_len is not None and len(source.text) - source.position > max_len:
            raise MalformedError(f"a name longer than {max_len} characters")
        offset = max(0, len(source.text) - source.position - len(end) + 1)
        if not (yield from source.longer()):
            raise EndedError(f"the text ends before {end!r}")
        searched = source.position + offset
    if max_len is not None and at - source.position > max_len:
        raise MalformedError(f"a name longer than {max_len} characters")
    text = source.take(at)
    source.take(at + len(end))
    return text


def _unframed(value: str) -> str:
    """Without the line breaks that stand around every value."""
    return value.removeprefix("\n").removesuffix("\n")


def as_json(value: str, schema: Any) -> str:
    """A value as JSON: of a type that the schema names if it can be read so; else a text, or what it looks like.

    Without a schema a value is what it looks like: an object, a list, a number, true, false or null.
    """
    kinds = _kinds_of(schema)
    if kinds == {"string"}:
        return _dumps(value)
    try:
        read = json.loads(_PYTHON_WORDS.get(value.strip(), value))
        written = _dumps(read)
    except (ValueError, RecursionError):
        return _dumps(value)
    is_text = isinstance(read, str) or ("string" in kinds and not _KINDS[type(read)] & kinds)
    return _dumps(value) if is_text else written


def _kinds_of(schema: Any) -> set[str]:
    """The types that a schema names; of alternatives those of each."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            kinds |= _kinds_of(option)
    return kinds


_KINDS: dict[type, set[str]] = {
    bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}, dict: {"object"},
    list: {"array"},
}  # fmt: skip
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _dumps(value: Any) -> str:
    """
    Raises:
        ValueError: a number that is not finite, which JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which has to stay escaped
        return json.dumps(value)
    return text
