"""How long tokens take from the engine to the socket, watched from outside."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, MutableMapping
from types import TracebackType
from typing import Any

from starlette.types import Send

from turbojax.engine.scheduler import Scheduler
from turbojax.outbox import Outbox
from turbojax.postbox import Postbox
from turbojax.serve.sse import EventStream

Tasks = MutableMapping["asyncio.Task[Any]", float]


class TokenTimes:
    """While it is entered, notes how long each piece took from its step's tokens to `send` of its event.

    A piece is posted in the engine's thread while a step is committed, taken out of its outbox by the task that streams
    its answer, and what that task sends next is its event. Of pieces that became one it is the oldest that counts.

    Attributes:
        milliseconds: of each event.
    """

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self._step_s = 0.0
        self._posted: dict[int, float] = {}  # by piece, which lives until it is put
        self._put: MutableMapping[Outbox, float] = weakref.WeakKeyDictionary()
        self._taken: Tasks = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> TokenTimes:
        self._wrap(Scheduler, "commit", self._commit)
        self._wrap(Postbox, "post", self._post)
        self._wrap(Outbox, "put", self._arrive)
        self._wrap(Outbox, "take", self._take)
        self._wrap(EventStream, "stream_response", self._stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for undo in self._undo:
            undo()

    def _wrap(self, owner: type, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)
        setattr(owner, name, lambda *args: around(inner, *args))
        self._undo.append(lambda: setattr(owner, name, inner))

    def _commit(self, inner: Callable[..., Any], *args: Any) -> Any:
        self._step_s = time.perf_counter()
        return inner(*args)

    def _post(self, inner: Callable[..., Any], postbox: Postbox, take: Any, piece: Any) -> None:
        self._posted[id(piece)] = self._step_s
        inner(postbox, take, piece)

    def _arrive(self, inner: Callable[..., Any], outbox: Outbox, piece: Any) -> None:
        since_s = self._posted.pop(id(piece), None)
        if since_s is not None:
            self._put.setdefault(outbox, since_s)
        inner(outbox, piece)

    async def _take(self, inner: Callable[..., Any], outbox: Outbox) -> Any:
        pieces = await inner(outbox)
        since_s, task = self._put.pop(outbox, None), asyncio.current_task()
        if since_s is not None and task is not None:
            self._taken.setdefault(task, since_s)
        return pieces

    def _written(self, since_s: float) -> None:
        self.milliseconds.append(1e3 * (time.perf_counter() - since_s))

    async def _stream(self, inner: Callable[..., Any], response: EventStream, send: Send) -> None:
        async def timed(message: MutableMapping[str, Any]) -> None:
            await send(message)
            task = asyncio.current_task()
            since_s = None if task is None else self._taken.pop(task, None)
            if since_s is not None and message.get("body"):
                # uvloop writes once it has run all that was due; what is called then comes behind that.
                asyncio.get_running_loop().call_soon(self._written, since_s)

        await inner(response, timed)
