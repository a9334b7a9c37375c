"""What one client may take of the server: room and time have an end, and a client that leaves is let go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from turbojax.serve.bodies import CLIENT_CLOSED, Counted, Replayed, check_length, client_gone, read_body
from turbojax.serve.gate import MONITORING, Gate, Visit
from turbojax.serve.openai_errors import SERVER, ApiError
from turbojax.serve.settings import ServeConfig

UPLOADS = "/v1/files"


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
                body = Replayed(await read_body(receive, config))
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
        visit.cut(client_gone())


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
        if error.status == CLIENT_CLOSED:
            return
        if not self.has_started:
            await JSONResponse(error.body, error.status, error.headers)(self._scope, receive, self._send)
        elif self._is_stream and not self.is_complete:
            text = f"data: {json.dumps(error.body)}\n\n".encode()
            await self._send({"type": "http.response.body", "body": text, "more_body": False})
