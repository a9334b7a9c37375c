"""Pages and slots over their whole life: a strict runner, tight pools, many cancels, up to two steps ahead."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake import VOCAB, FakeRunner, continuation, prompt_of
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.plan import SamplingParams
from turbojax.engine.request import Request, Status
from turbojax.engine.scheduler import Scheduler, SchedulerConfig

PAGE_LEN = 4


class StrictRunner(FakeRunner):
    """Refuses plans that touch pages or slots that are not theirs.

    A page given to a sequence is empty, so reading what was not written fails. A page must be held in the block pool
    from the dispatch to the fetch of every step that names its sequence; until then neither it nor the slot may go to
    another one. A sequence that lost a page must not be named again.
    """

    def __init__(self, num_slots: int, page_len: int, pool: BlockPool) -> None:
        super().__init__(num_slots, page_len)
        self.pool = pool
        self.owner: dict[int, object] = {}  # page -> the join of its sequence
        self.in_flight: list[dict[int, object]] = []  # for each step the joins that it names, by slot
        self.num_joins = 0

    def dispatch(self, plan):
        busy = {id(join): join for step in self.in_flight for join in step.values()}
        busy_slots = {join.slot for join in busy.values()}
        for join in plan.joins:
            assert join.slot not in busy_slots, "a slot changes hands while a step in flight names it"
            for page in join.page_ids[0]:
                self.give(page, join, busy)
        self.num_joins += len(plan.joins)
        joined = {join.slot: join for join in plan.joins}
        for grant in plan.page_grants:
            self.give(grant.page_id, joined.get(grant.slot) or self.slots[grant.slot]["join"], busy)
        handle = super().dispatch(plan)
        named = {
            slot: self.slots[slot]["join"] for slot in (*plan.decode_slots, *(c.slot for c in plan.prefill_chunks))
        }
        self.in_flight.append(named)
        self.check_held(named)
        return handle

    def give(self, page: int, join, busy) -> None:
        owner = self.owner.get(page)
        assert owner is None or id(owner) not in busy, f"page {page} changes hands while a step in flight names it"
        self.owner[page] = join
        self.pages[page] = {}

    def check_held(self, named) -> None:
        for slot, join in named.items():
            for page in self.slots[slot]["table"]:
                assert self.owner[page] is join, f"page {page} belongs to another sequence by now"
                assert page not in self.pool._free[0], f"page {page} is free while a step in flight names it"

    def fetch(self, handle):
        self.check_held(self.in_flight[0])
        self.in_flight.pop(0)
        return super().fetch(handle)


def run(scheduler, runner, depth, events):
    in_flight, step = [], 0
    while events or in_flight or not scheduler.is_idle:
        for event in events.pop(step, ()):
            event()
        plan = scheduler.plan()
        assert not (plan.is_empty and (plan.joins or plan.page_grants)), "joins and grants would be lost"
        assert sum(len(chunk.token_ids) for chunk in plan.prefill_chunks) <= scheduler.config.max_prefill_tokens
        if not plan.is_empty:
            in_flight.append((plan, runner.dispatch(plan)))
        if in_flight and (len(in_flight) > depth or plan.is_empty):
            plan, handle = in_flight.pop(0)
            scheduler.commit(plan, runner.fetch(handle))
        scheduler.check_integrity()
        step += 1
        assert step < 3000, "no progress"


arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "prompt_len": st.integers(1, 20),
            "num_new": st.integers(1, 24),
            "at": st.integers(0, 15),
            "cancel_after": st.none() | st.integers(0, 25),
            "word_at": st.none() | st.integers(1, 10),  # the sink ends it here, as a stop word would
        }
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=arrivals,
    num_pages=st.integers(7, 18),
    num_slots=st.integers(1, 5),
    budget=st.integers(4, 24),
    num_decode_steps=st.sampled_from([1, 2, 4]),
    depth=st.integers(0, 2),
    stop_ids=st.sets(st.integers(0, VOCAB - 1), max_size=2),
)
def test_no_page_or_slot_changes_hands_too_early(
    arrivals, num_pages, num_slots, budget, num_decode_steps, depth, stop_ids
):
    pool = BlockPool(num_pages, PAGE_LEN)
    runner = StrictRunner(num_slots, PAGE_LEN, pool)
    scheduler = Scheduler(SchedulerConfig(num_slots, 40, budget, runner.max_prefill_chunks, num_decode_steps), pool)
    requests, events, reasons = [], {}, {}
    for i, arrival in enumerate(arrivals):
        prompt = prompt_of(arrival["prompt_len"], i)
        request = Request(i, prompt, SamplingParams(), tuple(stop_ids), len(prompt) + arrival["num_new"])

        def sink(progress, request=request, word_at=arrival["word_at"]):
            ends = word_at is not None and len(request.generated_ids) >= word_at
            reason = progress.finish_reason or ("stop" if ends else None)
            if reason:
                reasons.setdefault(request.request_id, []).append(reason)
            return ends

        request.sink = sink
        requests.append((request, arrival))
        events.setdefault(arrival["at"], []).append(lambda r=request: scheduler.add(r))
        if arrival["cancel_after"] is not None:
            when = arrival["at"] + arrival["cancel_after"]
            events.setdefault(when, []).append(lambda r=request: scheduler.cancel(r))
    run(scheduler, runner, depth, events)
    assert pool.num_free_pages() == num_pages - 1
    for request, arrival in requests:
        whole = continuation(request.prompt_ids, request.max_len, stop_ids)
        got = request.generated_ids
        assert request.status is Status.FINISHED
        assert got == whole[: len(got)]
        if request.finish_reason == "cancelled":
            assert arrival["cancel_after"] is not None
            assert request.request_id not in reasons, "a cancelled request hears nothing more"
            continue
        assert reasons[request.request_id] == [request.finish_reason], "every request ends exactly once"
        if arrival["word_at"] is None or len(whole) < arrival["word_at"]:
            assert got == whole


def test_sequences_that_outgrow_the_pool_take_turns():
    pool = BlockPool(8, PAGE_LEN)
    runner = StrictRunner(4, PAGE_LEN, pool)
    scheduler = Scheduler(SchedulerConfig(4, 28, 16, runner.max_prefill_chunks, 4), pool)
    requests = [Request(i, prompt_of(4, i), SamplingParams(), (), 28) for i in range(4)]
    run(scheduler, runner, 1, {0: [lambda r=r: scheduler.add(r) for r in requests]})
    assert [r.generated_ids for r in requests] == [continuation(r.prompt_ids, 28) for r in requests]
    assert runner.num_joins > 4, "28 tokens fill the pool, so others must have given way"
