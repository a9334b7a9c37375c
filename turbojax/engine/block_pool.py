"""The pages of the KV pool: who holds them, how often, which are kept for their content, and which are free."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable


class BlockPool:
    """Fixed pages with reference counts. Page 0 is the device's sink and is never handed out.

    A page is free, held (it has references), or idle: nobody holds it, but it is kept for what it contains. Free pages
    are handed out first, then idle ones, the one that has been idle for longest first.

    Attributes:
        num_pages: pages of the pool, the sink included.
        page_len: tokens of a page.
        num_groups: page groups; the pages of one sequence are kept apart for each (one group today).
        evict: is told an idle page and its group before the page is handed out, and must `drop` it.
    """

    def __init__(self, num_pages: int, page_len: int, num_groups: int = 1) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; at least 2 are needed, the sink and one to use")
        self.num_pages, self.page_len, self.num_groups = num_pages, page_len, num_groups
        self.evict: Callable[[int, int], None] = self.drop
        self._free = [deque(range(1, num_pages)) for _ in range(num_groups)]
        self._references = [[0] * num_pages for _ in range(num_groups)]
        self._kept: list[set[int]] = [set() for _ in range(num_groups)]
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_groups)]

    def num_free_pages(self, group: int = 0) -> int:
        """Pages that nobody holds and that are not kept."""
        return len(self._free[group])

    def num_available_pages(self, group: int = 0) -> int:
        """Pages that `allocate` could hand out: free and idle."""
        return len(self._free[group]) + len(self._idle[group])

    @property
    def num_usable_pages(self) -> int:
        """Pages that sequences can hold, of each group."""
        return self.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_len)

    def num_references(self, page: int, group: int = 0) -> int:
        return self._references[group][page]

    # -- holding ------------------------------------------------------------------------------------------

    def allocate(self, num_pages: int, group: int = 0) -> list[int] | None:
        """Takes pages, each with one reference; None, and nothing taken, if there are too few."""
        free, idle = self._free[group], self._idle[group]
        if num_pages > len(free) + len(idle):
            return None
        while num_pages > len(free):
            self.evict(next(iter(idle)), group)
        page_ids = [free.popleft() for _ in range(num_pages)]
        for page in page_ids:
            self._references[group][page] = 1
        return page_ids

    def share(self, page_ids: Iterable[int], group: int = 0) -> None:
        """Adds a reference to pages that are held or idle."""
        references, idle = self._references[group], self._idle[group]
        for page in page_ids:
            if references[page] == 0:
                assert page in idle, f"page {page} is free and cannot be shared"
                del idle[page]
            references[page] += 1

    def release(self, page_ids: Iterable[int], group: int = 0) -> None:
        """Drops a reference of each page; without any it is idle, if it is kept, or free."""
        references, kept = self._references[group], self._kept[group]
        for page in page_ids:
            assert references[page] > 0, f"page {page} is released twice"
            references[page] -= 1
            if references[page] == 0:
                if page in kept:
                    self._idle[group][page] = None
                else:
                    self._free[group].append(page)

    # -- keeping ------------------------------------------------------------------------------------------

    def keep(self, page: int, group: int = 0) -> None:
        """A held page is worth keeping once nobody holds it any more."""
        assert self._references[group][page] > 0, f"page {page} is not held"
        self._kept[group].add(page)

    def drop(self, page: int, group: int = 0) -> None:
        """What a kept page contains is not wanted any more."""
        self._kept[group].remove(page)
        if self._references[group][page] == 0:
            del self._idle[group][page]
            self._free[group].append(page)

    def kept_pages(self, group: int = 0) -> set[int]:
        return self._kept[group]

    def check_integrity(self, group: int = 0) -> None:
        """Free, idle and held pages are all pages, and no page is two of these."""
        free, idle, kept = self._free[group], self._idle[group], self._kept[group]
        references = self._references[group]
        assert references[0] == 0, "the sink is never held"
        assert len(set(free)) == len(free), "a page is free twice"
        held = {page for page, count in enumerate(references) if count > 0}
        assert held.isdisjoint(free), f"pages {held & set(free)} are free and held"
        assert held.isdisjoint(idle), f"pages {held & set(idle)} are idle and held"
        assert kept.isdisjoint(free), f"pages {kept & set(free)} are free and kept"
        assert kept.issuperset(idle), f"pages {set(idle) - kept} are idle and not kept"
        assert len(held) + len(free) + len(idle) == self.num_usable_pages, "pages are lost"
