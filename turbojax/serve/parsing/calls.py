"""Tool calls that are written as JSON objects with a name and arguments, read as they come."""

from __future__ import annotations

import json
import logging
import secrets
import string
from collections.abc import Callable, Collection

from turbojax.serve.bounds import MAX_CALL_NAME_LEN
from turbojax.serve.parsing.deltas import Content, Delta, ToolCallArguments, ToolCallStart
from turbojax.serve.parsing.json_scanner import EndedError, MalformedError, json_pieces, read_json
from turbojax.serve.parsing.source import Reading, Source

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = ("name", "type", "id", *ARGUMENT_KEYS)

log = logging.getLogger(__name__)


def call_id(*, is_short: bool = False) -> str:
    """A fresh id of a call; Mistral's templates take 9 letters and digits, no more."""
    if is_short:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class Calls:
    """Numbers the calls of an answer.

    Attributes:
        num_started: calls so far.
        num_malformed: calls that came back as content, in whole or from where they went wrong.
    """

    def __init__(self, new_id: Callable[[], str] = call_id, *, max_calls: int | None = None) -> None:
        """Calls beyond `max_calls` are read and left out."""
        self.num_started = self.num_malformed = 0
        self._new_id, self._max_calls = new_id, max_calls
        self._is_open = False

    def start(self, name: str) -> list[Delta]:
        """
        Raises:
            MalformedError: this is no name.
        """
        if not name or len(name) > MAX_CALL_NAME_LEN:
            raise MalformedError(f"a tool's name of {len(name)} characters")
        index, self.num_started, self._is_open = self.num_started, self.num_started + 1, True
        return [ToolCallStart(index, self._new_id(), name)] if self._is_wanted(index) else []

    def arguments(self, text: str) -> list[Delta]:
        """More of the arguments of the call that was started last."""
        index = self.num_started - 1
        return [ToolCallArguments(index, text)] if text and self._is_wanted(index) else []

    def _is_wanted(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls

    def attempt(self, source: Source, body: Reading[None], *, is_announced: bool = True) -> Reading[bool]:
        """Reads calls; True if they are right.

        What is wrong comes back as content: all since the mark where no name has been sent, else what follows, as the
        source stands. An end of the text within a call that has begun leaves its arguments as far as they came.

        Args:
            source: where the calls begin.
            body: reads them.
            is_announced: a tag says that this is a call; what is none without a tag is content and nothing is wrong.
        """
        num_before = self.num_started
        try:
            yield from body
        except MalformedError as problem:
            raw = source.marked()
            if not self._is_open:
                yield Content(raw)
            if is_announced or self.num_started > num_before:
                self.num_malformed += 1
                if self.num_malformed == 1:  # a model that is lost writes thousands
                    log.warning("tool call %d is malformed: %s", self.num_started - self._is_open, problem)
            self._is_open = False
            return False
        source.marked()
        return True

    def end(self, source: Source) -> None:
        """The call is complete; what follows is no part of it."""
        self._is_open = False
        source.mark()


def read_call(source: Source, calls: Calls, names: Collection[str] | None = None) -> Reading[None]:
    """One object with "name" and "arguments" (or "parameters"), in any order; other keys are passed over.

    Args:
        source: stands at the object.
        calls: numbers it.
        names: of the tools, where only these make the object a call: JSON that no tag announces.

    Raises:
        MalformedError: it is no call.
    """
    yield from expect(source, "{")
    name, arguments = None, None
    while (yield from source.skip_space()) != "}":
        key = yield from _key(source, arguments is None and name is None and names is not None)
        if key == "name" and name is None:
            name = yield from _text(source)
            if names is not None and name not in names:
                raise MalformedError("no tool has this name")
            yield from calls.start(name)
            yield from calls.arguments(arguments or "")
        elif key in ARGUMENT_KEYS and arguments is None:
            arguments = yield from _arguments(source, calls, is_shown=name is not None)
        elif key in ("name", *ARGUMENT_KEYS):
            raise MalformedError(f"{key!r} stands there twice")
        else:
            yield from read_json(source)
        if (yield from source.skip_space()) != "}":
            yield from expect(source, ",")
    source.take(source.position + 1)
    if name is None:
        raise MalformedError("an object without a name")
    yield from calls.arguments("{}" if arguments is None else "")
    calls.end(source)


def _key(source: Source, must_be_of_calls: bool) -> Reading[str]:
    key = yield from _text(source)
    if must_be_of_calls and key not in CALL_KEYS:
        raise MalformedError("JSON of another kind")
    yield from expect(source, ":")
    yield from source.skip_space()
    return key


def _text(source: Source) -> Reading[str]:
    if (yield from source.skip_space()) != '"':
        raise _unexpected(source, "a text")
    return decoded((yield from read_json(source)))


def decoded(text: str) -> str:
    """The text that a string of JSON stands for.

    Raises:
        MalformedError: it has half a character, which nobody could send.
    """
    value: str = json.loads(text)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MalformedError("half a surrogate pair") from error
    return value


def _arguments(source: Source, calls: Calls, *, is_shown: bool) -> Reading[str]:
    """The value of "arguments": an object, an object written as a text, or null. Handed on where `is_shown`."""
    first = source.text[source.position : source.position + 1]
    if first == "{":
        return (yield from read_arguments(source, calls, is_shown=is_shown))
    text = yield from read_json(source)
    if first == '"':
        text = yield from _object_in(decoded(text))
    elif text == "null":
        text = "{}"
    else:
        raise MalformedError("arguments that are no object")
    if is_shown:
        yield from calls.arguments(text)
    return text


def _object_in(text: str) -> Reading[str]:
    inner = Source()
    inner.push(text)
    inner.is_whole = True
    if (yield from inner.skip_space()) == "{":
        found = yield from read_json(inner)
        if (yield from inner.skip_space()) == "":
            return found
    raise MalformedError("arguments that are no object")


def read_arguments(source: Source, calls: Calls, *, is_shown: bool = True) -> Reading[str]:
    """The object of arguments as it stands there, handed on as it comes."""
    texts = []
    for piece in json_pieces(source):
        if piece is None:
            yield None
            continue
        texts.append(piece)
        if is_shown:
            yield from calls.arguments(piece)
    return "".join(texts)


def expect(source: Source, char: str) -> Reading[None]:
    """Reads this character, and white space before it.

    Raises:
        MalformedError: another one comes.
    """
    if (yield from source.skip_space()) != char:
        raise _unexpected(source, repr(char))
    source.take(source.position + 1)


def _unexpected(source: Source, wanted: str) -> MalformedError:
    if source.position == len(source.text):
        return EndedError(f"the text ends where {wanted} is expected")
    return MalformedError(f"character {source.text[source.position]!r} where {wanted} is expected")
