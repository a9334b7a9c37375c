"""What a generated text consists of, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model thinks aloud before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The model calls a tool: sent as soon as the name is known, once for each `index`."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More text of the arguments of call `index`; all pieces together are one JSON object."""

    index: int
    text: str


Delta = Content | Reasoning | ToolCallStart | ToolCallArguments


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """The same with neighbours of one kind joined, and none that is empty."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        match last, delta:
            case Content(), Content():
                joined[-1] = Content(last.text + delta.text)
            case Reasoning(), Reasoning():
                joined[-1] = Reasoning(last.text + delta.text)
            case ToolCallArguments(), ToolCallArguments() if last.index == delta.index:
                joined[-1] = ToolCallArguments(last.index, last.text + delta.text)
            case _, ToolCallStart():
                joined.append(delta)
            case _, Content() | Reasoning() | ToolCallArguments() if delta.text:
                joined.append(delta)
    return joined
