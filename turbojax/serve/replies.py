"""How an answer leaves, whole or piece by piece, and what the OpenAPI document says of it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response

from turbojax.errors import TurbojaxError
from turbojax.serve.openai_errors import ApiError, to_api_error
from turbojax.serve.protocol.errors import ErrorBody
from turbojax.serve.sse import DONE, EventStream, event, started

log = logging.getLogger(__name__)

# What the routes say of their errors in the OpenAPI document.
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "A field is unknown, wrong or not supported; `param` names it."},
    404: {"model": ErrorBody, "description": "The server does not have that model."},
    429: {"model": ErrorBody, "description": "The queue is full; Retry-After says when to come back."},
    500: {"model": ErrorBody, "description": "The engine failed."},
    501: {"model": ErrorBody, "description": "The server cannot do that."},
    503: {"model": ErrorBody, "description": "The server is shutting down; Retry-After says when to come back."},
    "4XX": {
        "model": ErrorBody,
        "description": "Keys, limits, or the request itself: `code` says which.",
    },
}


def documented(answer: type[BaseModel], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """What a route's responses are, for the OpenAPI document."""
    success: dict[str, Any] = {"model": answer}
    if streams:
        success["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return ERRORS | {200: success}


def as_json(answer: BaseModel) -> Response:
    """A body, written once and not checked again."""
    return Response(answer.model_dump_json(), media_type="application/json")


async def streamed(chunks: AsyncGenerator[dict[str, Any], None]) -> EventStream:
    """Chunks as events. What fails before the first one raises; later, an error is the last event."""
    return await started(_events(chunks))


async def _events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    is_first = True
    try:
        async for chunk in chunks:
            yield event(to_json(chunk))
            is_first = False
        yield DONE
    except Exception as error:
        if is_first:
            raise
        if not isinstance(error, ApiError | TurbojaxError):
            log.exception("a stream failed")
        yield event(to_json(to_api_error(error).body))
    finally:
        await chunks.aclose()
