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
    """Sends events as they come. However it ends, cancelled when its client goes too, their generator is closed."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(
            rest,
            media_type="text/event-stream",
            # Proxies must not gather events before they pass them on.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The base would wait for the client to go in one more task: `limits` does so for every route.
        try:
            await self.stream_response(send)
        finally:
            await self._rest.aclose()

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._rest:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def started(events: AsyncGenerator[bytes, None]) -> EventStream:
    """A response once the first event is there: what fails before it raises here, while a status can still be sent."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)
