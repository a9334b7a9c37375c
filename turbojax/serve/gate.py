"""Who is being answered: how many at once, and that no more come once the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from turbojax.serve.openai_errors import OVERLOADED, RETRY_AFTER_S, ApiError

# Answered whatever the load, and while the server drains: whoever watches it must still see it.
MONITORING = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
RETRY = {"Retry-After": str(RETRY_AFTER_S)}


class Visit:
    """A request that is being answered, by the task that made this.

    Attributes:
        reason: why it was cut short; None where it was not.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "requests are answered in tasks"
        self._task: asyncio.Task[object] = task
        self.reason: ApiError | None = None

    def cut(self, reason: ApiError) -> None:
        """Cancels the task, once; it tells its client the reason where it still can."""
        if self.reason is None:
            self.reason = reason
            self._task.cancel()


class Gate:
    """Lets requests in, in the server's event loop.

    Attributes:
        is_draining: no further request is let in.
    """

    def __init__(self, max_visits: int) -> None:
        self._max_visits, self._visits = max_visits, set[Visit]()
        self.is_draining = False

    @property
    def num_visits(self) -> int:
        return len(self._visits)

    @contextmanager
    def visit(self) -> Iterator[Visit]:
        """A request, while it is answered.

        Raises:
            ApiError: 503, the server drains; 429, it answers as many as it may.
        """
        if self.is_draining:
            raise shutting_down()
        if len(self._visits) >= self._max_visits:
            message = f"{len(self._visits)} requests are being answered, and no more are taken; try again later"
            raise ApiError(429, message, OVERLOADED, code="too_many_requests", headers=RETRY)
        visit = Visit()
        self._visits.add(visit)
        try:
            yield visit
        finally:
            self._visits.discard(visit)

    def cut_all(self) -> None:
        """Cuts short all that are being answered: the time to end by themselves is over."""
        for visit in list(self._visits):
            visit.cut(shutting_down())


def shutting_down() -> ApiError:
    message = "the server is shutting down; send the request to another one, or again later"
    return ApiError(503, message, OVERLOADED, code="shutting_down", headers=RETRY)
