"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from turbojax.engine.response import Response
from turbojax.generation import GenerationConfig
from turbojax.serve.models import check_model
from turbojax.serve.openai_errors import SERVER, ApiError
from turbojax.serve.protocol.chat import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Choice,
    ChunkChoice,
    ChunkDelta,
    Message,
    Usage,
)
from turbojax.serve.service import Service, service_of
from turbojax.serve.sse import DONE, EventStream, event, started

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(
    body: ChatRequest, service: Annotated[Service, Depends(service_of)]
) -> ChatCompletion | EventStream:
    """The model's next message in a conversation."""
    if body.stream:
        return EventStream(await started(events(service, body)))
    return await complete(service, body)


def pieces_of(service: Service, body: ChatRequest, request_id: str) -> AsyncGenerator[Response, None]:
    check_model(body.model, service)
    config = GenerationConfig(
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        do_sample=body.temperature is not None and body.temperature > 0,
        temperature=body.temperature,
        random_seed=body.seed,
    )
    messages: list[Any] = body.messages
    return service.stream(messages, config, request_id=request_id)


def new_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


async def complete(service: Service, body: ChatRequest) -> ChatCompletion:
    """The whole answer to a request.

    Raises:
        ApiError, TurbojaxError: see `to_api_error`.
    """
    request_id, text, usage, reason = new_id(), "", Usage(), None
    async with aclosing(pieces_of(service, body, request_id)) as pieces:
        async for piece in pieces:
            if piece.error is not None:
                raise ApiError(500, piece.error, SERVER)
            text, reason = text + piece.text, piece.finish_reason
            usage = usage_of(piece)
    choice = Choice(index=0, message=Message(content=text), finish_reason=reason)
    return ChatCompletion(
        id=request_id, created=int(time.time()), model=service.model_name, choices=[choice], usage=usage
    )


def usage_of(piece: Response) -> Usage:
    num_prompt, num_new = piece.num_input_tokens, piece.num_generated_tokens
    return Usage(prompt_tokens=num_prompt, completion_tokens=num_new, total_tokens=num_prompt + num_new)


async def events(service: Service, body: ChatRequest) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events."""
    request_id, created = new_id(), int(time.time())

    def chunk(delta: ChunkDelta, reason: str | None = None) -> bytes:
        choice = ChunkChoice(index=0, delta=delta, finish_reason=reason)
        one = ChatChunk(id=request_id, created=created, model=service.model_name, choices=[choice])
        return event(one.model_dump_json(exclude_none=True))

    is_first = True
    async with aclosing(pieces_of(service, body, request_id)) as pieces:
        async for piece in pieces:
            if piece.error is not None:
                raise ApiError(500, piece.error, SERVER)
            yield chunk(ChunkDelta(role="assistant" if is_first else None, content=piece.text), piece.finish_reason)
            is_first = False
    yield DONE
