"""One request to an OpenAI endpoint, streamed, and when each part of its answer came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from turbojax.bench.latency import Trace

DATA, DONE = b"data:", b"[DONE]"
# A line of an answer with log-probabilities can be long.
LINE_BYTES = 1 << 22


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and what all of them say.

    Attributes:
        base_url: up to and with /v1.
        model: what the server calls it.
        is_chat: /chat/completions, else /completions.
        api_key: None sends none.
        fields: more of the request's body: temperature, seed, ignore_eos ...
    """

    base_url: str
    model: str
    is_chat: bool = True
    api_key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"{self.base_url}/{'chat/completions' if self.is_chat else 'completions'}"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def body(self, request: HttpRequest) -> dict[str, Any]:
        """A request as JSON."""
        asked = (
            {"messages": [{"role": "user", "content": request.prompt}]} if self.is_chat else {"prompt": request.prompt}
        )
        common = {"model": self.model, "max_tokens": request.num_new_tokens}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {**common, **asked, **stream, **self.fields}


@dataclass(frozen=True)
class HttpRequest:
    """A prompt, a text or token ids, and the most tokens of its answer."""

    prompt: str | list[int]
    num_new_tokens: int


@dataclass
class HttpTrace(Trace):
    """What was heard of one request.

    An event is a part of the answer, whatever number of tokens it has: parts do not say. The server's usage does, of
    all of them; without it each part counts as one token.

    Attributes:
        num_reported_tokens: of the answer, by the server's usage.
        error: why there is no whole answer.
    """

    num_reported_tokens: int | None = None
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.events) if self.num_reported_tokens is None else self.num_reported_tokens

    @property
    def is_whole(self) -> bool:
        return self.error is None and bool(self.events)


class StreamError(Exception):
    """The server's own word for what went wrong."""


async def send(session: aiohttp.ClientSession, endpoint: Endpoint, request: HttpRequest) -> HttpTrace:
    """Sends a request now and hears its answer to the end; what goes wrong is in the trace."""
    trace = HttpTrace(time.perf_counter(), 0)
    try:
        async with session.post(endpoint.url, json=endpoint.body(request), headers=endpoint.headers) as answer:
            if answer.status != 200:
                raise StreamError(f"{answer.status} {message_of(await answer.read())}")
            async for data in events(answer.content):
                hear(trace, data, time.perf_counter())
        if not trace.events:
            raise StreamError("the answer is empty")
    except (StreamError, aiohttp.ClientError, ValueError) as error:
        trace.error = str(error) or type(error).__name__
    except TimeoutError:
        trace.error = "timeout"
    return trace


async def events(content: asyncio.StreamReader | aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event.

    Raises:
        StreamError: the stream ends before it says so.
    """
    async for line in content:
        if line.startswith(DATA):
            data = line[len(DATA) :].strip()
            if data == DONE:
                return
            yield data
    raise StreamError("the stream was cut")


def hear(trace: HttpTrace, data: bytes, now_s: float) -> None:
    """Notes a part of an answer.

    Raises:
        StreamError: it is an error.
        ValueError: it is no JSON.
    """
    chunk = json.loads(data)
    if "error" in chunk:
        raise StreamError(message_of(data))
    if any(has_content(choice) for choice in chunk.get("choices") or ()):
        trace.events.append((now_s, 1))
    usage = chunk.get("usage")
    if usage:
        trace.num_input_tokens, trace.num_reported_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def has_content(choice: dict[str, Any]) -> bool:
    """A part with a text, reasoning, or a piece of a tool call: the first one often has a role alone."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def message_of(body: bytes) -> str:
    """What an error's body says, on one line."""
    try:
        found = json.loads(body)["error"]
        text = found["message"] if isinstance(found, dict) else found
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:200]
