"""POST /v1/completions: texts or token ids, and how the model goes on with them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response as HttpResponse

from turbojax.engine.response import Response
from turbojax.errors import MissingTokenizerError
from turbojax.generation import GenerationConfig
from turbojax.serve import bounds
from turbojax.serve.completion_text import CompletionText, Echo, joined
from turbojax.serve.generation import check_stream_options, generation_config, naming
from turbojax.serve.models import check_model
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.protocol.completions import Completion, CompletionChoice, CompletionRequest
from turbojax.serve.protocol.usage import Usage
from turbojax.serve.replies import as_json, documented, streamed
from turbojax.serve.service import Service, service_of
from turbojax.serve.tally import Tally

TokenIds = Sequence[int]

router = APIRouter(tags=["completions"])
DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post("/v1/completions", responses=documented(Completion, streams=True), response_model=None)
async def completions(body: CompletionRequest, service: Annotated[Service, Depends(service_of)]) -> HttpResponse:
    """Texts that go on from prompts; with `echo` the prompts' own log-probabilities too."""
    if body.stream:
        return await streamed(chunks(service, body))
    return as_json(await complete(service, body))


async def complete(service: Service, body: CompletionRequest) -> Completion:
    """The whole answer to a request.

    Raises:
        ApiError, TurbojaxError: see `to_api_error`.
    """
    with naming("prompt"):
        job = await start(service, body)
        parts: dict[int, list[CompletionChoice]] = {}
        async with aclosing(job.pieces()) as pieces:
            async for piece in pieces:
                choice = job.choice(piece)
                parts.setdefault(choice.index, []).append(choice)
    return job.answer([whole_choice(parts[index]) for index in sorted(parts)], job.tally.usage())


async def chunks(service: Service, body: CompletionRequest) -> AsyncGenerator[dict[str, Any], None]:
    """The answer in pieces, as JSON objects."""
    with naming("prompt"):
        job = await start(service, body)
        head = {"id": job.id, "object": "text_completion", "created": job.created, "model": service.model_name}
        async with aclosing(job.pieces()) as pieces:
            async for piece in pieces:
                yield head | {"choices": [job.choice(piece).model_dump()]}
        if body.stream_options is not None and body.stream_options.include_usage:
            yield head | {"choices": [], "usage": job.tally.usage().model_dump()}


def whole_choice(parts: list[CompletionChoice]) -> CompletionChoice:
    """A choice from its pieces."""
    tables = [part.logprobs for part in parts if part.logprobs is not None]
    return parts[-1].model_copy(update={"text": "".join(p.text for p in parts), "logprobs": joined(tables)})


@dataclass
class Job:
    """A request on its way: what the engine is asked, and the texts that come of it by prompt and sample."""

    service: Service
    body: CompletionRequest
    prompts: list[TokenIds]
    config: GenerationConfig
    tally: Tally
    texts: dict[tuple[int, int], CompletionText]
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def pieces(self) -> AsyncGenerator[Response, None]:
        """Every piece, counted."""
        stream = self.service.stream(self.prompts, self.config, request_id=self.id, user=self.body.user)
        async with aclosing(stream):
            async for piece in stream:
                self.tally.add(piece)
                yield piece

    def choice(self, piece: Response) -> CompletionChoice:
        """What a piece adds to its choice."""
        text, logprobs = self.texts[piece.index, piece.sample_index].read(piece)
        # The token that the engine had to generate, and nobody asked for, may be one that ends answers.
        reason: Any = "length" if piece.finish_reason and self.body.max_tokens == 0 else piece.finish_reason
        index = piece.index * self.body.num_choices + piece.sample_index
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)

    def answer(self, choices: list[CompletionChoice], usage: Usage) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.service.model_name, choices=choices, usage=usage)


async def start(service: Service, body: CompletionRequest) -> Job:
    """A request, checked as far as the engine does not do it.

    Raises:
        ApiError, TurbojaxError: it cannot be served.
    """
    check_model(body.model, service)
    check_stream_options(body)
    has_answer = body.max_tokens != 0
    if not has_answer and not body.echo:
        raise ApiError(400, "max_tokens is 0, which leaves nothing to answer without echo", param="max_tokens")
    config = generation_config(
        service, body,
        max_new_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )  # fmt: skip
    many = as_list(body.prompt)
    if len(many) * body.num_choices > bounds.MAX_CHOICES:
        message = f"{len(many)} prompts times n={body.num_choices}; accepted: at most {bounds.MAX_CHOICES} answers"
        raise ApiError(400, message, param="n")
    prompts, echoes = await asyncio.to_thread(encoded, service, many, has_echo=bool(body.echo))
    texts = {
        (index, sample): CompletionText(
            service.token_texts, echoes[index], num_top=body.logprobs,
            hides_special=config.skip_special_tokens, has_answer=has_answer,
        )
        for index in range(len(prompts))
        for sample in range(body.num_choices)
    }  # fmt: skip
    return Job(service, body, prompts, config, Tally(counts_answers=has_answer), texts)


def encoded(service: Service, prompts: Sequence[Any], *, has_echo: bool) -> tuple[list[TokenIds], list[Echo | None]]:
    """Token ids of prompts, and their texts where they are to be echoed.

    Raises:
        MissingTokenizerError: a text for a model without a tokenizer.
    """
    tokenizer = service.tokenizer
    if tokenizer is None:
        if any(isinstance(prompt, str) for prompt in prompts):
            raise MissingTokenizerError("the model has no tokenizer; give token ids")
        return list(prompts), [Echo("", prompt) if has_echo else None for prompt in prompts]
    ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if not has_echo:
        return ids, [None] * len(ids)
    texts = [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
    return ids, [Echo(text, one) for text, one in zip(texts, ids, strict=True)]


def as_list(prompt: Any) -> Sequence[Any]:
    """One prompt, or several, as a list."""
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if is_one else prompt
