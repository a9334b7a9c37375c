"""Pieces of one call on their way to its task: those of an answer that came since it last looked are one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from turbojax.engine.response import Response
from turbojax.session import joined


class Outbox:
    """In one event loop. Whoever is slow to take gets fewer and longer pieces, and nothing grows but their text."""

    def __init__(self, soon: Callable[[Callable[[], None]], None]) -> None:
        """`soon` has something called in the loop when its turn has come; until then pieces gather (`Postbox.soon`)."""
        self._soon = soon
        self._pieces: list[Response] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: Response) -> None:
        self._pieces.append(piece)
        if len(self._pieces) == 1 and self._waiter is not None:
            self._soon(self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Response]:
        """What has come, at least a piece."""
        if not self._pieces:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._pieces = self._pieces, []
        return pieces if len(pieces) == 1 else merged(pieces)


def merged(pieces: Sequence[Response]) -> list[Response]:
    """One piece for each answer among them, in the order of their first ones; an error stays alone behind its text."""
    parts: dict[tuple[int, int, bool], list[Response]] = {}
    for piece in pieces:
        parts.setdefault((piece.index, piece.sample_index, piece.error is not None), []).append(piece)
    return [part[0] if len(part) == 1 else joined(part) for part in parts.values()]
