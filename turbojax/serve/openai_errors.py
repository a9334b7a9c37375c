"""Errors as OpenAI's clients expect them: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from turbojax.engine.response import Response
from turbojax.errors import (
    ConfigError,
    EngineClosedError,
    EngineFailedError,
    GuideError,
    InvalidFieldError,
    MissingExtraError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    TurbojaxError,
)

# Of what came: enough to know it again, and no more, however large or deep it is.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 3, 3
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60

Body = TypeVar("Body", bound=BaseModel)

INVALID, OVERLOADED, SERVER = "invalid_request_error", "overloaded_error", "server_error"
RETRY_AFTER_S = 1
# What ends answers on their way and has a status of its own.
FAILURES = {kind.__name__: kind for kind in (EngineClosedError, EngineFailedError, GuideError)}


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
        """Half a character, which JSON can have and UTF-8 cannot, comes back as \\ud800."""
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {name: text and written(text) for name, text in told.items()}}


def written(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def failure_of(piece: Response) -> ApiError:
    """What a client is told of an answer that failed on its way."""
    kind, message = FAILURES.get(piece.error_type or ""), piece.error or ""
    if kind is None:
        return ApiError(500, message, SERVER, code="generation_failed")
    return to_api_error(kind(message))


def to_api_error(error: BaseException) -> ApiError:
    """What a client is told of an exception; of one that nobody expected, nothing but its kind."""
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    match error:
        case ApiError():
            return error
        case ConfigError():
            return ApiError(400, f"{error.field} is {error.value!r}; accepted: {error.accepted}", param=error.field)
        case PromptTooLongError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case InvalidFieldError():
            return ApiError(400, str(error), param=error.param)
        case MissingExtraError():
            # The official client would try again what fails with 501 or the like.
            return ApiError(501, str(error), code="not_installed", headers={"X-Should-Retry": "false"})
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


def parsed(kind: type[Body], body: Any) -> Body:
    """JSON that came some other way than as the body of a request, as if it had been one.

    Raises:
        ApiError: what is wrong with it.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise validation_error(error.errors(), body) from error


def validation_error(errors: Sequence[Any], body: Any) -> ApiError:
    """The first thing that is wrong with a body, in words of all the forms that the place may have."""
    field = place_of(errors[0])[:1]
    # Of alternatives, the one that fits best: it fails at the deepest place, and the last of these.
    wrong = max((e for e in errors if place_of(e)[:1] == field), key=lambda e: depth_of(e, body))
    param = path_of(wrong, body)
    match wrong["type"]:
        case "json_invalid":
            return ApiError(400, f"the body is no JSON: {wrong['ctx']['error']}", code="invalid_json")
        case "extra_forbidden":
            return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
        case "unsupported_parameter":
            return ApiError(400, f"'{param}' is not supported: {wrong['msg']}", param=param, code=wrong["type"])
        case "missing":
            return ApiError(400, f"{param or 'the body'} is missing", param=param, code="missing_parameter")
    forms = dict.fromkeys(accepted(error) for error in errors if path_of(error, body) == param)
    came = _SHORT.repr(wrong["input"])
    return ApiError(400, f"{param or 'the body'} is {came}; accepted: {', or '.join(forms)}", param=param)


def accepted(error: Any) -> str:
    """What would have been right, in words that need no Python."""
    numbers = error.get("ctx", {})
    match error["type"]:
        case "dict_type" | "model_type" | "model_attributes_type":
            return "an object"
        case "too_long":
            return f"{numbers['max_length']} items at most"
        case "too_short":
            return f"{numbers['min_length']} items at least"
        case "string_too_long":
            return f"{numbers['max_length']} characters at most"
        case "string_pattern_mismatch":
            return f"a text that matches {numbers['pattern']}"
        case "union_tag_invalid":
            return f"a {numbers['discriminator']} of {numbers['expected_tags']}"
    text: str = error["msg"]
    return text.removeprefix("Input should be ").removeprefix("Value error, ")


def no_json() -> ApiError:
    message = "the body is not read as JSON: send it with the header 'Content-Type: application/json'"
    return ApiError(415, message, code="unsupported_media_type")


def no_route(method: str, path: str, error: HTTPException) -> ApiError:
    message = f"there is no {method} {path[:100]} here; OpenAI's routes are under /v1, and /openapi.json has them all"
    return ApiError(error.status_code, message, code="no_such_route", headers=error.headers)


def place_of(error: Any) -> list[str | int]:
    return [part for part in error["loc"] if part != "body"]


def depth_of(error: Any, body: Any) -> tuple[int, list[int]]:
    path = path_of(error, body)
    depth = -1 if path is None else path.count(".") + path.count("[")
    return depth, [part for part in place_of(error) if isinstance(part, int)]


def path_of(error: Any, body: Any) -> str | None:
    """Where an error is, as `messages[0].content`; its location names alternatives of types too, which are left out."""
    path, at, parts = "", body, place_of(error)
    for place, part in enumerate(parts, start=1):
        if isinstance(at, list) and isinstance(part, int) and part < len(at):
            path, at = f"{path}[{part}]", at[part]
        elif isinstance(at, dict) and part in at:
            path, at = f"{path}.{part}", at[part]
        elif place == len(parts) and error["type"] == "missing":
            path = f"{path}.{part}"
    return path.removeprefix(".") or None


def install(app: FastAPI) -> None:
    """Every exception of a route becomes an error body."""

    async def respond(request: Request, error: Exception) -> JSONResponse:
        told = to_api_error(error)
        return JSONResponse(told.body, told.status, told.headers)

    async def respond_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        is_unread = isinstance(error.body, bytes)  # its client did not say that it is JSON, as curl -d does not
        told = no_json() if is_unread else validation_error(error.errors(), error.body)
        return JSONResponse(told.body, told.status, told.headers)

    async def respond_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code in (404, 405):  # of the router: routes raise ApiErrors
            told = no_route(request.method, request.url.path, error)
        else:
            told = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return JSONResponse(told.body, told.status, told.headers)

    app.add_exception_handler(HTTPException, respond_http)
    app.add_exception_handler(RequestValidationError, respond_invalid)
    app.add_exception_handler(Exception, respond)
    for kind in (ApiError, TurbojaxError):
        app.add_exception_handler(kind, respond)
