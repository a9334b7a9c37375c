"""How requests end, each exactly once: a stop, its length, an error, a time-out, or nobody wants it any more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from turbojax.engine.metrics import EngineMetrics
from turbojax.engine.plan import RowOutputs
from turbojax.engine.request import Progress, Request, Status
from turbojax.engine.roster import Roster
from turbojax.engine.wants import cut
from turbojax.errors import GuideError, NumericsError, RequestTimeoutError

ALIVE = (Status.RUNNING, Status.YIELDING)
# Deadlines of ended requests stay until they are due, or until more than this and than half of all are such.
MAX_STALE_DEADLINES = 64

log = logging.getLogger(__name__)


class Endings:
    """Takes in what concerns the end of a request; slot and pages of one that has a slot are settled by the caller.

    Attributes:
        on_end: hears of every request as it ends, before its sink does where the engine ends it.
        explain: says where a request's numbers stop being finite.
    """

    def __init__(self, roster: Roster, metrics: EngineMetrics) -> None:
        self._roster, self._metrics = roster, metrics
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap by deadline_s
        self._max_deadlines = MAX_STALE_DEADLINES
        self.on_end: Callable[[Request], object] = lambda request: None
        self.explain: Callable[[Request], str] | None = None

    def take_rows(self, request: Request, start: int, rows: RowOutputs, num_rows: int) -> None:
        """Gives a request what it wants of `num_rows` rows of its prompt, from position `start` on, once."""
        first = max(0, request.num_reported_rows - start)
        end = min(num_rows, len(request.prompt_ids) - 1 - start)
        if end > first:
            request.num_reported_rows = start + end
            if report(request, Progress([], prompt_outputs=cut(rows, first, end))):
                self._end(request, "stop")

    def take_tokens(self, request: Request, token_ids: list[int], outputs: RowOutputs | None = None) -> None:
        """Gives a request its next tokens, up to the one that ends it, and what it wants of them."""
        reason = None
        for i, token in enumerate(token_ids):
            if token in request.stop_token_ids:
                token_ids, reason = token_ids[: i + 1], "stop"
                break
        request.generated_ids += token_ids
        if request.guide is not None:
            try:
                request.guide.advance(token_ids)
            except GuideError as error:
                return self.fail(request, error)
            if reason is None and request.guide.is_finished:
                reason = "stop"
        if reason is None and len(request.prompt_ids) + len(request.generated_ids) >= request.max_len:
            reason = "length"
        if reason is not None:
            self._end(request, reason)
        progress = Progress(token_ids, reason, None, request.num_cached_tokens, outputs, None, request.started_s)
        if report(request, progress) and reason is None:
            self._end(request, reason := "stop")
        self._metrics.num_finished_requests += reason is not None

    def fail(self, request: Request, error: Exception) -> None:
        """Ends a request with an error."""
        self._metrics.num_failed_requests += 1
        self._end(request, "error")
        report(request, end_of(request, "error", error))

    def fail_not_finite(self, request: Request) -> None:
        """Ends a request whose logits are not finite."""
        where = "" if self.explain is None else f": {self.explain(request)}"
        num_prompt, num_new = len(request.prompt_ids), len(request.generated_ids)
        text = f"its logits are not finite behind {num_prompt} prompt tokens and {num_new} generated ones{where}"
        self.fail(request, NumericsError(f"request {request.request_id}: {text}"))

    def cancel(self, request: Request) -> None:
        """Ends a request; its sink hears nothing more."""
        if self._is_open(request):
            self._metrics.num_cancelled_requests += 1
            self._end(request, "cancelled")
        elif request.status is Status.WAITING:  # its caller was interrupted before it was handed over
            request.status, request.finish_reason = Status.FINISHED, "cancelled"

    def _is_open(self, request: Request) -> bool:
        return request.status in ALIVE or (request.status is Status.WAITING and request in self._roster.waiting)

    def _end(self, request: Request, reason: str) -> None:
        if request.status is Status.WAITING:
            if request in self._roster.waiting:
                self._roster.waiting.remove(request)
            request.status = Status.FINISHED
        else:
            request.status = Status.RETIRING
        request.finish_reason = reason
        self.on_end(request)

    # -- time-outs ----------------------------------------------------------------------------------------

    def watch(self, request: Request) -> None:
        """Keeps a request's deadline, if it has one."""
        if request.deadline_s is None:
            return
        if len(self._deadlines) >= self._max_deadlines:
            self._deadlines = [entry for entry in self._deadlines if self._is_open(entry[2])]
            heapify(self._deadlines)
            self._max_deadlines = max(MAX_STALE_DEADLINES, 2 * len(self._deadlines))
        heappush(self._deadlines, (request.deadline_s, request.request_id, request))

    def expire(self, now_s: float) -> list[Request]:
        """Ends the requests whose time is over, wherever they stand, and returns them."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = heappop(self._deadlines)[2]
            if self._is_open(request):
                where = "ran" if request.status in ALIVE else "waited"
                text = f"its time was over while it {where}, after {len(request.generated_ids)} generated tokens"
                self._metrics.num_timed_out_requests += 1
                self._end(request, "timeout")
                error = RequestTimeoutError(f"request {request.request_id}: {text}")
                report(request, end_of(request, "timeout", error))
                ended.append(request)
        return ended


def end_of(request: Request, reason: str, error: Exception) -> Progress:
    """The last progress of a request that ends without a token."""
    return Progress([], reason, error, request.num_cached_tokens, started_s=request.started_s)


def report(request: Request, progress: Progress) -> bool:
    """Whether the sink wants the request to end; one that raises ends its own request, not the engine."""
    try:
        return request.sink(progress)
    except Exception:
        log.exception("the sink of request %d failed", request.request_id)
        return True
