"""Several engines behind one door: a request runs where its beginning is cached, or where the fewest are."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence

from turbojax.engine.affinity import BLOCK_BYTES, MAX_BLOCKS, PrefixTable, block_hashes
from turbojax.engine.loop import EngineLoop
from turbojax.engine.metrics import EngineStatus
from turbojax.engine.page_trie import TOKEN_BYTES, key_of
from turbojax.engine.request import Request
from turbojax.errors import TurbojaxError

BLOCK_LEN = BLOCK_BYTES // TOKEN_BYTES


class Replicas:
    """What an EngineLoop is for one engine. The engines share nothing: no pool, no prefix cache, no step.

    A request goes to the one that was given most of its beginning, whose prefix cache should hold it, unless that has
    much more to do than another (`PrefixTable.find`), or no free slot where another has one. Which pages it finds there
    is the engine's affair; what this door remembers is as much as the pools hold.

    One that has failed gets no more requests; the others go on.
    """

    def __init__(self, loops: Sequence[EngineLoop]) -> None:
        self._loops = tuple(loops)
        self._num_blocks = sum(loop.num_cacheable_tokens for loop in loops) // BLOCK_LEN
        self._prefixes = PrefixTable[EngineLoop](self._num_blocks)
        # Rooms that were looked at stay free until the requests are there; the table is one thread's at a time.
        self._lock = threading.Lock()

    def submit(self, *requests: Request) -> None:
        """Hands over requests, all of them or none; see `EngineLoop.submit`."""
        blocks = [self._blocks(request) for request in requests]
        with self._lock:
            shares = self._shares(requests, blocks)
            for loop, share in shares.items():
                loop.check_room(len(share))
            for loop, share in shares.items():
                try:
                    loop.submit(*share)
                except TurbojaxError:
                    for request in requests:
                        self.cancel(request)
                    raise

    def _blocks(self, request: Request) -> tuple[int, ...]:
        """What tells where the beginning of its prompt is."""
        if not self._num_blocks or not request.reads_cache:
            return ()
        return block_hashes(repr(request.cache_salt), key_of(request.prompt_ids[: MAX_BLOCKS * BLOCK_LEN]))

    def _shares(
        self, requests: Sequence[Request], blocks: Sequence[tuple[int, ...]]
    ) -> dict[EngineLoop, list[Request]]:
        """Who runs what, one request after the other."""
        able = [loop for loop in self._loops if loop.status.failure is None] or self._loops[:1]
        num_open, shares = {loop: loop.num_open for loop in able}, dict[EngineLoop, list[Request]]()
        for request, hashes in zip(requests, blocks, strict=True):
            chosen = self._choose(num_open, hashes)
            num_open[chosen] += 1
            shares.setdefault(chosen, []).append(request)
        return shares

    def _choose(self, num_open: Mapping[EngineLoop, int], hashes: tuple[int, ...]) -> EngineLoop:
        """Among those with a free slot, or with room in their queue where there are none."""
        free = {loop: num for loop, num in num_open.items() if num < loop.num_slots}
        ready = free or {loop: num for loop, num in num_open.items() if num < loop.max_open} or num_open
        known = self._prefixes.find(hashes, ready)
        chosen = min(ready, key=ready.__getitem__) if known is None else known
        self._prefixes.put(hashes, chosen)
        return chosen

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
