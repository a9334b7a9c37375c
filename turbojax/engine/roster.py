"""Who holds a slot and pages, and who waits for them: slots and pages change hands here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from turbojax.engine.block_pool import BlockPool
from turbojax.engine.metrics import EngineMetrics
from turbojax.engine.request import Request, Status
from turbojax.engine.waiting import WaitingQueue


class Roster:
    """Requests with a slot (`running`, oldest first) and without (`waiting`, in order of their turn)."""

    def __init__(self, num_slots: int, pool: BlockPool, metrics: EngineMetrics) -> None:
        self.pool, self.num_slots, self.metrics = pool, num_slots, metrics
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._dirty_pages: list[int] = []

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def admit(self, request: Request, num_pages: int) -> None:
        """Gives a waiting request a slot and pages, of which there must be enough."""
        page_ids = self.pool.allocate(num_pages)
        assert page_ids is not None
        self.waiting.admit(request)
        request.status, request.page_ids, request.slot = Status.RUNNING, page_ids, self._free_slots.pop()
        request.num_prefilled_tokens, request.num_prefill_tokens = 0, request.num_tokens
        request.num_planned_tokens = request.num_tokens
        self.running.append(request)

    def take_pages(self, needy: Request, num_pages: int, suspect: Request | None) -> list[int] | None:
        """Pages from the free ones, or from the newest running requests behind `needy`, which give way.

        All others stand behind a suspect: they do not run while it does.
        """
        while (page_ids := self.pool.allocate(num_pages)) is None:
            behind = takewhile(lambda r: r is not needy or r is suspect, reversed(self.running))
            if not self.give_way(r for r in behind if r is not needy):
                return None
        return page_ids

    def make_room(self, num_pages: int, suspect: Request | None) -> bool:
        """Whether so many pages are free for a newcomer; for a suspect, the newest running requests give way."""
        while self.pool.num_free_pages() < num_pages:
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
        self.pool.release(request.page_ids)
        if request.is_dirty:
            self._dirty_pages += request.page_ids
        self._free_slots.append(request.slot)
        self.running.remove(request)
        request.page_ids, request.slot = [], -1
        if request.status is Status.RETIRING:
            request.status = Status.FINISHED
        else:
            request.status = Status.WAITING
            self.waiting.put_back(request)

    def vacate(self) -> None:
        """All state on the device is lost: everyone who holds a slot gives it up at once, to run or to end later."""
        for request in reversed(list(self.running)):  # each goes to the head of its priority
            request.num_steps_in_flight = 0
            if request.status is Status.RUNNING:
                request.status = Status.YIELDING
            self.settle(request)
        self._dirty_pages.clear()  # a fresh pool is clean

    def take_dirty_pages(self) -> tuple[int, ...]:
        """Freed pages that must be zeroed before anybody writes to them; the caller sees to it."""
        dirty, self._dirty_pages = tuple(self._dirty_pages), []
        return dirty

    def check_integrity(self) -> None:
        """Pages and slots are each held once or free; nothing is lost."""
        self.pool.check_integrity()
        held = [page for r in self.running for page in r.page_ids]
        assert len(set(held)) == len(held), "two requests hold one page"
        assert len(held) == self.pool.num_usable_pages - self.pool.num_free_pages(), "pages have no owner"
        slots = [r.slot for r in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.num_slots)), "slots are lost or doubled"
        self.waiting.check()
        for request in (*self.running, *self.waiting):
            request.check()
