"""Several engines behind one door: each request runs on the one that has the fewest."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

from turbojax.engine.loop import EngineLoop
from turbojax.engine.metrics import EngineStatus
from turbojax.engine.request import Request
from turbojax.errors import TurbojaxError


class Replicas:
    """What an EngineLoop is for one engine. The engines share nothing: no pool, no prefix cache, no step.

    One that has failed gets no more requests; the others go on.
    """

    def __init__(self, loops: Sequence[EngineLoop]) -> None:
        self._loops = tuple(loops)
        self._lock = threading.Lock()  # rooms that were looked at stay free until the requests are there

    def submit(self, *requests: Request) -> None:
        """Hands over requests, all of them or none; see `EngineLoop.submit`."""
        with self._lock:
            shares = self._shares(requests)
            for loop, share in shares.items():
                loop.check_room(len(share))
            for loop, share in shares.items():
                try:
                    loop.submit(*share)
                except TurbojaxError:
                    for request in requests:
                        self.cancel(request)
                    raise

    def _shares(self, requests: Sequence[Request]) -> dict[EngineLoop, list[Request]]:
        """Who runs what: one after the other, where the fewest are."""
        able = [loop for loop in self._loops if loop.status.failure is None] or self._loops[:1]
        num_open, shares = [loop.num_open for loop in able], dict[EngineLoop, list[Request]]()
        for request in requests:
            fewest = min(range(len(able)), key=num_open.__getitem__)
            num_open[fewest] += 1
            shares.setdefault(able[fewest], []).append(request)
        return shares

    def leave(self, request: Request) -> None:
        """See `EngineLoop.leave`."""
        for loop in self._loops:
            loop.leave(request)

    def cancel(self, request: Request) -> None:
        """See `EngineLoop.cancel`."""
        for loop in self._loops:
            if loop.has(request):
                loop.cancel(request)

    @property
    def status(self) -> EngineStatus:
        """How the engines stand together. `failure` is there only where none of them is left."""
        found = [loop.status for loop in self._loops]
        able = [status for status in found if status.failure is None]
        return functools.reduce(EngineStatus.beside, able or found)

    def fail(self, reason: TurbojaxError) -> None:
        """See `EngineLoop.fail`."""
        for loop in self._loops:
            loop.fail(reason)

    def close(self) -> None:
        """Closes all of them."""
        for loop in self._loops:
            loop.close()
