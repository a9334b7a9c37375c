"""POST /v1/chat/completions: the model's next message in a conversation."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response as HttpResponse

from turbojax.engine.response import Response
from turbojax.errors import ConfigError, InvalidFieldError
from turbojax.generation import GenerationConfig
from turbojax.serve.chat_choice import ChatChoice, Part, as_choice, as_delta
from turbojax.serve.chat_prompt import ChatPrompt, chat_prompt
from turbojax.serve.generation import REQUEST_NAMES, check_stream_options, generation_config, naming
from turbojax.serve.models import check_model
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.parsing import OutputParser, generation_overrides, make_parser
from turbojax.serve.protocol.chat import ChatCompletion, ChatRequest
from turbojax.serve.replies import as_json, documented, streamed
from turbojax.serve.service import Service, service_of
from turbojax.serve.tally import Tally

router = APIRouter(tags=["chat"])
NAMES = REQUEST_NAMES | {"logprobs": "top_logprobs"}


@router.post("/v1/chat/completions", responses=documented(ChatCompletion, streams=True), response_model=None)
async def chat_completions(body: ChatRequest, service: Annotated[Service, Depends(service_of)]) -> HttpResponse:
    """The model's next message in a conversation: text, reasoning, calls of tools."""
    if body.stream:
        return await streamed(chunks(service, body))
    return as_json(await complete(service, body))


async def complete(service: Service, body: ChatRequest) -> ChatCompletion:
    """The whole answer to a request.

    Raises:
        ApiError, TurbojaxError: see `to_api_error`.
    """
    with naming("messages", NAMES):
        job = await start(service, body)
        parts: list[list[Part]] = [[] for _ in job.choices]
        async with aclosing(job.pieces()) as pieces:
            async for piece in pieces:
                parts[piece.sample_index].append(job.read(piece))
    choices = [as_choice(index, part, has_logprobs=bool(body.logprobs)) for index, part in enumerate(parts)]
    usage = job.tally.usage()
    return ChatCompletion(id=job.id, created=job.created, model=service.model_name, choices=choices, usage=usage)


async def chunks(service: Service, body: ChatRequest) -> AsyncGenerator[dict[str, Any], None]:
    """The answer in pieces, each a `ChatChunk` without the checks that every token would pay for."""
    with naming("messages", NAMES):
        job, has_begun = await start(service, body), set[int]()
        head = {"id": job.id, "object": "chat.completion.chunk", "created": job.created, "model": service.model_name}
        async with aclosing(job.pieces()) as pieces:
            async for piece in pieces:
                index, part = piece.sample_index, job.read(piece)
                if not (part.deltas or part.logprobs or part.finish_reason):
                    continue  # its text is not clear yet
                if index not in has_begun:  # alone, as at OpenAI: its client takes calls in a first chunk for the whole
                    has_begun.add(index)
                    begin = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                    yield head | {"choices": [begin]}
                delta = as_delta(part.deltas)
                if delta or part.logprobs:
                    choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
                    if body.logprobs:
                        choice["logprobs"] = {"content": [row.model_dump() for row in part.logprobs], "refusal": None}
                    yield head | {"choices": [choice]}
                if part.finish_reason is not None:  # alone, as at OpenAI: readers do not expect it beside text or calls
                    end = {"index": index, "delta": {}, "finish_reason": part.finish_reason}
                    yield head | {"choices": [end]}
        if body.stream_options is not None and body.stream_options.include_usage:
            yield head | {"choices": [], "usage": job.tally.usage().model_dump()}


@dataclass
class Job:
    """A request on its way: what the engine is asked, and its choices as they grow."""

    service: Service
    prompt: ChatPrompt
    config: GenerationConfig
    choices: list[ChatChoice]
    user: str | None
    tally: Tally = field(default_factory=Tally)
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def pieces(self) -> AsyncGenerator[Response, None]:
        """Every piece, counted.

        Raises:
            InvalidFieldError: the schemas of tools that must be called make no grammar.
            TurbojaxError: see `Service.stream`.
        """
        try:
            stream = self.service.stream(self.prompt.token_ids, self.config, request_id=self.id, user=self.user)
            async with aclosing(stream):
                async for piece in stream:
                    self.tally.add(piece)
                    yield piece
        except ConfigError as error:
            if error.field == "response_format" and self.prompt.is_form_of_tools:
                raise InvalidFieldError("tools", f"their schemas; accepted: {error.accepted}") from error
            raise

    def read(self, piece: Response) -> Part:
        """What a piece adds to its choice."""
        choice = self.choices[piece.sample_index]
        part = choice.read(piece)
        if piece.finish_reason is not None:
            self.tally.num_reasoning_tokens += choice.num_reasoning_tokens
        return part


async def start(service: Service, body: ChatRequest) -> Job:
    """A request, checked as far as the engine does not do it.

    Raises:
        ApiError, TurbojaxError: it cannot be served.
    """
    check_model(body.model, service)
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs", param="top_logprobs")
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    prompt = await asyncio.to_thread(chat_prompt, service, body)
    chosen: dict[str, Any] = generation_overrides(service.styles, bool(prompt.tools))
    if prompt.response_format is not None:
        chosen["response_format"] = prompt.response_format
    config = generation_config(service, body, max_new_tokens=max_tokens(body), logprobs=num_top, **chosen)
    choices = [
        ChatChoice(parser_of(service, body, prompt), service.token_texts, num_top=num_top)
        for _ in range(body.num_choices)
    ]
    return Job(service, prompt, config, choices, body.user)


def parser_of(service: Service, body: ChatRequest, prompt: ChatPrompt) -> OutputParser | None:
    """A parser of one choice; None where there is nothing to find in it."""
    styles = service.styles
    if styles.reasoning is None and (styles.tool is None or not prompt.tools):
        return None
    are_parallel = body.parallel_tool_calls is not False
    return make_parser(styles, prompt.tools, prompt=prompt.text, parallel_tool_calls=are_parallel)


def max_tokens(body: ChatRequest) -> int | None:
    """Most tokens of the answer; None: as many as there is room for.

    Raises:
        ApiError: the old and the new field disagree.
    """
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"max_tokens is {old} and max_completion_tokens {new}: give one of them"
        raise ApiError(400, message, param="max_completion_tokens")
    return new if new is not None else old
