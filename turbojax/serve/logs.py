"""Structured logs: a line an event, as text or JSON, each with the id of the request that it belongs to."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from turbojax.serve.bodies import CLIENT_CLOSED
from turbojax.serve.gate import MONITORING
from turbojax.serve.metrics import HttpMetrics
from turbojax.serve.openai_errors import to_api_error
from turbojax.serve.settings import ServeConfig

HEADER = "X-Request-Id"
# What may come back in a header, and stand in a line of a log as it is.
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

log = logging.getLogger(__name__)
_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def request_id() -> str | None:
    """Of the request that is being answered here."""
    return _request_id.get()


def chosen_id(given: str | None) -> str:
    """The client's own id where it is a plain one, else a fresh one."""
    return given if given is not None and _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex


def log_event(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Logs what happened, with its numbers; nothing of prompts or answers belongs here."""
    log.log(level, event, extra={"fields": fields})


# -- lines ------------------------------------------------------------------------------------------------


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {"request_id": request_id(), **getattr(record, "fields", {})}
    return {name: value for name, value in fields.items() if value is not None}


def time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def in_a_line(text: str) -> str:
    """A text without anything that would break its line, or tell a terminal what to do."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class JsonLines(logging.Formatter):
    """A JSON object a line: `time`, `level`, `logger`, `message`, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": time_of(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **fields_of(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """The same for readers: time, level, message, then name=value; values with spaces are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        words = [time_of(record), record.levelname, in_a_line(record.getMessage())]
        words += [f"{name}={self._shown(value)}" for name, value in fields_of(record).items()]
        traceback = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return " ".join(words) + traceback

    @staticmethod
    def _shown(value: Any) -> str:
        text = str(value)
        is_plain = text.isprintable() and text != "" and not set(' "=') & set(text)
        return text if is_plain else json.dumps(text)


@contextmanager
def logging_to(stream: TextIO | None, config: ServeConfig) -> Iterator[None]:
    """Has everything that the process logs written as the config says; None is standard error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if config.log_json else TextLines())
    root, ours = logging.getLogger(), logging.getLogger("turbojax")
    before, propagates, handlers = ours.level, ours.propagate, ours.handlers[:]
    root.addHandler(handler)
    logging.captureWarnings(True)
    ours.setLevel(config.log_level.upper())
    ours.handlers, ours.propagate = [], True  # the command line's own, if any, would show each line twice
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        ours.setLevel(before)
        ours.handlers, ours.propagate = handlers, propagates


# -- requests ---------------------------------------------------------------------------------------------


def install(app: FastAPI, metrics: HttpMetrics) -> None:
    """Logs and counts every request; to be installed last, so that what the other middlewares refuse is seen too."""
    app.add_middleware(RequestLog, metrics=metrics)


class RequestLog:
    """Gives each request its id, sends it back, and logs one line when the answer has ended.

    An exception that nobody handled becomes a 500 here, with its traceback in the log.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name = HEADER.lower().encode()
        given = next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)
        token = _request_id.set(chosen_id(given))
        answer, start_s = Status(send), time.monotonic()
        try:
            with self._metrics.answering():
                await self._app(scope, receive, answer)
        except Exception as error:
            log.exception("a request failed")
            if not answer.code:
                told = to_api_error(error)
                await JSONResponse(told.body, told.status, told.headers)(scope, receive, answer)
        finally:
            self._note(scope, answer.code or CLIENT_CLOSED, time.monotonic() - start_s)
            _request_id.reset(token)

    def _note(self, scope: Scope, status: int, duration_s: float) -> None:
        self._metrics.count(scope["method"], getattr(scope.get("route"), "path", None), status)
        level = logging.DEBUG if scope["path"] in MONITORING else logging.INFO  # probes come every few seconds
        log_event(
            "http", level, method=scope["method"], path=scope["path"], status=status, duration_s=round(duration_s, 4),
            client=(scope.get("client") or [None])[0], cut=scope.get("state", {}).get("cut"),
        )  # fmt: skip


class Status:
    """Sends an answer on, with the request's id in its headers, and keeps its status."""

    def __init__(self, send: Send) -> None:
        self._send, self.code = send, 0

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.code = message["status"]
            MutableHeaders(scope=message)[HEADER] = request_id() or ""
        await self._send(message)
