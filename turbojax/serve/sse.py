"""Answers in pieces: server-sent events, whose source is closed however the response ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def event(json: bytes) -> bytes:
    """One event; JSON has no line breaks unless its writer is asked for them."""
    return b"data: " + json + b"\n\n"


class EventStream(StreamingResponse):
    """Sends events as they come. A client that goes away, or any other end, closes their generator."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            # Proxies must not gather events before they pass them on.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})},
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def started(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same events once the first is there: what fails before it raises here, while a status can still be sent."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return _chained(first, events)


async def _chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for one in rest:
            yield one
    finally:
        await rest.aclose()
