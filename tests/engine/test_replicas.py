"""Several engines behind one door: who gets a request, what happens when one is full, fails, or is closed."""

import contextlib

import pytest

from tests.engine.fake import continuation
from tests.engine.harness import request
from tests.engine.test_loop import heard, open_loop, wait_for
from turbojax.engine.metrics import EngineMetrics
from turbojax.engine.replicas import Replicas
from turbojax.engine.request import Status
from turbojax.errors import EngineClosedError, EngineFailedError, QueueFullError, TurbojaxError


@pytest.fixture
def two():
    """Two engines of two slots, their runners held, and the door."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(open_loop(num_slots=2, max_queue_len=1)) for _ in range(2)]
        loops, schedulers, runners = zip(*found, strict=True)
        for runner in runners:
            runner.gate.clear()
        yield Replicas(loops), loops, schedulers, runners
        for runner in runners:
            runner.gate.set()


def test_a_request_runs_where_the_fewest_are(two):
    door, loops, schedulers, runners = two
    requests = [request(i, 3 + i, 4) for i in range(5)]
    ends = [heard(r)[1] for r in requests]
    door.submit(*requests[:3])
    assert [loop.num_open for loop in loops] == [2, 1]
    door.submit(requests[3])
    assert [loop.num_open for loop in loops] == [2, 2]
    door.cancel(requests[0])
    door.submit(requests[4])
    assert [loop.num_open for loop in loops] == [2, 2]
    assert loops[0].has(requests[4])
    for runner in runners:
        runner.gate.set()
    assert all(ends[i].wait(10) for i in range(1, 5))
    for r in requests[1:]:
        assert r.generated_ids == continuation(r.prompt_ids, r.max_len)
    wait_for(lambda: all(scheduler.is_idle for scheduler in schedulers))
    metrics = schedulers[0].metrics + schedulers[1].metrics
    assert (metrics.num_finished_requests, metrics.num_cancelled_requests) == (4, 1)
    assert sum(scheduler.metrics.num_steps for scheduler in schedulers) == metrics.num_steps


def test_all_of_a_call_or_none(two):
    door, loops, _, _ = two
    with pytest.raises(QueueFullError, match="4 new requests beside 0"):
        door.submit(*(request(i, 3, 4) for i in range(7)))
    assert [loop.num_open for loop in loops] == [0, 0]
    door.submit(*(request(i, 3, 4) for i in range(6)))
    with pytest.raises(QueueFullError):
        door.submit(request(6, 3, 4))
    assert door.status.num_running + door.status.num_waiting == 6


def test_one_that_failed_gets_no_more_and_the_other_goes_on(two):
    door, loops, _, runners = two
    runners[1].gate.set()
    loops[0].fail(TurbojaxError("lost"))
    wait_for(lambda: loops[0].status.failure is not None)
    requests = [request(i, 3, 4) for i in range(2)]
    ends = [heard(r)[1] for r in requests]
    door.submit(*requests)
    assert all(end.wait(10) for end in ends)
    assert all(r.status is Status.FINISHED for r in requests)
    assert door.status.failure is None
    assert door.status.num_pages == 29, "of the one that is left"
    loops[1].fail(TurbojaxError("lost too"))
    wait_for(lambda: door.status.failure is not None)
    with pytest.raises(EngineFailedError, match="lost"):
        door.submit(request(2, 3, 4))


def test_closing_closes_all(two):
    door, _, _, runners = two
    for runner in runners:
        runner.gate.set()
    door.close()
    with pytest.raises(EngineClosedError):
        door.submit(request(0, 3, 4))


def test_counts_add_up_by_name():
    one, other = EngineMetrics(num_steps=2, num_preemptions=1), EngineMetrics(num_steps=3)
    assert (one + other).snapshot() == EngineMetrics(num_steps=5, num_preemptions=1).snapshot()
