"""The scheduler by its invariants, under random arrivals, cancels, lengths and pool sizes, one step ahead and not."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake import VOCAB, FakeRunner, continuation, prompt_of
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.plan import SamplingParams
from turbojax.engine.request import Request, Status
from turbojax.engine.scheduler import Scheduler, SchedulerConfig
from turbojax.errors import EmptyPromptError, PromptTooLongError

PAGE_LEN = 4


def make(num_pages=20, num_slots=3, budget=12, num_decode_steps=1, session_len=60):
    runner = FakeRunner(num_slots, PAGE_LEN)
    config = SchedulerConfig(num_slots, session_len, budget, runner.max_prefill_chunks, num_decode_steps)
    return Scheduler(config, BlockPool(num_pages, PAGE_LEN)), runner


def request(request_id, prompt_len, num_new, stop_ids=(), seed=None):
    prompt = prompt_of(prompt_len, request_id if seed is None else seed)
    return Request(request_id, prompt, SamplingParams(), tuple(stop_ids), prompt_len + num_new)


def drive(scheduler, runner, depth, events=()):
    """Runs to the end with `depth` steps in flight; `events` maps a step number to what happens before it."""
    in_flight, events, step = [], dict(events), 0
    while True:
        for event in events.pop(step, ()):
            event()
        plan = scheduler.plan()
        if not plan.is_empty:
            in_flight.append((plan, runner.dispatch(plan)))
        if in_flight and (len(in_flight) > depth or plan.is_empty):
            plan, handle = in_flight.pop(0)
            scheduler.commit(plan, runner.fetch(handle))
        scheduler.check_integrity()
        step += 1
        if scheduler.is_idle and not in_flight and not events:
            return step
        assert step < 5000, "no progress"


requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 25), st.integers(0, 12), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=120, deadline=None)
@given(
    requests=requests,
    num_pages=st.integers(15, 40),
    num_slots=st.integers(1, 4),
    budget=st.integers(4, 40),
    num_decode_steps=st.sampled_from([1, 2, 4]),
    depth=st.integers(0, 2),
    stop_ids=st.sets(st.integers(0, VOCAB - 1), max_size=3),
)
def test_every_request_gives_what_it_gives_alone(
    requests, num_pages, num_slots, budget, num_decode_steps, depth, stop_ids
):
    scheduler, runner = make(num_pages, num_slots, budget, num_decode_steps)
    all_requests, events, ends = [], {}, []
    for i, (prompt_len, num_new, at, cancelled) in enumerate(requests):
        r = request(i, prompt_len, num_new, stop_ids)
        r.sink = lambda progress, i=i: ends.append(i) if progress.finish_reason else False
        all_requests.append((r, cancelled))
        events.setdefault(at, []).append(lambda r=r: scheduler.add(r))
        if cancelled:
            events.setdefault(at + num_new, []).append(lambda r=r: scheduler.cancel(r))
    drive(scheduler, runner, depth, events)
    assert scheduler.pool.num_free_pages() == num_pages - 1
    for i, (r, cancelled) in enumerate(all_requests):
        expected = continuation(r.prompt_ids, r.max_len, stop_ids)
        assert r.status is Status.FINISHED
        if r.finish_reason == "cancelled":
            assert cancelled
            assert r.generated_ids == expected[: len(r.generated_ids)]
        else:
            assert r.generated_ids == expected
            assert r.finish_reason == ("stop" if expected[-1] in stop_ids else "length")
            assert ends.count(i) == 1


def test_preempted_requests_are_recomputed_and_equal_an_undisturbed_run():
    scheduler, runner = make(num_pages=9, num_slots=3, budget=16)
    all_requests = [request(i, 7, 15) for i in range(3)]
    for r in all_requests:
        scheduler.add(r)
    drive(scheduler, runner, depth=1)
    for r in all_requests:
        assert r.generated_ids == continuation(r.prompt_ids, r.max_len)
    joins = runner.num_dispatched
    assert joins > 22, "three sequences of 6 pages in 8 pages must have given way"


def test_chunks_end_at_page_edges_and_decode_goes_on_beside_them():
    scheduler, runner = make(num_pages=40, num_slots=2, budget=10)
    short, long = request(0, 3, 20), request(1, 30, 2)
    scheduler.add(short)
    plan = scheduler.plan()
    scheduler.commit(plan, runner.fetch(runner.dispatch(plan)))
    scheduler.add(long)
    seen = []
    while not long.generated_ids:
        plan = scheduler.plan()
        seen.append([(c.num_history_tokens, len(c.token_ids), c.is_last) for c in plan.prefill_chunks])
        assert plan.decode_slots == (short.slot,)
        scheduler.commit(plan, runner.fetch(runner.dispatch(plan)))
    assert seen == [[(0, 8, False)], [(8, 8, False)], [(16, 8, False)], [(24, 6, True)]]


def test_several_steps_only_while_nothing_waits():
    scheduler, runner = make(num_slots=1, num_decode_steps=4)
    scheduler.add(request(0, 3, 20))
    scheduler.add(request(1, 3, 2))
    plan = scheduler.plan()
    scheduler.commit(plan, runner.fetch(runner.dispatch(plan)))
    assert scheduler.plan().num_decode_steps == 1
    scheduler, runner = make(num_slots=1, num_decode_steps=4)
    scheduler.add(request(0, 3, 20))
    plan = scheduler.plan()
    scheduler.commit(plan, runner.fetch(runner.dispatch(plan)))
    assert scheduler.plan().num_decode_steps == 4


def test_a_sink_that_says_stop_ends_the_request_there():
    scheduler, runner = make()
    r = request(0, 5, 30)
    r.sink = lambda progress: len(r.generated_ids) >= 3
    scheduler.add(r)
    drive(scheduler, runner, depth=1)
    assert r.finish_reason == "stop"
    assert r.generated_ids == continuation(r.prompt_ids, 8)


def test_requests_that_can_never_run_are_refused_with_the_numbers():
    scheduler, _ = make(num_pages=5, session_len=60)
    with pytest.raises(EmptyPromptError):
        scheduler.add(request(0, 0, 1))
    with pytest.raises(PromptTooLongError, match=r"16 prompt tokens.* exceed 16 .*session_len 60, KV pool 16 tokens"):
        scheduler.add(request(1, 16, 1))
    scheduler.add(request(2, 15, 100))
    assert scheduler.waiting[0].max_len == 16


def test_a_lost_step_ends_what_it_held_and_frees_everything():
    scheduler, runner = make()
    ends = []
    for i in range(2):
        r = request(i, 5, 30)
        r.sink = lambda progress: ends.append(progress) or False
        scheduler.add(r)
    plan = scheduler.plan()
    runner.dispatch(plan)
    error = RuntimeError("out of memory")
    assert len(scheduler.fail_in_flight(error)) == 2
    scheduler.check_integrity()
    assert scheduler.is_idle
    assert [(p.finish_reason, p.error) for p in ends] == [("error", error)] * 2


def test_the_pool_counts_references():
    pool = BlockPool(5, PAGE_LEN)
    pages = pool.allocate(3)
    assert pool.allocate(2) is None
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.num_free_pages() == 3
    pool.release(pages[:1])
    pool.check_integrity()
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages[:1])
    with pytest.raises(ValueError, match="num_pages is 1"):
        BlockPool(1, PAGE_LEN)


def test_the_host_side_never_imports_jax():
    code = (
        "import sys, turbojax, turbojax.configs, turbojax.errors, turbojax.engine.scheduler, turbojax.engine.loop, "
        "turbojax.engine.detokenizer, turbojax.buckets; assert 'jax' not in sys.modules, 'jax was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
