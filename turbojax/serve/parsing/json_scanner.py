"""Follows one JSON value through a text that comes in pieces: where it ends, and where it is none."""

from __future__ import annotations

import re
from collections.abc import Generator

from turbojax.serve.bounds import MAX_JSON_DEPTH
from turbojax.serve.parsing.source import SPACE, Reading, Source

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string, up to what ends or escapes
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPED, _HEX = '"\\/bfnrtu', "0123456789abcdefABCDEF"


class MalformedError(Exception):
    """The text is not what it should be, from where the source stands."""


class EndedError(MalformedError):
    """The text ends too early."""


class JsonScanner:
    """A push-down automaton over characters (RFC 8259, which json.loads follows too, but for NaN and the like)."""

    def __init__(self) -> None:
        self.is_done = False
        self.problem: str | None = None
        self._containers: list[str] = []
        self._state = "value"
        self._is_key = False
        self._word = ""
        self._num_hex = 0

    def read(self, text: str, start: int) -> int:
        """The position up to which text[start:] belongs to the value; it is no JSON from there on if `problem` is set.

        That position depends on the whole text alone, not on how it is cut.
        """
        at = start
        while at < len(text) and not self.is_done and self.problem is None:
            match self._state:
                case "string":
                    at = self._string(text, at)
                case "word":
                    at = self._scalar(text, at)
                case _ if text[at] in SPACE and self._state not in ("escape", "hex"):
                    at += 1
                case _:
                    self._step(text[at])
                    at += self.problem is None and self._state != "word"  # a word reads its first character itself
        return at

    def _string(self, text: str, at: int) -> int:
        match = _PLAIN.match(text, at)
        assert match is not None
        at = match.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = "escape"
        elif text[at] != '"':
            self.problem = f"character {ord(text[at])} in a string of JSON, which must be escaped"
            return at
        elif self._is_key:
            self._is_key, self._state = False, "colon"
        else:
            self._value_ends()
        return at + 1

    def _scalar(self, text: str, at: int) -> int:
        match = _WORD.match(text, at)
        assert match is not None
        self._word += match.group()
        if match.end() == len(text):
            return len(text)
        if _SCALAR.fullmatch(self._word) is None:
            self.problem = "a word that is neither a number nor true, false or null"
        else:
            self._value_ends()
        self._word = ""
        return match.end()

    def _step(self, char: str) -> None:
        match self._state, char:
            case ("value" | "first_item", '"'):
                self._state = "string"
            case ("value" | "first_item", "{" | "["):
                self._open(char)
            case ("first_item", "]") | ("first_key", "}"):
                self._close(char)
            case ("value" | "first_item", _) if _WORD.fullmatch(char):
                self._state = "word"
            case ("first_key" | "key", '"'):
                self._state, self._is_key = "string", True
            case ("colon", ":"):
                self._state = "value"
            case ("after", ","):
                self._state = "key" if self._containers[-1] == "{" else "value"
            case ("after", "}" | "]"):
                self._close(char)
            case ("escape", _) if char in _ESCAPED:
                self._state, self._num_hex = ("hex", 4) if char == "u" else ("string", 0)
            case ("hex", _) if char in _HEX:
                self._num_hex -= 1
                self._state = "hex" if self._num_hex else "string"
            case _:
                self.problem = f"character {char!r} where JSON expects something else"

    def _open(self, char: str) -> None:
        if len(self._containers) == MAX_JSON_DEPTH:
            self.problem = f"JSON deeper than {MAX_JSON_DEPTH}"
            return
        self._containers.append(char)
        self._state = "first_key" if char == "{" else "first_item"

    def _close(self, char: str) -> None:
        if self._containers[-1] + char not in ("{}", "[]"):
            self.problem = f"{char!r} closes something else"
            return
        self._containers.pop()
        self._value_ends()

    def _value_ends(self) -> None:
        self._state = "after"
        self.is_done = not self._containers


def read_json(source: Source) -> Reading[str]:
    """The text of the JSON value that comes next, read.

    Raises:
        MalformedError: it is none.
    """
    texts: list[str] = []
    for piece in json_pieces(source):
        if piece is None:
            yield None
        else:
            texts.append(piece)
    return "".join(texts)


def json_pieces(source: Source) -> Generator[str | None, None, None]:
    """The same as it comes: its text, and None to wait for more.

    Raises:
        MalformedError: it is no JSON, or the text ends within.
    """
    scanner = JsonScanner()
    while True:
        yield source.take(scanner.read(source.text, source.position))
        if scanner.problem is not None:
            raise MalformedError(scanner.problem)
        if scanner.is_done:
            return
        if source.is_whole:
            raise EndedError("the text ends within JSON")
        yield None
