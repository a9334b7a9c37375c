"""POST /v1/completions: its request, its answer and the pieces of a streamed one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from turbojax.engine.plan import MAX_LOGPROBS
from turbojax.serve import bounds
from turbojax.serve.protocol.base import because
from turbojax.serve.protocol.sampling import Sampling, TokenId
from turbojax.serve.protocol.usage import Usage

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[str, Field(min_length=1)]


class CompletionRequest(Sampling):
    """One prompt or several, as texts or token ids, and how to go on with them."""

    prompt: (
        Prompt
        | TokenIds
        | Annotated[list[Prompt], Field(min_length=1, max_length=bounds.MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=bounds.MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[Literal[1] | None, because("answers are not ranked: ask for n of them with logprobs")] = None
    suffix: Annotated[Literal[""] | None, because("the model cannot fill in the middle of a text")] = None


class CompletionLogprobs(BaseModel):
    """A row for each token; `text_offset` is where it, or the character that it is a part of, begins in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A sample of a prompt, or a piece of it: choices of prompt i are i * n .. i * n + n - 1."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length", "timeout"] | None = None


class Completion(BaseModel):
    """An answer, or a piece of one; of the pieces the last alone has a usage, if it is asked for."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
