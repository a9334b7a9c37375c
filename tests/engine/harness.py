"""Schedulers, requests and random loads, and one way to drive them: what the tests of the host side share."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
from hypothesis import strategies as st

from tests.engine.fake import VOCAB, FakeRunner, continuation, prompt_of
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.plan import SamplingParams
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.request import Request, Status
from turbojax.engine.scheduler import Scheduler

PAGE_LEN = 4


class Refused(BaseException):
    """A plan is wrong. No Exception, since an engine takes those for failures of a step and goes on."""


@contextmanager
def refusing():
    try:
        yield
    except (AssertionError, LookupError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


class StrictRunner(FakeRunner):
    """Refuses plans that touch pages or slots that are not theirs.

    A page given to a sequence is empty, so reading what was not written fails; pages that it shares are full. A page
    must be held in the block pool from the dispatch to the fetch of every step that names its sequence; until then
    neither it nor the slot may go to another one. A sequence that lost a page must not be named again. Nobody writes
    to a page that another one holds, or twice to a place.
    """

    def __init__(self, num_slots: int, page_len: int, pool: BlockPool) -> None:
        super().__init__(num_slots, page_len)
        self.pool = pool
        self.gifts: dict[int, int] = {}  # page -> how often it was given to somebody
        self.tables: dict[int, dict[int, int]] = {}  # slot -> its pages, and their gifts
        self.in_flight: list[dict[int, dict[int, int]]] = []  # for each step the tables that it names, by slot
        self.num_joins = 0

    @refusing()
    def dispatch(self, plan):
        busy_slots = {slot for step in self.in_flight for slot in step}
        histories = {chunk.slot: chunk.num_history_tokens for chunk in plan.prefill_chunks}
        fresh = [grant.page_id for grant in plan.page_grants]
        for join in plan.joins:
            assert join.slot not in busy_slots, "a slot changes hands while a step in flight names it"
            num_shared = histories[join.slot] // self.page_len
            for page in join.page_ids[0][:num_shared]:
                assert len(self.pages[page]) == self.page_len, f"page {page} is shared before it is full"
            fresh += join.page_ids[0][num_shared:]
        self.give(fresh)
        self.num_joins += len(plan.joins)
        for join in plan.joins:
            self.tables[join.slot] = {page: self.gifts[page] for page in join.page_ids[0]}
        for grant in plan.page_grants:
            self.tables[grant.slot][grant.page_id] = self.gifts[grant.page_id]
        self.fresh = set(fresh)
        handle = super().dispatch(plan)
        self.in_flight.append({slot: dict(self.tables[slot]) for slot in slots_of(plan)})
        self.check_held(self.in_flight[-1])
        tables = [len(self.slots[slot]["table"]) for slot in plan.decode_slots]
        assert max(tables, default=0) == plan.max_decode_pages
        return handle

    def give(self, page_ids) -> None:
        busy = {page for step in self.in_flight for table in step.values() for page in table}
        assert len(set(page_ids)) == len(page_ids), "a page is given twice"
        for page in page_ids:
            assert page not in busy, f"page {page} changes hands while a step in flight names it"
            self.gifts[page] = self.gifts.get(page, 0) + 1

    def copy_pages(self, plan) -> None:
        targets = {copy.target_id for copy in plan.page_copies}
        assert targets <= self.fresh, "a copy goes to a page that is not new"
        super().copy_pages(plan)
        for page in self.fresh - targets:
            self.pages[page] = {}

    def check_held(self, step) -> None:
        for table in step.values():
            for page, gift in table.items():
                assert self.gifts[page] == gift, f"page {page} belongs to another sequence by now"
                assert self.pool.num_references(page) > 0, f"page {page} is free while a step in flight names it"

    def write(self, slot: int, position: int, token_ids) -> None:
        table = self.slots[slot]["table"]
        for place in range(position, position + len(token_ids)):
            page = table[place // self.page_len]
            assert self.pool.num_references(page) == 1, f"page {page} is written to while another one holds it"
            assert place % self.page_len not in self.pages.get(page, {}), f"page {page} is written twice at a place"
        super().write(slot, position, token_ids)

    @refusing()
    def fetch(self, handle):
        self.check_held(self.in_flight[0])
        self.in_flight.pop(0)
        return super().fetch(handle)

    def reset(self):
        super().reset()
        self.gifts.clear()
        self.tables.clear()
        self.in_flight.clear()


def slots_of(plan):
    """The slots that a step works on."""
    return (*plan.decode_slots, *(chunk.slot for chunk in plan.prefill_chunks))


def make(
    num_pages=20, num_slots=3, budget=12, num_decode_steps=1, session_len=60, runner_type=StrictRunner, caching=False
):
    """A scheduler and a runner on one pool."""
    pool = BlockPool(num_pages, PAGE_LEN)
    runner = runner_type(num_slots, PAGE_LEN, pool)
    config = SchedulerConfig(num_slots, session_len, budget, runner.max_prefill_chunks, num_decode_steps)
    return Scheduler(config, pool, cache=PrefixCache(pool, is_enabled=caching)), runner


def request(request_id, prompt_len, num_new, stop_ids=(), stem=()):
    """A request whose prompt begins with `stem` and is its own behind."""
    prompt = np.concatenate([np.asarray(stem, np.int32)[:prompt_len], prompt_of(prompt_len, request_id)])[:prompt_len]
    return Request(request_id, prompt, SamplingParams(seed=request_id), tuple(stop_ids), prompt_len + num_new)


def drive(scheduler, runner, depth, events=()):
    """Runs to the end with `depth` steps in flight; `events` maps a step number to what happens before it."""
    in_flight, events, step = [], dict(events), 0
    while events or in_flight or not scheduler.is_idle:
        for event in events.pop(step, ()):
            event()
        plan = scheduler.plan()
        check_plan(scheduler, plan)
        if not plan.is_empty:
            in_flight.append((plan, runner.dispatch(plan)))
        if in_flight and (len(in_flight) > depth or plan.is_empty):
            plan, handle = in_flight.pop(0)
            scheduler.commit(plan, runner.fetch(handle))
        scheduler.check_integrity()
        step += 1
        assert step < 5000, "no progress"


@refusing()
def check_plan(scheduler, plan):
    assert not (plan.is_empty and (plan.joins or plan.page_grants or plan.dirty_pages)), "they would be lost"
    assert sum(len(chunk.token_ids) for chunk in plan.prefill_chunks) <= scheduler.config.max_prefill_tokens


arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "prompt_len": st.integers(1, 20),
            "stem_len": st.integers(0, 20),  # it begins like all others
            "num_new": st.integers(1, 24),
            "at": st.integers(0, 15),
            "cancel_after": st.none() | st.integers(0, 25),
            "word_at": st.none() | st.integers(1, 10),  # the sink ends it here, as a stop word would
        }
    ),
    min_size=1,
    max_size=9,
)
stop_id_sets = st.sets(st.integers(0, VOCAB - 1), max_size=2)
setups = st.fixed_dictionaries(
    {
        "num_pages": st.integers(12, 30),  # 44 tokens, the longest of these requests, are 11 pages
        "num_slots": st.integers(1, 5),
        "budget": st.integers(4, 40),
        "num_decode_steps": st.sampled_from([1, 2, 4]),
        "caching": st.booleans(),
    }
)


class Load:
    """Random arrivals as requests and events, and what must have come of them."""

    def __init__(self, arrivals, scheduler, stop_ids):
        self.stop_ids, self.requests, self.events = stop_ids, [], {}
        self.ends = {}  # request -> what its sink heard last: (finish reason, error)
        for i, arrival in enumerate(arrivals):
            stem = prompt_of(20, 1000)[: arrival["stem_len"]]
            r = request(i, arrival["prompt_len"], arrival["num_new"], stop_ids, stem)
            r.sink = self.sink_of(r, arrival["word_at"])
            self.requests.append((r, arrival))
            self.at(arrival["at"], lambda r=r: scheduler.add(r))
            if arrival["cancel_after"] is not None:
                self.at(arrival["at"] + arrival["cancel_after"], lambda r=r: scheduler.cancel(r))

    def at(self, step, event):
        self.events.setdefault(step, []).append(event)

    def sink_of(self, r, word_at):
        def sink(progress):
            stops = word_at is not None and len(r.generated_ids) >= word_at
            reason = progress.finish_reason or ("stop" if stops else None)
            if reason:
                self.ends.setdefault(r, []).append((reason, progress.error))
            return stops

        return sink

    def check(self, may_fail=frozenset()):
        """Every request ended once, with what it gives alone; those that may fail may have stopped anywhere."""
        for r, arrival in self.requests:
            whole = continuation(r.prompt_ids, r.max_len, self.stop_ids)
            got = r.generated_ids
            assert r.status is Status.FINISHED
            assert got == whole[: len(got)]
            if r.finish_reason == "cancelled":
                assert arrival["cancel_after"] is not None
                assert r not in self.ends, "a cancelled request hears nothing more"
                continue
            assert [reason for reason, _ in self.ends[r]] == [r.finish_reason], "every request ends exactly once"
            if r.finish_reason == "error":
                assert r.request_id in may_fail
            elif arrival["word_at"] is None or len(whole) < arrival["word_at"]:
                assert got == whole
