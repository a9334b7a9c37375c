"""The pages of the KV pool: who holds them, how often, and which are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Fixed pages with reference counts. Page 0 is the device's sink and is never handed out.

    Attributes:
        num_pages: pages of the pool, the sink included.
        page_len: tokens of a page.
        num_groups: page groups; the pages of one sequence are kept apart for each (one group today).
    """

    def __init__(self, num_pages: int, page_len: int, num_groups: int = 1) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; at least 2 are needed, the sink and one to use")
        self.num_pages, self.page_len, self.num_groups = num_pages, page_len, num_groups
        self._free = [deque(range(1, num_pages)) for _ in range(num_groups)]
        self._references = [[0] * num_pages for _ in range(num_groups)]

    def num_free_pages(self, group: int = 0) -> int:
        return len(self._free[group])

    @property
    def num_usable_pages(self) -> int:
        """Pages that sequences can hold, of each group."""
        return self.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_len)

    def allocate(self, num_pages: int, group: int = 0) -> list[int] | None:
        """Takes pages, each with one reference; None, and nothing taken, if there are too few."""
        free = self._free[group]
        if num_pages > len(free):
            return None
        page_ids = [free.popleft() for _ in range(num_pages)]
        for page in page_ids:
            self._references[group][page] = 1
        return page_ids

    def share(self, page_ids: Iterable[int], group: int = 0) -> None:
        """Adds a reference to pages that are held."""
        for page in page_ids:
            assert self._references[group][page] > 0, f"page {page} is free and cannot be shared"
            self._references[group][page] += 1

    def release(self, page_ids: Iterable[int], group: int = 0) -> None:
        """Drops a reference of each page; the last one frees it."""
        references = self._references[group]
        for page in page_ids:
            assert references[page] > 0, f"page {page} is released twice"
            references[page] -= 1
            if references[page] == 0:
                self._free[group].append(page)

    def check_integrity(self) -> None:
        """Free and held pages are all pages, and no page is both."""
        for free, references in zip(self._free, self._references, strict=True):
            assert references[0] == 0, "the sink is never held"
            assert len(set(free)) == len(free), "a page is free twice"
            held = {page for page, count in enumerate(references) if count > 0}
            assert held.isdisjoint(free), f"pages {held & set(free)} are free and held"
            assert len(held) + len(free) == self.num_usable_pages, "pages are lost"
