"""Who runs next: a persistent batch over fixed slots, planned one step ahead of the tokens it depends on.

    plan() -> StepPlan      may be called before the step before has been committed
    commit(plan, result)    takes in a step's tokens and frees what ended

Lengths move on when a step is planned, so the next one can be planned without its tokens. A slot that stops on the
device yields fewer tokens than planned; the host learns it at commit. A slot and its pages are freed only when its
request is retiring (or yielding) and no step in flight names it.

A step that failed took the pool with it: `recover` turns every running request back into token ids, to be recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import numpy as np

from turbojax.engine.block_pool import BlockPool
from turbojax.engine.endings import ALIVE, Endings
from turbojax.engine.guides import any_token
from turbojax.engine.limits import SchedulerConfig, check_prompt
from turbojax.engine.metrics import EngineMetrics
from turbojax.engine.plan import PageGrant, PrefillChunk, StepPlan, StepResult
from turbojax.engine.prefilling import PrefillPlanner
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.probation import Probation
from turbojax.engine.request import Request, Status
from turbojax.engine.roster import Roster
from turbojax.errors import GuideError


class Scheduler:
    """First come, first served in a priority. When pages run out, the newest running request is recomputed later."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        metrics: EngineMetrics | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        """Without a cache, no request reads what another has computed."""
        self.config, self.pool = config, pool
        self.metrics = metrics or EngineMetrics()
        self._cache = PrefixCache(pool, is_enabled=False) if cache is None else cache
        self._roster = Roster(config.num_slots, pool, self._cache, self.metrics)
        self._prefills = PrefillPlanner(config, self._roster)
        self.waiting, self.running = self._roster.waiting, self._roster.running
        self._step_ids = count()
        self._in_flight: dict[int, dict[int, Request]] = {}
        self._probation = Probation()
        self.endings = Endings(self._roster, self.metrics)

    # -- requests -----------------------------------------------------------------------------------------

    @property
    def max_len(self) -> int:
        """Most tokens of any sequence: `session_len`, or what the pool holds."""
        return min(self.config.session_len, self.pool.num_usable_pages * self.pool.page_len)

    @property
    def num_cacheable_tokens(self) -> int:
        """Most tokens that a later request may find in the pool."""
        return self.pool.num_usable_pages * self.pool.page_len if self._cache.is_enabled else 0

    def check(self, num_prompt_tokens: int, name: str) -> None:
        """Whether a prompt can run at all; reads limits only, so any thread may ask.

        Raises:
            EmptyPromptError, PromptTooLongError: it can never run; the message has the numbers.
        """
        pool_len = self.pool.num_usable_pages * self.pool.page_len
        check_prompt(num_prompt_tokens, name, self.config.session_len, pool_len)

    def add(self, request: Request) -> None:
        """Queues a request; see `check` for what it raises."""
        self.check(len(request.prompt_ids), f"request {request.request_id}")
        request.max_len = min(request.max_len, self.max_len)
        self.waiting.append(request)
        self.endings.watch(request)

    def cancel(self, request: Request) -> None:
        """Ends a request where it stands; its slot and pages go when no step in flight names them."""
        self.endings.cancel(request)
        self._roster.settle(request)

    def expire(self, now_s: float) -> None:
        """Ends the requests whose deadline, by `time.monotonic`, is over."""
        for request in self.endings.expire(now_s):
            self._roster.settle(request)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    # -- planning -----------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The next step; empty if nothing can run before a step in flight is committed.

        Decode rows come first, then chunks of running requests, then new ones; chunks share one token budget. Whoever
        gives way does so before any chunk is planned, so a plan never names a request without pages. A suspect of a
        failed step runs alone; the others keep their slots meanwhile.
        """
        suspect, unfinished = self._probation.suspect(), self._roster.unfinished
        running = Status.RUNNING  # a lookup for each request would show
        able = [r for r in self.running if r.status is running]
        if suspect is not None:
            able = [r for r in able if r is suspect]
        prefilling = [r for r in unfinished if r.num_prefilled_tokens < r.num_prefill_tokens and r in able]
        busy = prefilling or self.waiting or suspect is not None or not all(r.is_plain for r in able)
        num_steps = 1 if busy else self._steps_for(able)
        ready = [r for r in able if r.is_prefilled] if prefilling else able
        grants: list[PageGrant] = []
        decoding, num_pages = self._plan_decode(ready, num_steps, suspect, grants)
        part = self._prefills.plan(prefilling, suspect, len(decoding))
        is_empty = not decoding and not part.chunks
        plan = StepPlan(
            step_id=next(self._step_ids),
            dirty_pages=() if is_empty else self._roster.take_dirty_pages(),
            page_copies=tuple(part.copies),
            joins=tuple(part.joins),
            page_grants=tuple(grants),
            decode_slots=tuple(decoding),
            num_decode_steps=num_steps,
            max_decode_pages=num_pages,
            prefill_chunks=tuple(part.chunks),
        )
        if not is_empty:
            self._launch(plan, decoding)
        return plan

    def _steps_for(self, able: list[Request]) -> int:
        """Tokens per call while nothing waits or prefills."""
        longest = max([r.num_planned_tokens for r in able], default=0) + self.config.num_decode_steps
        return self.config.steps_for(len(able), self.pool.pages_for(longest))

    def _plan_decode(
        self, ready: list[Request], num_steps: int, suspect: Request | None, grants: list[PageGrant]
    ) -> tuple[dict[int, Request], int]:
        """Who decodes, by slot, and the most pages of any; each has pages for the tokens that the step will write.

        Who gets none sits this step out. Lengths move on at once, as if the step's tokens were in. (This loop is most
        of the time of planning a large batch.)
        """
        decoding: dict[int, Request] = {}
        running, longest = Status.RUNNING, 0
        for request in ready:  # oldest first: only requests behind, not granted yet, give way
            num_planned, max_len = request.num_planned_tokens, request.max_len
            if num_planned >= max_len or request.status is not running:
                continue  # its last token is in flight, or it gave way
            end = num_planned + num_steps
            if end > max_len:
                end = max_len
            # K and V of the newest token and of all but the last new one are written.
            if end - 1 > request.num_held_tokens and not self._grant(request, end - 1, suspect, grants):
                continue
            if request.num_held_tokens > longest:
                longest = request.num_held_tokens
            request.num_planned_tokens = end
            request.num_steps_in_flight += 1
            decoding[request.slot] = request
        return decoding, longest // self.pool.page_len

    def _grant(self, request: Request, num_tokens: int, suspect: Request | None, grants: list[PageGrant]) -> bool:
        """Gives a request the pages that it misses for so many tokens; False, and nothing given, if there are none."""
        first = len(request.page_ids)
        new = self._roster.take_pages(request, self.pool.pages_for(num_tokens) - first, suspect)
        if new is None:
            return False
        grants += [PageGrant(request.slot, first + i, page) for i, page in enumerate(new)]
        request.page_ids += new
        request.num_held_tokens = len(request.page_ids) * self.pool.page_len
        return True

    def _launch(self, plan: StepPlan, named: dict[int, Request]) -> None:
        """Moves on what chunks compute; `named` are those who decode, and who the step names in the end."""
        by_slot = {r.slot: r for r in self._roster.unfinished} if plan.prefill_chunks else {}
        for chunk in plan.prefill_chunks:
            request = named[chunk.slot] = by_slot[chunk.slot]
            request.num_prefilled_tokens += len(chunk.token_ids)
            request.num_planned_tokens += chunk.is_last
            request.num_steps_in_flight += 1
        self._in_flight[plan.step_id] = named

    def masks(self, plan: StepPlan) -> dict[int, np.ndarray]:
        """For each guided slot that samples in a step in flight, which tokens may come; who has none ends.

        The step before must be committed: guides go by the tokens that they know.
        """
        guided = [(slot, r) for slot, r in self._in_flight[plan.step_id].items() if r.guide is not None]
        waits = {chunk.slot for chunk in plan.prefill_chunks if not chunk.is_last}
        masks = {}
        for slot, request in guided:
            if slot in waits:
                continue
            assert request.guide is not None
            masks[slot] = any_token(request.guide.vocab_size)
            if request.status in ALIVE:
                try:
                    masks[slot] = request.guide.mask()
                except GuideError as error:
                    self.endings.fail(request, error)
        return masks

    # -- committing ---------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in the tokens of a step: hands them to the requests' sinks, ends those that are done."""
        self.metrics.num_steps += 1
        running = Status.RUNNING
        chunks = {chunk.slot: chunk for chunk in plan.prefill_chunks}
        for slot, request in self._in_flight.pop(plan.step_id).items():
            request.num_steps_in_flight -= 1
            token_ids = result.tokens.get(slot)
            if slot in result.prompt_outputs and request.status in ALIVE:
                chunk = chunks[slot]
                rows = result.prompt_outputs[slot]
                self.endings.take_rows(request, chunk.num_history_tokens, rows, len(chunk.token_ids))
            if token_ids and request.status in ALIVE:
                self.endings.take_tokens(request, token_ids, result.outputs.get(slot))
                self._probation.review(request)
            if slot in result.not_finite:
                self._roster.distrust(request)  # whatever ended it
                if request.status in ALIVE:
                    self.endings.fail_not_finite(request)
            elif slot in chunks:
                self._keep_chunk(request, chunks[slot])
            else:  # K and V of the newest token are not written yet
                request.num_committed_tokens = len(request.prompt_ids) + len(request.generated_ids) - 1
                if request.num_committed_tokens >= request.trail.next_len:
                    self._cache.enter(request)
            if request.status is not running:
                self._roster.settle(request)

    def _keep_chunk(self, request: Request, chunk: PrefillChunk) -> None:
        """The pages that a chunk has filled can be found from now on, with the last chunk the page behind them too."""
        request.num_committed_tokens = chunk.num_history_tokens + len(chunk.token_ids)
        self._cache.enter(request)
        if chunk.is_last:
            self._roster.unfinished.pop(request, None)
            self._cache.enter_tail(request)

    # -- failures -----------------------------------------------------------------------------------------

    def named_in(self, plan: StepPlan) -> dict[int, Request]:
        """The requests of a step in flight that still run, by slot."""
        return {slot: r for slot, r in self._in_flight[plan.step_id].items() if r.status is not Status.RETIRING}

    def on_probation(self, request: Request) -> bool:
        return request in self._probation

    def recover(self, suspects: Iterable[Request], failed: dict[Request, Exception]) -> None:
        """All state is lost: every request that holds a slot becomes token ids again and waits to be recomputed.

        `suspects` will run alone until they are past this place; `failed` are at fault and end with their errors.
        """
        for request in suspects:
            self._probation.put(request)
        self._in_flight.clear()
        for request, error in failed.items():
            self.endings.fail(request, error)
        self._roster.vacate()

    def fail_running(self, error: Exception) -> None:
        """Ends every request that holds a slot with the error; nothing may be in flight any more."""
        self.recover((), {r: error for r in self.running if r.status is not Status.RETIRING})

    def fail_all(self, error: Exception) -> None:
        """Ends every request with the error; nothing may be in flight any more."""
        self.fail_running(error)
        for request in list(self.waiting):
            self.endings.fail(request, error)

    def check_integrity(self) -> None:
        """Pages and slots are each held once or free; nothing is lost."""
        self._roster.check_integrity()
