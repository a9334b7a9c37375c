"""What one client may take of the server: room, time and bodies, each with an end; a client that leaves is let go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turbojax.serve import json_shape
from turbojax.serve.gate import MONITORING, Gate, Visit
from turbojax.serve.openai_errors import SERVER, ApiError
from turbojax.serve.settings import ServeConfig

UPLOADS = "/v1/files"
# A JSON reader makes an object of each: this many take it a few milliseconds.
MAX_CONTAINERS = 1 << 16
DISCONNECTED = ApiError(499, "the client has gone", code="client_disconnected")


def install(app: FastAPI, config: ServeConfig, gate: Gate) -> None:
    """Bounds every route, those that watch the server excepted; `run_server` drains the gate."""
    app.state.gate = gate
    app.add_middleware(Limits, config=config, gate=gate)


class Limits:
    """Lets requests in through a gate, and reads their bodies before any route does.

    Whoever has its whole body is cancelled when its client goes, when its time is over, or when the server drains for
    too long; so are, with it, the engine's requests whose answers it hands on. An answer that waits for a slow reader
    is kept: pieces of it in its call's outbox, at most its own length, and 64 KiB in the socket. One that reads nothing
    for `send_timeout_s` is disconnected.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, gate: Gate) -> None:
        self._app, self._config, self._gate = app, config, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in MONITORING:
            return await self._app(scope, receive, send)
        answer = Answer(scope, send)
        try:
            with self._gate.visit() as visit:
                await self._answer(scope, receive, answer, visit)
        except ApiError as error:
            await answer.end_with(error, receive)

    async def _answer(self, scope: Scope, receive: Receive, answer: Answer, visit: Visit) -> None:
        """Answers a request, unless it is cut.

        Raises:
            ApiError: why it was not answered.
        """
        loop, config = asyncio.get_running_loop(), self._config
        limit_s, watchers = config.request_timeout_s, list[asyncio.TimerHandle | asyncio.Task[None]]()
        body: Receive
        try:
            if limit_s is not None:
                watchers.append(loop.call_later(limit_s, visit.cut, too_slow(limit_s)))
            if scope["path"] == UPLOADS:
                check_length(scope, config.max_upload_bytes)
                body = Counted(receive, config.max_upload_bytes)
            else:
                check_length(scope, config.max_body_bytes)
                body = Replayed(await self._read_body(receive))
                watchers.append(loop.create_task(watch(receive, answer, visit)))
            await self._app(scope, body, answer.send)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if visit.reason is None or (task is not None and task.uncancel() > 0):
                raise  # the server itself ends
            raise visit.reason from None
        finally:
            for watcher in watchers:
                watcher.cancel()

    async def _read_body(self, receive: Receive) -> bytes:
        """All of a body that is no larger, later or deeper than it may be.

        Raises:
            ApiError: 413, 408, 400.
        """
        limit_s = self._config.receive_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                text = await whole_body(receive, self._config.max_body_bytes)
        except TimeoutError:
            message = f"the request had not come whole after {limit_s:g} s"
            raise ApiError(408, message, code="receive_timeout", headers=CLOSE) from None
        check_shape(text, self._config.max_json_depth)
        return text


# -- bodies -----------------------------------------------------------------------------------------------

CLOSE = {"Connection": "close"}  # the rest of a body that is refused is not read


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
            raise DISCONNECTED
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


# -- answers ----------------------------------------------------------------------------------------------


def too_slow(limit_s: float) -> ApiError:
    message = f"the answer was not complete after {limit_s:g} s, the most that one may take"
    return ApiError(504, message, SERVER, code="request_timeout")


async def watch(receive: Receive, answer: Answer, visit: Visit) -> None:
    """Cuts a request when its client goes before it has the whole answer."""
    message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()
    if not answer.is_complete:
        visit.cut(DISCONNECTED)


class Answer:
    """What was sent of an answer, and its end where a route could not bring it to one."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.has_started, self.is_complete, self._is_stream = False, False, False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            self._is_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message["headers"]
            )
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)

    async def end_with(self, error: ApiError, receive: Receive) -> None:
        """Tells the client why the answer ends, as a status or as the last event; whoever logs the request too."""
        self._scope.setdefault("state", {})["cut"] = error.code
        if error is DISCONNECTED:
            return
        if not self.has_started:
            await JSONResponse(error.body, error.status, error.headers)(self._scope, receive, self._send)
        elif self._is_stream and not self.is_complete:
            text = f"data: {json.dumps(error.body)}\n\n".encode()
            await self._send({"type": "http.response.body", "body": text, "more_body": False})
