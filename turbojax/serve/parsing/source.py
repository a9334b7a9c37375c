"""A text that is still being written, read from the front; who needs more of it than is there waits.

Readers are generators: they yield deltas as they find them, and None where the text that came so far does not tell how
to go on. So a reader is written as if the whole text were there, and how the text was cut into pieces changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from turbojax.serve.parsing.deltas import Delta

T = TypeVar("T")
Reading = Generator[Delta | None, None, T]
"""Yields deltas, and None to wait for more text; returns T."""

SPACE = " \t\r\n"


class Source:
    """The text behind `position`. `mark` is where to go back to: text behind it is kept."""

    def __init__(self) -> None:
        self.text, self.position, self.is_whole = "", 0, False
        self._mark: int | None = None

    def push(self, text: str) -> None:
        """More text; what has been read and is not marked is let go."""
        start = self.position if self._mark is None else self._mark
        self.text = self.text[start:] + text
        self.position -= start
        self._mark = None if self._mark is None else 0

    def take(self, end: int) -> str:
        """Reads up to a position of `text`."""
        piece, self.position = self.text[self.position : end], end
        return piece

    def mark(self) -> None:
        self._mark = self.position

    def back(self) -> None:
        """Goes back to the mark, which is gone then."""
        if self._mark is not None:
            self.position, self._mark = self._mark, None

    def marked(self) -> str:
        """What has been read since the mark, which is gone then."""
        start, self._mark = self._mark, None
        return "" if start is None else self.text[start : self.position]

    def more(self) -> Reading[bool]:
        """Waits until there is something behind `position`; False at the end of the text."""
        while self.position == len(self.text) and not self.is_whole:
            yield None
        return self.position < len(self.text)

    def longer(self) -> Reading[bool]:
        """Waits for more than is there; False at the end of the text."""
        if self.is_whole:
            return False
        before = len(self.text) - self.position
        while len(self.text) - self.position == before and not self.is_whole:
            yield None
        return len(self.text) - self.position > before

    def skip_space(self) -> Reading[str]:
        """Reads white space; returns the character behind it, which is not read: "" at the end of the text."""
        while (yield from self.more()):
            while self.position < len(self.text) and self.text[self.position] in SPACE:
                self.position += 1
            if self.position < len(self.text):
                return self.text[self.position]
        return ""

    def reads(self, tag: str, *, partly: bool = False) -> Reading[bool]:
        """Whether the text goes on with a tag, which is read then; `partly`: or ends within it."""
        while len(self.text) - self.position < len(tag) and tag.startswith(self.text[self.position :]):
            if not (yield from self.longer()):
                if partly:
                    self.position = len(self.text)
                return partly
        if self.text.startswith(tag, self.position):
            self.position += len(tag)
            return True
        return False


def text_until(source: Source, tags: Sequence[str], delta: Callable[[str], Delta]) -> Reading[str | None]:
    """Hands on the text before the first of some tags; the tag is read and returned, None where the text ends.

    Never a part of a tag: what may become one is held back. White space in front of a tag belongs to the tag; the mark
    is set in front of it.
    """
    while True:
        found = [(at, tag) for tag in tags if (at := source.text.find(tag, source.position)) >= 0]
        if found:
            at, tag = min(found)
            yield delta(source.take(_space_start(source.text, source.position, at)))
            source.mark()
            source.take(at + len(tag))
            return tag
        end = len(source.text) - num_held(source.text, source.position, tags)
        if tags:
            end = _space_start(source.text, source.position, end)
        yield delta(source.take(end))
        if not (yield from source.longer()):
            yield delta(source.take(len(source.text)))
            return None


def num_held(text: str, start: int, tags: Sequence[str]) -> int:
    """Characters at the end of text[start:] that may be the beginning of a tag."""
    longest = max((len(tag) for tag in tags), default=1) - 1
    for length in range(min(longest, len(text) - start), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


def _space_start(text: str, start: int, end: int) -> int:
    """Where the white space begins that text[start:end] ends with."""
    while end > start and text[end - 1] in SPACE:
        end -= 1
    return end
