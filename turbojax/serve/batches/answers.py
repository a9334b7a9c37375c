"""One request of a batch, answered by the functions of its route."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from turbojax.errors import EngineFailedError, TurbojaxError
from turbojax.serve import chat, completions
from turbojax.serve.openai_errors import ApiError, to_api_error, validation_error
from turbojax.serve.protocol.chat import ChatRequest
from turbojax.serve.protocol.completions import CompletionRequest
from turbojax.serve.protocol.sampling import Sampling
from turbojax.serve.service import Service

Item = TypeVar("Item")

log = logging.getLogger(__name__)

BUSY = frozenset({429, 503})
Complete = Callable[[Service, Any], Awaitable[BaseModel]]
ROUTES: dict[str, tuple[type[Sampling], Complete]] = {
    "/v1/chat/completions": (ChatRequest, chat.complete),
    "/v1/completions": (CompletionRequest, completions.complete),
}


class Result(NamedTuple):
    """What a request's response would have been over HTTP."""

    status: int
    body: dict[str, Any]

    @property
    def is_success(self) -> bool:
        return self.status == 200

    @property
    def is_busy(self) -> bool:
        """The same request may be answered later."""
        return self.status in BUSY


async def answer(service: Service, url: str, body: dict[str, Any], priority: int) -> Result:
    """The answer to a request; `priority` is for one that says none itself.

    Raises:
        EngineFailedError: nothing will be answered any more.
    """
    model, complete = ROUTES[url]
    try:
        request = model.model_validate(body)
        if request.stream:
            raise ApiError(400, "stream: the answers of a batch are whole", param="stream")
        if request.priority is None:
            request = request.model_copy(update={"priority": priority})
        return Result(200, (await complete(service, request)).model_dump(mode="json"))
    except EngineFailedError:
        raise
    except ValidationError as error:
        told = validation_error(error.errors(), body)
    except Exception as error:
        if not isinstance(error, ApiError | TurbojaxError):
            log.exception("a request of a batch failed")
        told = to_api_error(error)
    return Result(told.status, told.body)


async def run_few(
    items: Iterable[Item], run: Callable[[Item], Coroutine[Any, Any, None]], free: asyncio.Semaphore
) -> None:
    """Runs something for each item, as many at a time as there is room; the first error ends it all.

    Raises:
        ExceptionGroup: of what was raised.
    """
    async with asyncio.TaskGroup() as group:
        for item in items:
            await free.acquire()
            task = group.create_task(run(item))
            task.add_done_callback(lambda _: free.release())


def record_of(custom_id: str, result: Result) -> dict[str, Any]:
    """A line of an output or error file."""
    response = {"status_code": result.status, "request_id": f"req_{uuid.uuid4().hex}", "body": result.body}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}


def unanswered(custom_id: str | None, code: str, message: str) -> dict[str, Any]:
    """A line of an error file for a request that was never run, or for a line that is none."""
    error = {"code": code, "message": message}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": None, "error": error}
