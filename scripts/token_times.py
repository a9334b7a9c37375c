"""How long tokens take from the engine to the socket, watched from outside."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, MutableMapping
from types import TracebackType
from typing import Any

from starlette.types import Send

from turbojax.call import Call
from turbojax.engine.scheduler import Scheduler
from turbojax.postbox import Postbox
from turbojax.serve.sse import EventStream

Tasks = MutableMapping["asyncio.Task[Any]", float]


class TokenTimes:
    """While it is entered, notes how long each piece took from its step's tokens to `send` of its event.

    A piece is posted in the engine's thread while a step is committed, heard in the task that streams its answer, and
    what that task sends next is its event.

    Attributes:
        milliseconds: of each event.
    """

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self._step_s = 0.0
        self._posted: dict[int, float] = {}  # pieces live until they are heard
        self._heard: Tasks = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> TokenTimes:
        self._wrap(Scheduler, "commit", self._commit)
        self._wrap(Postbox, "post", self._post)
        self._wrap(Call, "hear", self._hear)
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

    def _hear(self, inner: Callable[..., Any], call: Call, piece: Any) -> None:
        since_s, task = self._posted.pop(id(piece), None), asyncio.current_task()
        if since_s is not None and task is not None:
            self._heard[task] = since_s
        inner(call, piece)

    def _written(self, since_s: float) -> None:
        self.milliseconds.append(1e3 * (time.perf_counter() - since_s))

    async def _stream(self, inner: Callable[..., Any], response: EventStream, send: Send) -> None:
        async def timed(message: MutableMapping[str, Any]) -> None:
            await send(message)
            task = asyncio.current_task()
            since_s = None if task is None else self._heard.pop(task, None)
            if since_s is not None and message.get("body"):
                # uvloop writes once it has run all that was due; what is called then comes behind that.
                asyncio.get_running_loop().call_soon(self._written, since_s)

        await inner(response, timed)
