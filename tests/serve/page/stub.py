"""A server whose answers are written beforehand, behind the real page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from turbojax.serve.page.router import router

HOLD = "hold"
"""In an answer: nothing more comes until the client goes away."""


@dataclass
class Stub:
    """Deltas of the next answers, and what was asked.

    Attributes:
        answers: each a list of deltas, or an error (status, message).
        usage: of every answer.
        metrics: what /metrics says; None is 503.
        key: what requests must bring, where it is given.
        bodies: of the requests.
        num_aborted: clients that went away.
    """

    answers: list[Any] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=lambda: {"completion_tokens": 42})
    metrics: str | None = ""
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_aborted: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(router)
        app.add_api_route("/v1/models", self._models)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        app.add_api_route("/metrics", self._metrics)
        return app

    def _refusal(self, request: Request) -> JSONResponse | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return error_response(401, "An API key is missing.")

    async def _models(self, request: Request) -> Any:
        return self._refusal(request) or {"object": "list", "data": [{"id": "tiny"}]}

    async def _metrics(self) -> Any:
        return PlainTextResponse(self.metrics or "", 200 if self.metrics is not None else 503)

    async def _chat(self, request: Request) -> Any:
        if refusal := self._refusal(request):
            return refusal
        self.bodies.append(await request.json())
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            return error_response(*answer)
        return StreamingResponse(self._events(answer), media_type="text/event-stream")

    async def _events(self, answer: list[Any]) -> AsyncGenerator[str, None]:
        try:
            for delta in answer:
                if delta == HOLD:
                    await asyncio.Event().wait()
                reason = delta.pop("finish_reason", None)
                yield event(choices=[{"index": 0, "delta": delta, "finish_reason": reason}])
            yield event(choices=[], usage=self.usage)
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def error_response(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "x", "param": None, "code": None}}, status)


def says(text: str, **last: Any) -> list[Any]:
    """An answer of this text, a word a piece."""
    words = text.split(" ")
    pieces = [{"content": word if i == 0 else f" {word}"} for i, word in enumerate(words)]
    return [*pieces, {"finish_reason": "stop", **last}]
