"""Who holds a slot and pages, and who waits for them: slots and pages change hands here and nowhere else."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from itertools import takewhile

from turbojax.engine.block_pool import BlockPool
from turbojax.engine.metrics import EngineMetrics
from turbojax.engine.prefix_cache import Match, PrefixCache
from turbojax.engine.request import Request, Status
from turbojax.engine.waiting import WaitingQueue


class Roster:
    """Requests with a slot (`running`, oldest first) and without (`waiting`, in order of their turn).

    `unfinished` are those of the running whose last chunk is not committed, oldest first.
    """

    def __init__(self, num_slots: int, pool: BlockPool, cache: PrefixCache, metrics: EngineMetrics) -> None:
        self.pool, self.cache, self.num_slots, self.metrics = pool, cache, num_slots, metrics
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.unfinished: dict[Request, None] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._dirty_pages: list[int] = []  # free
        self._suspect_pages: set[int] = set()  # dirty once nobody holds them any more

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def admit(self, request: Request, match: Match, suspect: Request | None) -> bool:
        """Gives a waiting request a slot and pages, of which it shares those of the match; False if there are too few.

        For a suspect, the newest running requests give way.
        """
        pool, num_shared = self.pool, len(match.page_ids)
        pool.share(match.page_ids)
        num_pages = pool.pages_for(request.num_tokens)
        # One page more than its tokens need, so that it does not give way at its first decode step.
        num_wanted = min(num_pages + 1, pool.pages_for(request.max_len))
        new = pool.allocate(num_pages - num_shared) if self._make_room(num_wanted - num_shared, suspect) else None
        if new is None:
            pool.release(reversed(match.page_ids))
            return False
        self.waiting.admit(request)
        self._count(request, match)
        request.status, request.page_ids, request.slot = Status.RUNNING, match.page_ids + new, self._free_slots.pop()
        request.num_prefilled_tokens = request.num_committed_tokens = match.num_tokens
        request.num_planned_tokens = request.num_prefill_tokens = request.num_tokens
        request.num_held_tokens = num_pages * pool.page_len
        self.cache.place(request, match)
        self.running.append(request)
        self.unfinished[request] = None
        return True

    def _count(self, request: Request, match: Match) -> None:
        if request.started_s is None:
            request.started_s = time.monotonic()
            request.num_cached_tokens = match.num_tokens
            self.metrics.num_prompt_tokens += len(request.prompt_ids)
            self.metrics.num_cached_tokens += match.num_tokens

    def take_pages(self, needy: Request, num_pages: int, suspect: Request | None) -> list[int] | None:
        """Pages that nobody holds, or those of the newest running requests behind `needy`, which give way.

        All others stand behind a suspect: they do not run while it does.
        """
        while (page_ids := self.pool.allocate(num_pages)) is None:
            behind = takewhile(lambda r: r is not needy or r is suspect, reversed(self.running))
            if not self.give_way(r for r in behind if r is not needy):
                return None
        return page_ids

    def _make_room(self, num_pages: int, suspect: Request | None) -> bool:
        """Whether so many pages are there for a newcomer; for a suspect, the newest running requests give way."""
        while self.pool.num_available_pages() < num_pages:
            if suspect is None or not self.give_way(reversed(self.running)):
                return False
        return True

    def give_way(self, candidates: Iterable[Request]) -> bool:
        """Lets the first that runs yield its slot and pages; False if none can, or if one is under way to it."""
        victim = next((r for r in candidates if r.status is Status.RUNNING), None)
        if victim is None or any(r.status is Status.YIELDING for r in self.running):
            return False  # pages are on their way: no second one needs to give way
        victim.status = Status.YIELDING
        self.metrics.num_preemptions += 1
        self.settle(victim)
        return True

    def settle(self, request: Request) -> None:
        """Frees slot and pages of a request that gives them up, once no step in flight names it."""
        if request.num_steps_in_flight or request.status not in (Status.RETIRING, Status.YIELDING):
            return
        self._give_up_pages(request)
        self._free_slots.append(request.slot)
        self.running.remove(request)
        self.unfinished.pop(request, None)
        request.slot = -1
        if request.status is Status.RETIRING:
            request.status = Status.FINISHED
        else:
            request.status = Status.WAITING
            self.waiting.put_back(request)

    def distrust(self, request: Request) -> None:
        """Some page that a request computed holds numbers that are not finite: nobody finds its pages any more."""
        request.is_dirty = True
        self._suspect_pages.update(request.page_ids[request.trail.num_shared_pages :])
        self.cache.forget(request)

    def _give_up_pages(self, request: Request) -> None:
        """The last page goes first: what hangs on a page in the cache is idle for longer than the page."""
        if not request.is_dirty:
            self.cache.leave(request)
        page_ids, request.page_ids = request.page_ids[::-1], []
        self.pool.release(page_ids)
        if self._suspect_pages:
            dirty = [p for p in page_ids if p in self._suspect_pages and not self.pool.num_references(p)]
            self._dirty_pages += dirty
            self._suspect_pages.difference_update(dirty)

    def vacate(self) -> None:
        """All state on the device is lost: everyone who holds a slot gives it up at once, to run or to end later."""
        for request in reversed(list(self.running)):  # each goes to the head of its priority
            request.num_steps_in_flight = 0
            if request.status is Status.RUNNING:
                request.status = Status.YIELDING
            self.settle(request)
        self.cache.clear()
        self._dirty_pages.clear()  # a fresh pool is clean
        self._suspect_pages.clear()

    def take_dirty_pages(self) -> tuple[int, ...]:
        """Free pages that must be zeroed before anybody writes to them; the caller sees to it."""
        dirty, self._dirty_pages = tuple(self._dirty_pages), []
        return dirty

    def check_integrity(self) -> None:
        """Pages are held as often as they are counted, slots once; nothing is lost."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        held = Counter(page for r in self.running for page in r.page_ids)
        assert all(self.pool.num_references(page) == number for page, number in held.items()), "pages are miscounted"
        num_held = self.pool.num_usable_pages - self.pool.num_available_pages()
        assert len(held) == num_held, "pages have no owner"
        assert all(len(set(r.page_ids)) == len(r.page_ids) for r in self.running), "a request holds a page twice"
        slots = [r.slot for r in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.num_slots)), "slots are lost or doubled"
        self.waiting.check()
        for request in (*self.running, *self.waiting):
            request.check()
