"""What of prompts a step computes: chunks of running requests, then those of newcomers behind what the cache has."""

from __future__ import annotations

from dataclasses import dataclass, field

from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.plan import PageCopy, PrefillChunk, SlotJoin
from turbojax.engine.prefix_cache import Match
from turbojax.engine.request import Request, Status
from turbojax.engine.roster import Roster

# Requests that are passed over in a step since another one computes their beginning just then. Each is looked at in
# every step, and no more than `max_chunks` can join at once anyway.
MAX_PASSED_OVER = 16


@dataclass
class Prefills:
    """The part of a plan that computes prompts.

    Attributes:
        most_of_one, most: tokens of a chunk that is the only one, and of several together.
    """

    most_of_one: int
    most: int
    num_tokens: int = 0
    chunks: list[PrefillChunk] = field(default_factory=list)
    joins: list[SlotJoin] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)

    @property
    def budget(self) -> int:
        """Tokens that the next chunk can have."""
        return max(0, self.most - self.num_tokens) if self.chunks else self.most_of_one

    def add(self, chunk: PrefillChunk) -> None:
        self.chunks.append(chunk)
        self.num_tokens += len(chunk.token_ids)


class PrefillPlanner:
    """Plans chunks within one token budget."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config, self._roster, self._page_len = config, roster, roster.pool.page_len

    def plan(self, prefilling: list[Request], suspect: Request | None, num_decoding: int) -> Prefills:
        """The next chunks of requests that are being prefilled, and the first ones of who can join."""
        running = [request for request in prefilling if request.status is Status.RUNNING]
        history_len = max((request.num_prefilled_tokens for request in running), default=0)
        most = self._config.most_prefill_tokens(num_decoding, history_len)
        part = Prefills(most if num_decoding else self._config.max_prefill_tokens, most)
        for request in running:
            if len(part.chunks) < self._config.max_chunks:
                self._add_chunk(part, request)
        if self._roster.waiting:
            self._admit(part, suspect)
        return part

    def _add_chunk(self, part: Prefills, request: Request) -> None:
        """As much of the rest as the budget holds; chunks other than the last end at a page edge."""
        start, end = request.num_prefilled_tokens, request.num_prefill_tokens
        if end - start > part.budget:
            end = (start + part.budget) // self._page_len * self._page_len
        if end > start:
            part.add(request.as_chunk(start, end))

    def _admit(self, part: Prefills, suspect: Request | None) -> None:
        """Gives slots and pages to waiting requests, in order, while both and the budget last; adds their chunks.

        Who begins like a request that is being prefilled waits until it can share the pages, and lets others pass.
        """
        roster, passed_over = self._roster, dict[Request, None]()
        while roster.has_free_slot and len(part.chunks) < self._config.max_chunks:
            request = self._next_waiting(suspect, passed_over)
            if request is None:
                break
            match = self._match(request, suspect)
            if match is None:
                passed_over[request] = None
                continue
            num_left = request.num_tokens - match.num_tokens
            if part.budget < min(num_left, self._page_len) or not roster.admit(request, match, suspect):
                break
            part.joins.append(request.as_join())
            if match.num_copied:
                part.copies.append(copy_of(request, match))
            self._add_chunk(part, request)

    def _match(self, request: Request, suspect: Request | None) -> Match | None:
        """What a newcomer can share; None while another request computes what it could share next."""
        cache, computing = self._roster.cache, self._roster.unfinished
        if suspect is None and cache.still_awaits(request, computing):
            return None
        match = cache.find(request)
        return None if suspect is None and cache.awaits(request, match, computing) else match

    def _next_waiting(self, suspect: Request | None, passed_over: dict[Request, None]) -> Request | None:
        """Who may be admitted now: the first in the queue that was not passed over, or the suspect alone."""
        if suspect is not None:
            return suspect if suspect.status is Status.WAITING else None
        if len(passed_over) >= MAX_PASSED_OVER:
            return None
        return next((r for r in self._roster.waiting if r not in passed_over), None)


def copy_of(request: Request, match: Match) -> PageCopy:
    """The first page of a request that it does not share begins like another one.

    That page is not held for it: whoever is given it in this step writes to it after the copy, as steps go.
    """
    return PageCopy(match.source_id, request.page_ids[len(match.page_ids)], match.num_copied)
