"""Bodies of requests: read whole before any route sees them, no larger, later or deeper than they may be."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

from turbojax.serve import json_shape
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.settings import ServeConfig

# A JSON reader makes an object of each: this many take it a few milliseconds.
MAX_CONTAINERS = 1 << 16
CLIENT_CLOSED = 499
CLOSE = {"Connection": "close"}  # the rest of a body that is refused is not read


async def read_body(receive: Receive, config: ServeConfig) -> bytes:
    """All of a body.

    Raises:
        ApiError: 413, 408, 400; or the client has gone.
    """
    try:
        async with asyncio.timeout(config.receive_timeout_s):
            text = await whole_body(receive, config.max_body_bytes)
    except TimeoutError:
        message = f"the request had not come whole after {config.receive_timeout_s:g} s"
        raise ApiError(408, message, code="receive_timeout", headers=CLOSE) from None
    check_shape(text, config.max_json_depth)
    return text


def client_gone() -> ApiError:
    """Of a client that nobody can tell so any more; the status is what nginx logs then."""
    return ApiError(CLIENT_CLOSED, "the client has gone", code="client_disconnected")


def too_large(max_bytes: int) -> ApiError:
    message = f"the request's body is larger than {max_bytes} bytes"
    return ApiError(413, message, code="body_too_large", headers=CLOSE)


def check_length(scope: Scope, max_bytes: int) -> None:
    """A body that says how large it is need not be read to be refused.

    Raises:
        ApiError: 413.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise too_large(max_bytes)


async def whole_body(receive: Receive, max_bytes: int) -> bytes:
    """A body, however many pieces it comes in.

    Raises:
        ApiError: it is too large; or its client has gone.
    """
    pieces, num_bytes, more = list[bytes](), 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_gone()
        pieces.append(message.get("body", b""))
        num_bytes += len(pieces[-1])
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        more = message.get("more_body", False)
    return b"".join(pieces)


def check_shape(text: bytes, max_depth: int) -> None:
    """A body's arrays and objects are no more, and no deeper inside one another, than its readers can stand.

    Raises:
        ApiError: 400.
    """
    shape = json_shape.at_most(text)
    if shape.num_containers > MAX_CONTAINERS or shape.depth > max_depth:
        shape = json_shape.exactly(text)
    if shape.depth > max_depth:
        raise ApiError(400, f"the body nests arrays and objects deeper than {max_depth}", code="body_too_deep")
    if shape.num_containers > MAX_CONTAINERS:
        message = f"the body has {shape.num_containers} arrays and objects, more than {MAX_CONTAINERS}"
        raise ApiError(400, message, code="body_too_complex")


class Replayed:
    """Receives a body that was read before; then waits, since nothing but the end of the request follows."""

    def __init__(self, text: bytes) -> None:
        self._text: bytes | None = text

    async def __call__(self) -> Message:
        if self._text is None:
            await asyncio.Event().wait()  # who waits for the client to go is cancelled when it does
        text, self._text = self._text, None
        return {"type": "http.request", "body": text, "more_body": False}


class Counted:
    """Receives a body as it comes, up to so many bytes."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive, self._max_bytes, self._num_bytes = receive, max_bytes, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            error = too_large(self._max_bytes)  # readers of forms let HTTPException alone pass
            raise HTTPException(error.status, error.message, error.headers)
        return message
