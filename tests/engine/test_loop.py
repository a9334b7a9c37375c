"""The engine's thread: how many requests it takes, time-outs, cancels at any moment, commands that go wrong."""

import contextlib
import threading
import time

import pytest

from tests.engine.fake import GatedRunner, continuation
from tests.engine.harness import drive, make, request
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.loop import EngineLoop
from turbojax.engine.request import Status
from turbojax.engine.scheduler import Scheduler
from turbojax.errors import PromptTooLongError, QueueFullError, RequestTimeoutError


@contextlib.contextmanager
def open_loop(num_slots=2, num_pages=30, max_queue_len=None):
    runner = GatedRunner(num_slots, 4)
    config = SchedulerConfig(num_slots, 60, 12, runner.max_prefill_chunks, max_queue_len=max_queue_len)
    scheduler = Scheduler(config, BlockPool(num_pages, 4))
    loop = EngineLoop(scheduler, runner)
    try:
        yield loop, scheduler, runner
    finally:
        runner.gate.set()
        loop.close()


def heard(r):
    """What the request's sink hears, and an event of its end."""
    pieces, end = [], threading.Event()

    def sink(progress):
        pieces.append(progress)
        if progress.finish_reason:
            end.set()
        return False

    r.sink = sink
    return pieces, end


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.001)


def test_a_full_queue_refuses_all_of_a_call_with_the_numbers():
    with open_loop(num_slots=2, max_queue_len=1) as (loop, scheduler, runner):
        runner.gate.clear()
        requests = [request(i, 3, 4) for i in range(6)]
        ends = [heard(r)[1] for r in requests]
        loop.submit(*requests[:2])
        with pytest.raises(QueueFullError, match=r"^2 new .* beside 2 .* than 2 that run at once and 1 that wait"):
            loop.submit(*requests[2:4])
        loop.submit(requests[2])
        with pytest.raises(QueueFullError):
            loop.submit(requests[3])
        loop.cancel(requests[2])
        loop.submit(requests[4])
        runner.gate.set()
        assert all(ends[i].wait(10) for i in (0, 1, 4))
        assert all(requests[i].status is Status.WAITING for i in (3, 5))
        assert requests[3].generated_ids == []
        wait_for(lambda: scheduler.is_idle)
        loop.submit(requests[5], requests[3], request(6, 3, 4))


def test_who_has_seen_the_end_of_a_request_may_send_another_at_once():
    """Its sink hears of the end before the engine goes on, so that must be counted by then."""
    with open_loop(num_slots=1, max_queue_len=0) as (loop, _, _):
        left, done, errors = [request(i, 3, 2) for i in range(20)], threading.Event(), []

        def send():
            r = left.pop()
            r.sink = again
            loop.submit(r)

        def again(progress):
            if progress.finish_reason:
                try:
                    send() if left else done.set()
                except QueueFullError as error:
                    errors.append(error)
                    done.set()
            return False

        send()
        assert done.wait(10)
        assert errors == []


@pytest.mark.parametrize("place", ["waiting", "prefilling", "decoding"])
def test_a_request_whose_time_is_over_ends_wherever_it_stands(place):
    scheduler, runner = make(num_slots=1, budget=4)
    late, other = request(0, 20, 8), request(1, 3, 8)
    pieces, _ = heard(late)
    late.deadline_s = 5.0
    scheduler.add(other) if place == "waiting" else None
    scheduler.add(late)
    scheduler.add(other) if place != "waiting" else None
    at = {"waiting": 1, "prefilling": 2, "decoding": 8}[place]
    drive(scheduler, runner, 1, {at: [lambda: scheduler.expire(4.9)], at + 1: [lambda: scheduler.expire(5.0)]})
    assert late.finish_reason == pieces[-1].finish_reason == "timeout"
    assert isinstance(pieces[-1].error, RequestTimeoutError)
    assert ("waited" if place == "waiting" else "ran") in str(pieces[-1].error)
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert bool(late.generated_ids) == (place == "decoding")
    assert other.generated_ids == continuation(other.prompt_ids, other.max_len)
    assert scheduler.metrics.num_timed_out_requests == 1
    assert scheduler.pool.num_free_pages() == scheduler.pool.num_usable_pages


def test_deadlines_of_ended_requests_do_not_pile_up():
    scheduler, _ = make()
    for i in range(1000):
        r = request(i, 3, 4)
        r.deadline_s = 1e9 - i
        scheduler.add(r)
        scheduler.cancel(r)
    assert len(scheduler.endings._deadlines) <= 64
    scheduler.expire(2e9)
    assert scheduler.metrics.num_timed_out_requests == 0
    assert scheduler.metrics.num_cancelled_requests == 1000


def test_time_passes_for_the_loop():
    with open_loop(num_slots=1) as (loop, _, runner):
        runner.gate.clear()
        running, waiting = request(0, 3, 50), request(1, 3, 4)
        waiting.deadline_s = time.monotonic() + 0.01
        pieces, end = heard(waiting)
        _, other_end = heard(running)
        loop.submit(running, waiting)
        time.sleep(0.02)
        runner.gate.set()
        assert end.wait(10)
        assert other_end.wait(10)
        assert pieces[-1].finish_reason == "timeout"
        assert running.finish_reason == "length"


def test_a_command_that_raises_ends_its_own_request_and_not_the_engine():
    with open_loop(num_pages=5) as (loop, scheduler, _):
        too_long, good = request(0, 40, 4), request(1, 3, 4)
        pieces, end = heard(too_long)
        _, good_end = heard(good)
        loop.submit(too_long, good)
        assert end.wait(10)
        assert good_end.wait(10)
        assert isinstance(pieces[-1].error, PromptTooLongError)
        scheduler.cancel, cancel = None, scheduler.cancel  # not callable
        loop.cancel(good)
        after = request(2, 3, 4)
        _, after_end = heard(after)
        loop.submit(after)
        assert after_end.wait(10)
        scheduler.cancel = cancel
        assert after.generated_ids == continuation(after.prompt_ids, after.max_len)
        wait_for(lambda: scheduler.is_idle and not loop._open)
        scheduler.check_integrity()


def test_cancels_that_race_with_the_end_free_everything_once():
    with open_loop(num_slots=3, num_pages=12, max_queue_len=100) as (loop, scheduler, _):
        for round_ in range(30):
            requests = [request(10 * round_ + i, 3, 1 + i) for i in range(6)]
            ends = [heard(r)[1] for r in requests]
            loop.submit(*requests)
            time.sleep(0.0002 * (round_ % 5))
            for r in requests[::2]:
                loop.cancel(r)
                loop.cancel(r)
            assert all(end.wait(10) for end in ends[1::2])
        wait_for(lambda: scheduler.is_idle and not loop._open)
        scheduler.check_integrity()
        metrics = scheduler.metrics
        assert metrics.num_finished_requests + metrics.num_cancelled_requests == 180
        assert scheduler.pool.num_free_pages() == 11
