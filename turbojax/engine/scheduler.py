"""Who runs next: a persistent batch over fixed slots, planned one step ahead of the tokens it depends on.

    plan() -> StepPlan      may be called before the step before has been committed
    commit(plan, result)    takes in a step's tokens and frees what ended

Lengths move on when a step is planned, so the next one can be planned without its tokens. A slot that stops on the
device yields fewer tokens than planned; the host learns it at commit. A slot and its pages are freed only when its
request is retiring (or yielding) and no step in flight names it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count

from turbojax.engine.block_pool import BlockPool
from turbojax.engine.plan import PageGrant, PrefillChunk, SlotJoin, StepPlan, StepResult
from turbojax.engine.request import Progress, Request, Status
from turbojax.errors import EmptyPromptError, PromptTooLongError


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        num_slots: sequences that run at once.
        session_len: most tokens of a sequence.
        max_prefill_tokens: prompt tokens of one step, all chunks together; decode rows come on top.
        max_chunks: prefill chunks of one step.
        num_decode_steps: tokens per call while nothing waits or prefills.
    """

    num_slots: int
    session_len: int
    max_prefill_tokens: int
    max_chunks: int
    num_decode_steps: int = 1


class Scheduler:
    """First come, first served. When pages run out, the newest running request gives way and is recomputed later."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config, self.pool = config, pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # all that hold a slot, oldest first
        self._free_slots = list(range(config.num_slots - 1, -1, -1))
        self._step_ids = count()
        self._in_flight: dict[int, dict[int, Request]] = {}

    # -- requests -----------------------------------------------------------------------------------------

    @property
    def max_len(self) -> int:
        """Most tokens of any sequence: `session_len`, or what the pool holds."""
        return min(self.config.session_len, self.pool.num_usable_pages * self.pool.page_len)

    def check(self, num_prompt_tokens: int, name: str) -> None:
        """Whether a prompt can run at all; reads limits only, so any thread may ask.

        Raises:
            EmptyPromptError, PromptTooLongError: it can never run; the message has the numbers.
        """
        if num_prompt_tokens == 0:
            raise EmptyPromptError(f"{name}: the prompt has no tokens")
        if num_prompt_tokens + 1 > self.max_len:
            pool_len = self.pool.num_usable_pages * self.pool.page_len
            raise PromptTooLongError(
                f"{name}: {num_prompt_tokens} prompt tokens and one to generate exceed {self.max_len} "
                f"(session_len {self.config.session_len}, KV pool {pool_len} tokens); shorten it or raise them"
            )

    def add(self, request: Request) -> None:
        """Queues a request; see `check` for what it raises."""
        self.check(len(request.prompt_ids), f"request {request.request_id}")
        request.max_len = min(request.max_len, self.max_len)
        self.waiting.append(request)

    def cancel(self, request: Request, reason: str = "cancelled") -> None:
        """Ends a request where it stands; its slot and pages go when no step in flight names them."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
            request.status, request.finish_reason = Status.FINISHED, reason
        elif request.status in (Status.RUNNING, Status.YIELDING):
            request.status, request.finish_reason = Status.RETIRING, reason
            self._settle(request)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    # -- planning -----------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The next step; empty if nothing can run before a step in flight is committed.

        Decode rows come first, then chunks of running requests, then new ones; chunks share one token budget. Whoever
        gives way does so before any chunk is planned, so a plan never names a request without pages.
        """
        prefilling = any(r.status is Status.RUNNING and not r.is_prefilled for r in self.running)
        num_steps = 1 if prefilling or self.waiting else self.config.num_decode_steps
        grants, decoding = self._plan_decode(num_steps)
        chunks, budget = self._plan_running_chunks(self.config.max_prefill_tokens)
        joins = self._plan_admissions(chunks, budget)
        plan = StepPlan(
            step_id=next(self._step_ids),
            joins=tuple(joins),
            page_grants=tuple(grants),
            decode_slots=tuple(r.slot for r in decoding),
            num_decode_steps=num_steps,
            prefill_chunks=tuple(chunks),
        )
        self._launch(plan, decoding)
        return plan

    def _plan_decode(self, num_steps: int) -> tuple[list[PageGrant], list[Request]]:
        """Who decodes, with pages for the tokens that the step will write; who gets none sits this step out."""
        grants: list[PageGrant] = []
        decoding: list[Request] = []
        for request in list(self.running):  # oldest first: only requests behind, not granted yet, give way
            if request.status is not Status.RUNNING or not request.is_prefilled:
                continue
            if request.num_planned_tokens >= request.max_len:
                continue  # its last token is in flight
            # K and V of the newest token and of all but the last new one are written.
            num_written = min(request.num_planned_tokens + num_steps - 1, request.max_len)
            missing = self.pool.pages_for(num_written) - len(request.page_ids)
            new = self._take_pages(request, missing) if missing > 0 else []
            if new is None:
                continue
            first = len(request.page_ids)
            grants += [PageGrant(request.slot, first + i, page) for i, page in enumerate(new)]
            request.page_ids += new
            decoding.append(request)
        return grants, decoding

    def _take_pages(self, needy: Request, num_pages: int) -> list[int] | None:
        """Pages from the free ones, or from the newest running requests behind `needy`, which give way."""
        while (page_ids := self.pool.allocate(num_pages)) is None:
            victim = next((r for r in reversed(self.running) if r is needy or r.status is Status.RUNNING), needy)
            yielding = any(r.status is Status.YIELDING for r in self.running)
            if victim is needy or yielding:
                return None  # pages are on their way: no second one needs to give way
            victim.status = Status.YIELDING
            self._settle(victim)
        return page_ids

    def _plan_running_chunks(self, budget: int) -> tuple[list[PrefillChunk], int]:
        """The next chunk of every request that is still being prefilled, and the budget that is left."""
        chunks: list[PrefillChunk] = []
        for request in self.running:
            if request.status is not Status.RUNNING or request.is_prefilled or len(chunks) == self.config.max_chunks:
                continue
            chunk = self._next_chunk(request, budget)
            if chunk is not None:
                chunks.append(chunk)
                budget -= len(chunk.token_ids)
        return chunks, budget

    def _next_chunk(self, request: Request, budget: int) -> PrefillChunk | None:
        """As much of the rest as the budget holds; chunks other than the last end at a page edge."""
        start, end = request.num_prefilled_tokens, request.num_prefill_tokens
        if end - start > budget:
            end = (start + budget) // self.pool.page_len * self.pool.page_len
        if end <= start:
            return None
        is_last = end == request.num_prefill_tokens
        return PrefillChunk(request.slot, request.token_ids(start, end), start, is_last)

    def _plan_admissions(self, chunks: list[PrefillChunk], budget: int) -> list[SlotJoin]:
        """Gives slots and pages to waiting requests, in order, while both and the budget last; adds their chunks."""
        joins: list[SlotJoin] = []
        while self.waiting and self._free_slots and len(chunks) < self.config.max_chunks:
            request = self.waiting[0]
            if budget < min(request.num_tokens, self.pool.page_len):
                break
            # One page more than its tokens need, so that it does not give way at its first decode step.
            num_pages = self.pool.pages_for(request.num_tokens)
            if self.pool.num_free_pages() < min(num_pages + 1, self.pool.pages_for(request.max_len)):
                break
            self.waiting.popleft()
            self._admit(request, num_pages)
            joins.append(self._join_of(request))
            chunk = self._next_chunk(request, budget)
            if chunk is not None:
                chunks.append(chunk)
                budget -= len(chunk.token_ids)
        return joins

    def _admit(self, request: Request, num_pages: int) -> None:
        page_ids = self.pool.allocate(num_pages)
        assert page_ids is not None
        request.status, request.page_ids, request.slot = Status.RUNNING, page_ids, self._free_slots.pop()
        request.num_prefilled_tokens, request.num_prefill_tokens = 0, request.num_tokens
        request.num_planned_tokens = request.num_tokens
        self.running.append(request)

    @staticmethod
    def _join_of(request: Request) -> SlotJoin:
        return SlotJoin(
            slot=request.slot,
            page_ids=(tuple(request.page_ids),),
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            max_len=request.max_len,
            min_len=request.min_len,
            admitted_len=len(request.prompt_ids),
        )

    def _launch(self, plan: StepPlan, decoding: list[Request]) -> None:
        """Moves lengths on, as if the step's tokens were in."""
        by_slot = {r.slot: r for r in self.running}
        named: dict[int, Request] = {}
        for request in decoding:
            request.num_planned_tokens = min(request.num_planned_tokens + plan.num_decode_steps, request.max_len)
            named[request.slot] = request
        for chunk in plan.prefill_chunks:
            request = by_slot[chunk.slot]
            request.num_prefilled_tokens += len(chunk.token_ids)
            request.num_planned_tokens += chunk.is_last
            named[request.slot] = request
        for request in named.values():
            request.num_steps_in_flight += 1
        if not plan.is_empty:
            self._in_flight[plan.step_id] = named

    # -- committing ---------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in the tokens of a step: hands them to the requests' sinks, ends those that are done."""
        for slot, request in self._in_flight.pop(plan.step_id).items():
            request.num_steps_in_flight -= 1
            if request.status in (Status.RUNNING, Status.YIELDING):
                self._take_tokens(request, result.tokens.get(slot, []))
            self._settle(request)

    def _take_tokens(self, request: Request, token_ids: list[int]) -> None:
        if not token_ids:
            return
        stops = [i for i, token in enumerate(token_ids) if token in request.stop_token_ids]
        token_ids = token_ids[: stops[0] + 1] if stops else token_ids
        request.generated_ids += token_ids
        if stops:
            request.finish_reason = "stop"
        elif request.num_tokens >= request.max_len:
            request.finish_reason = "length"
        stopped_by_sink = request.sink(Progress(token_ids, request.finish_reason))
        if stopped_by_sink and request.finish_reason is None:
            request.finish_reason = "stop"
        if request.finish_reason is not None:
            request.status = Status.RETIRING

    def fail_in_flight(self, error: Exception) -> list[Request]:
        """A step was lost: every request that holds a slot ends with the error."""
        failed = [r for r in self.running if r.status is not Status.RETIRING]
        self._in_flight.clear()
        for request in list(self.running):
            request.num_steps_in_flight = 0
            request.status = Status.RETIRING
            request.finish_reason = request.finish_reason or "error"
            self._settle(request)
        for request in failed:
            request.sink(Progress([], "error", error))
        return failed

    def _settle(self, request: Request) -> None:
        """Frees slot and pages of a request that gives them up, once no step in flight names it."""
        if request.num_steps_in_flight or request.status not in (Status.RETIRING, Status.YIELDING):
            return
        self.pool.release(request.page_ids)
        self._free_slots.append(request.slot)
        self.running.remove(request)
        request.page_ids, request.slot = [], -1
        if request.status is Status.RETIRING:
            request.status = Status.FINISHED
        else:
            request.status = Status.WAITING
            self.waiting.appendleft(request)

    def check_integrity(self) -> None:
        """Pages and slots are each held once or free; nothing is lost."""
        self.pool.check_integrity()
        held = [page for r in self.running for page in r.page_ids]
        assert len(set(held)) == len(held), "two requests hold one page"
        assert len(held) == self.pool.num_usable_pages - self.pool.num_free_pages(), "pages have no owner"
        slots = [r.slot for r in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.config.num_slots)), "slots are lost or doubled"
        for request in (*self.running, *self.waiting):
            request.check()
