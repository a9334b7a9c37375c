"""Errors as OpenAI's clients expect them: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from turbojax.errors import (
    ConfigError,
    EngineClosedError,
    EngineFailedError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)

INVALID, OVERLOADED, SERVER = "invalid_request_error", "overloaded_error", "server_error"
RETRY_AFTER_S = 1


class ApiError(Exception):
    """What a client is told instead of an answer.

    Attributes:
        status: of HTTP.
        message: what is wrong and what is accepted.
        type: the kind of error: `invalid_request_error`, `authentication_error`, `overloaded_error`, `server_error`.
        param: the field at fault.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def to_api_error(error: BaseException) -> ApiError:
    """What a client is told of an exception; of one that nobody expected, nothing but its kind."""
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    match error:
        case ApiError():
            return error
        case ConfigError():
            return ApiError(400, f"{error.field} is {error.value!r}; accepted: {error.accepted}", param=error.field)
        case PromptTooLongError():
            return ApiError(400, str(error), param="messages", code="context_length_exceeded")
        case RequestError():
            return ApiError(400, str(error))
        case QueueFullError():
            return ApiError(429, str(error), OVERLOADED, code="queue_full", headers=retry)
        case EngineClosedError():
            return ApiError(503, str(error), OVERLOADED, code="shutting_down", headers=retry)
        case EngineFailedError():
            return ApiError(500, str(error), SERVER, code="engine_failed")
        case _:
            return ApiError(500, f"the server failed: {type(error).__name__}", SERVER, code="internal_error")


def validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    return ApiError(400, f"{param or 'body'}: {first['msg']}", param=param)


def install(app: FastAPI) -> None:
    """Every exception of a route becomes an error body."""

    async def respond(request: Request, error: Exception) -> JSONResponse:
        told = validation_error(error) if isinstance(error, RequestValidationError) else to_api_error(error)
        return JSONResponse(told.body, told.status, told.headers)

    async def respond_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return JSONResponse(told.body, told.status, told.headers)

    app.add_exception_handler(HTTPException, respond_http)
    app.add_exception_handler(RequestValidationError, respond)
    app.add_exception_handler(Exception, respond)
    from turbojax.errors import TurbojaxError

    for kind in (ApiError, TurbojaxError):
        app.add_exception_handler(kind, respond)
