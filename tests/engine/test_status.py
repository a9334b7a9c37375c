"""How an engine says it stands: who runs and waits, its pages, progress, and when a request took its slot."""

import time

import pytest

from tests.engine.fake import GatedRunner
from tests.engine.harness import drive, make, request
from tests.engine.test_loop import heard, open_loop, wait_for
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.loop import EngineLoop
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.scheduler import Scheduler

LONG_AGO_S = 1000.0


class LostRunner(GatedRunner):
    def dispatch(self, plan):
        raise RuntimeError("bus error")

    def reset(self):
        raise RuntimeError("no device")


def test_requests_and_pages_are_where_the_status_says():
    with open_loop(num_slots=2, num_pages=31) as (loop, scheduler, runner):
        assert loop.status == (0, 0, 0, 0, 30, 0.0, None)
        requests = [request(i, 5, 3) for i in range(5)]
        ends = [heard(r)[1] for r in requests]
        runner.gate.clear()
        loop.submit(*requests)
        assert loop.status.num_running + loop.status.num_waiting == 5, "the engine has not looked at them yet"
        wait_for(lambda: len(scheduler.running) == 2)
        status = loop.status
        assert (status.num_running, status.num_waiting) == (2, 3)
        held = {page for r in requests for page in r.page_ids}
        assert (status.num_held_pages, status.num_pages) == (len(held), 30)
        assert status.pool_usage == len(held) / 30 > 0
        runner.gate.set()
        assert all(end.wait(10) for end in ends)
        wait_for(lambda: scheduler.is_idle)
        assert loop.status == (0, 0, 0, 0, 30, 0.0, None)


def test_pages_that_are_kept_for_their_content_are_idle():
    runner, pool = GatedRunner(2, 4), BlockPool(31, 4)
    scheduler = Scheduler(SchedulerConfig(2, 60, 12, runner.max_prefill_chunks), pool, cache=PrefixCache(pool))
    loop = EngineLoop(scheduler, runner)
    try:
        asked = request(0, 9, 4)  # 12 of its 13 tokens are written: 3 full pages
        end = heard(asked)[1]
        loop.submit(asked)
        assert end.wait(10)
        wait_for(lambda: scheduler.is_idle)
        assert loop.status == (0, 0, 0, 3, 27, 0.0, None)
        assert loop.status.pool_usage == 0
    finally:
        loop.close()


def test_an_engine_without_progress_is_stalled_until_a_step_finishes():
    with open_loop() as (loop, scheduler, runner):
        runner.gate.clear()
        asked = request(0, 3, 4)
        end = heard(asked)[1]
        loop.submit(asked)
        wait_for(lambda: scheduler.running)
        first = loop.status.stalled_s
        wait_for(lambda: loop.status.stalled_s > first)
        loop._progress_s -= LONG_AGO_S
        assert loop.status.stalled_s > LONG_AGO_S
        runner.gate.set()
        assert end.wait(10)
        wait_for(lambda: loop.status.stalled_s == 0)


@pytest.mark.parametrize("counter", ["num_traces", "num_compilations"])
def test_a_program_that_began_or_came_to_be_is_progress(counter):
    with open_loop() as (loop, scheduler, runner):
        runner.gate.clear()
        loop.submit(request(0, 3, 4))
        wait_for(lambda: scheduler.running)
        loop._progress_s -= LONG_AGO_S
        assert loop.status.stalled_s > LONG_AGO_S
        setattr(scheduler.metrics, counter, 1)
        assert loop.status.stalled_s < LONG_AGO_S
        loop._progress_s -= LONG_AGO_S
        assert loop.status.stalled_s > LONG_AGO_S, "and no longer, once it is an old one"


def test_a_stalled_engine_stays_so_when_everybody_has_given_up_and_others_come():
    with open_loop() as (loop, scheduler, runner):
        runner.gate.clear()
        asked = request(0, 3, 4)
        loop.submit(asked)
        wait_for(lambda: scheduler.running)
        loop._progress_s -= LONG_AGO_S
        loop.cancel(asked)
        assert loop.status.stalled_s > LONG_AGO_S
        loop.submit(request(1, 3, 4))
        assert loop.status.stalled_s > LONG_AGO_S
        assert loop.status.num_waiting == 1


def test_time_without_work_is_no_stall():
    with open_loop() as (loop, _, runner):
        loop._progress_s -= LONG_AGO_S
        assert loop.status.stalled_s == 0
        runner.gate.clear()
        loop.submit(request(0, 3, 4))
        assert 0 < loop.status.stalled_s < LONG_AGO_S


def test_the_status_says_why_no_request_is_taken():
    runner = LostRunner(2, 4)
    scheduler = Scheduler(SchedulerConfig(2, 60, 12, runner.max_prefill_chunks), BlockPool(30, 4))
    loop = EngineLoop(scheduler, runner)
    asked = request(0, 3, 4)
    end = heard(asked)[1]
    loop.submit(asked)
    assert end.wait(10)
    wait_for(lambda: loop.status.stalled_s == 0)
    assert "device is lost" in loop.status.failure
    with open_loop() as (loop, _, _):
        loop.close()
        assert loop.status.failure == "the engine is closed: make a new pipeline"


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_request_starts_when_it_first_takes_a_slot(num_slots):
    """However often it gives way later; who waits for a slot starts when the one before has ended."""
    scheduler, runner = make(num_slots=num_slots, num_pages=9, session_len=30)
    requests = [request(i, 12, 12) for i in range(3)]
    pieces = [heard(r)[0] for r in requests]
    before = time.monotonic()
    for r in requests:
        scheduler.add(r)
    drive(scheduler, runner, depth=1)
    assert (scheduler.metrics.num_preemptions > 0) == (num_slots == 2), "the case is not the one that it should be"
    started = [r.started_s for r in requests]
    assert started == sorted(started)
    assert before <= started[0]
    assert started[-1] <= time.monotonic()
    for r, heard_of_it in zip(requests, pieces, strict=True):
        assert {progress.started_s for progress in heard_of_it} == {r.started_s}


def test_one_that_ends_while_it_waits_has_not_started():
    scheduler, _ = make(num_slots=1)
    waits = request(0, 4, 4)
    waits.deadline_s = 0.0
    pieces = heard(waits)[0]
    scheduler.add(waits)
    scheduler.expire(time.monotonic())
    assert [(progress.finish_reason, progress.started_s) for progress in pieces] == [("timeout", None)]
