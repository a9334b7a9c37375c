"""The requests of one call, from their start to the last one's end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from turbojax.engine.loop import EngineLoop
from turbojax.engine.replicas import Replicas
from turbojax.engine.request import Request
from turbojax.engine.response import Response
from turbojax.prompts import is_one_prompt
from turbojax.request_builder import Prompts

Requests = Mapping[tuple[int, int], Request]
"""By index and sample index."""


class Call:
    """Requests that an engine has: whoever hears a piece of them says so, and may cancel what has not ended."""

    def __init__(self, loop: EngineLoop | Replicas, requests: Requests) -> None:
        """Hands all of them over, or none.

        Raises:
            EngineClosedError, EngineFailedError, QueueFullError: see `EngineLoop.submit`.
        """
        self._loop, self._unfinished = loop, dict(requests)
        loop.submit(*requests.values())

    @property
    def is_done(self) -> bool:
        """The last piece of every request was heard."""
        return not self._unfinished

    def hear(self, piece: Response) -> None:
        """A piece has come to whoever made the call."""
        if piece.finish_reason is not None:
            self._loop.leave(self._unfinished.pop((piece.index, piece.sample_index)))

    def cancel(self) -> None:
        """Ends what has not ended; nothing more is delivered of it, but for what is on its way. Any thread may."""
        for request in list(self._unfinished.values()):
            self._loop.cancel(request)


def in_order(prompts: Prompts, responses: Iterable[Response]) -> Response | list[Response]:
    """By prompt and sample; a Response alone where there is one prompt with one sample."""
    ordered = sorted(responses, key=lambda response: (response.index, response.sample_index))
    return ordered[0] if is_one_prompt(prompts) and len(ordered) == 1 else ordered
