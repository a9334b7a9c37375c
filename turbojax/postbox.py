"""Pieces from the engine's thread into an event loop: one wake-up for all that come together."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

Take = Callable[[Any], None]
Call = Callable[[], None]
# uvloop writes to sockets at the end of a turn: in one turn for all, the first of 64 events would wait for the last.
CALLS_A_TURN = 8


class Postbox:
    """Of one event loop. `post` from any thread; what was posted is handed out in the loop's, in order.

    A wake-up of the loop is a write to a socket: one for every piece would be 64 of them for a step of 64 sequences.
    """

    _of_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Postbox]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._pieces: deque[tuple[Take, Any]] = deque()
        self._calls: deque[Call] = deque()
        self._is_waking = False

    @classmethod
    def here(cls) -> Postbox:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        found = cls._of_loop.get(loop)
        if found is None:
            found = cls._of_loop[loop] = cls(loop)
        return found

    def post(self, take: Take, piece: Any) -> None:
        """Has `take(piece)` called in the loop.

        Raises:
            RuntimeError: the loop is closed.
        """
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._pieces.append((take, piece))
        if not self._is_waking:
            self._is_waking = True
            loop.call_soon_threadsafe(self._hand_out)

    def soon(self, call: Call) -> None:
        """Has this called in the loop, from which it is told, behind what was told before: a few calls a turn."""
        self._calls.append(call)
        if len(self._calls) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _hand_out(self) -> None:
        # Before anything is taken out: what is posted from here on wakes the loop again.
        self._is_waking = False
        while self._pieces:
            take, piece = self._pieces.popleft()
            take(piece)

    def _turn(self) -> None:
        calls = list(itertools.islice(self._calls, CALLS_A_TURN))
        for call in calls:
            call()
        for _ in calls:
            self._calls.popleft()
        if self._calls:
            asyncio.get_running_loop().call_soon(self._turn)
