"""POST /v1/chat/completions: its request, its answer and the pieces of a streamed one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from turbojax.engine.plan import MAX_LOGPROBS
from turbojax.serve import bounds
from turbojax.serve.protocol.base import Strict, because
from turbojax.serve.protocol.sampling import NumTokens, Sampling
from turbojax.serve.protocol.usage import Usage

FunctionName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_-]{{1,{bounds.MAX_NAME_LEN}}}$")]


# `serve.messages` reads them, since what a message may have depends on its role; this is for readers of the document.
MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"description": 'A text, a list of parts {"type": "text", "text": ...}, or null beside calls.'},
        "name": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "description": "Of an assistant: the calls it made."},
        "tool_call_id": {"type": ["string", "null"], "description": "Of a tool: the call that this answers."},
        "reasoning_content": {"type": ["string", "null"], "description": "Of an assistant."},
    },
}
Messages = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(MESSAGE_SCHEMA)]],
    Field(min_length=1, max_length=bounds.MAX_MESSAGES),
]


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """A conversation, and how to go on with it."""

    messages: Messages
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=bounds.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    # Beyond OpenAI's.
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    # OpenAI's that this server does not offer: accepted where they ask for what it does anyway.
    audio: Annotated[None, because("answers are text")] = None
    function_call: Annotated[None, because("OpenAI has replaced it: use tool_choice")] = None
    functions: Annotated[None, because("OpenAI has replaced them: use tools")] = None
    metadata: Annotated[None, because("nothing is stored that it could be found by: leave it out")] = None
    modalities: Annotated[list[Literal["text"]] | None, because("answers are text")] = None
    moderation: Annotated[None, because("nothing is moderated: leave it out")] = None
    prediction: Annotated[None, because("predicted outputs are not used: leave it out")] = None
    prompt_cache_key: Annotated[None, because("one cache is for all: leave it out, or use cache_salt")] = None
    prompt_cache_options: Annotated[None, because("one cache is for all: leave it out")] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory"] | None, because("the prefix cache is in memory: leave it out")
    ] = None
    safety_identifier: Annotated[None, because("nothing is moderated: use user, which the log has")] = None
    service_tier: Annotated[
        Literal["auto", "default"] | None, because("there are no tiers: leave it out, or use priority")
    ] = None
    store: Annotated[Literal[False] | None, because("nothing is stored: leave it out")] = None
    verbosity: Annotated[None, because("the model has no such control: say it in a message")] = None
    web_search_options: Annotated[None, because("nothing is searched: leave it out")] = None


class TopLogprob(BaseModel):
    """A token that could have come; `bytes` where its text is only a part of a character too."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that came, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class Logprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(BaseModel):
    """`arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """What the model says: its reasoning, text, and calls of tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls", "timeout"]


class Choice(BaseModel):
    index: int
    message: Message
    logprobs: Logprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    """More of a call; `id`, `type` and the name come once."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChunkDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: ChunkDelta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(BaseModel):
    """A piece of an answer; the one with the usage, if it is asked for, has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
