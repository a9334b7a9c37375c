"""What the scheduler decides: who gives way, how prompts are cut, how many steps a call takes, what is refused."""

import subprocess
import sys

import pytest

from tests.engine.fake import continuation
from tests.engine.harness import PAGE_LEN, drive, make, request
from turbojax.engine.block_pool import BlockPool
from turbojax.errors import EmptyPromptError, PromptTooLongError


def test_preempted_requests_are_recomputed_and_equal_an_undisturbed_run():
    scheduler, runner = make(num_pages=9, num_slots=3, budget=16)
    all_requests = [request(i, 7, 15) for i in range(3)]
    for r in all_requests:
        scheduler.add(r)
    drive(scheduler, runner, depth=1)
    for r in all_requests:
        assert r.generated_ids == continuation(r.prompt_ids, r.max_len)
    assert runner.num_joins > 3, "three sequences of 6 pages in 8 pages must have given way"


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
    assert scheduler.waiting.first().max_len == 16


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
    assert len(scheduler.running) == 2
    scheduler.fail_running(error)
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
