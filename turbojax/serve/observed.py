"""What is seen of a call while its pieces go by: waiting, first tokens, ends; counted, and logged in one line."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from turbojax.engine.response import Response
from turbojax.serve.logs import log_event
from turbojax.serve.metrics import RequestMetrics


async def observed(
    pieces: AsyncGenerator[Response, None], metrics: RequestMetrics, call_id: str, user: str | None = None
) -> AsyncGenerator[Response, None]:
    """The same pieces. Closing this closes their source. `user` is whom the client says it asks for."""
    call, outcome = ObservedCall(metrics), "cancelled"
    try:
        async for piece in pieces:
            call.see(piece)
            yield piece
        outcome = "done"
    except Exception as error:
        outcome = type(error).__name__
        call.refuse(outcome)
        raise
    finally:
        await pieces.aclose()
        call.end(call_id, user, outcome)


class ObservedRequest:
    """One prompt's one sample."""

    __slots__ = ("first_token_s", "last_token_s", "num_cached", "num_prompt", "num_tokens", "reason")

    def __init__(self, piece: Response) -> None:
        self.num_prompt, self.num_cached, self.num_tokens = piece.num_input_tokens, piece.num_cached_tokens, 0
        self.first_token_s = self.last_token_s = 0.0
        self.reason: str | None = None


class ObservedCall:
    """The requests of a call, by prompt and sample, from the moment that it was made.

    Times are the engine's own: those at which pieces were made, whenever somebody took them.
    """

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics, self._start_s = metrics, time.monotonic()
        self._requests: dict[tuple[int, int], ObservedRequest] = {}

    def see(self, piece: Response) -> None:
        """Counts a piece as it goes by. (For a token alone, this is most of what watching costs.)"""
        key = piece.index, piece.sample_index
        request = self._requests.get(key)
        if request is None:
            request = self._requests[key] = ObservedRequest(piece)
            if piece.started_s is not None:
                self._metrics.queue.observe(self._since_start(piece.started_s))
        if piece.token_ids:
            self._metrics.num_tokens += piece.num_generated_tokens - request.num_tokens
            if not request.num_tokens and piece.first_token_s is not None:
                request.first_token_s = piece.first_token_s
                self._metrics.first_token.observe(self._since_start(piece.first_token_s))
            request.last_token_s, request.num_tokens = piece.made_s, piece.num_generated_tokens
        if piece.finish_reason is not None:
            self._finish(request, piece, piece.finish_reason)

    def _since_start(self, moment_s: float) -> float:
        return max(0.0, moment_s - self._start_s)

    def _finish(self, request: ObservedRequest, piece: Response, reason: str) -> None:
        request.reason = reason
        self._metrics.finished.labels(reason).inc()
        self._metrics.duration.observe(self._since_start(piece.made_s))
        if request.num_tokens > 1:
            between_s = request.last_token_s - request.first_token_s
            self._metrics.per_token.observe(between_s / (request.num_tokens - 1))

    def refuse(self, error: str) -> None:
        """The engine did not take the call, or its source failed."""
        if not self._requests:
            self._metrics.refused.labels(error).inc()

    def end(self, call_id: str, user: str | None, outcome: str) -> None:
        """Nothing more comes: logs the call. (The engine counts what was cancelled: some of it gave no piece.)"""
        requests = self._requests.values()
        num_generated = sum(request.num_tokens for request in requests)
        first_s = min((r.first_token_s for r in requests if r.num_tokens), default=None)
        log_event(
            "generation",
            id=call_id,
            user=user,
            outcome=outcome,
            finish_reasons=",".join(sorted(r.reason for r in requests if r.reason is not None)) or None,
            num_prompt_tokens=sum(request.num_prompt for request in requests),
            num_cached_tokens=sum(request.num_cached for request in requests),
            num_generated_tokens=num_generated,
            time_to_first_token_s=None if first_s is None else round(first_s - self._start_s, 4),
            duration_s=round(time.monotonic() - self._start_s, 4),
        )
