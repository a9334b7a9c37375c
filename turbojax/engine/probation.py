"""Who made a step fail: its requests run alone, one after the other, until each failed again or is past the place."""

from __future__ import annotations

from turbojax.engine.request import Request, Status


class Probation:
    """The requests of a failed step, in the order in which they are tried.

    A request is past the place of the failure once it is longer than the steps that were lost would have made it.
    """

    def __init__(self) -> None:
        self._pass_len: dict[Request, int] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self._pass_len

    def suspect(self) -> Request | None:
        """Who must run alone now; None while nobody is suspected."""
        for request in list(self._pass_len):
            if request.status not in (Status.RETIRING, Status.FINISHED):
                return request
            del self._pass_len[request]
        return None

    def put(self, request: Request) -> None:
        """Suspects a request that still has its slot."""
        self._pass_len[request] = max(request.num_planned_tokens, request.num_tokens) + 1

    def review(self, request: Request) -> None:
        """Clears a request that has come past the place where it failed."""
        pass_len = self._pass_len.get(request)
        if pass_len is not None and request.num_tokens >= pass_len:
            del self._pass_len[request]
