"""Several engines behind one door: who gets a request, what happens when one is full, fails, or is closed."""

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.fake import FakeRunner, continuation, prompt_of
from tests.engine.harness import make, request
from tests.engine.test_loop import heard, open_loop, wait_for
from turbojax.engine.affinity import SLACK, most_requests
from turbojax.engine.loop import EngineLoop
from turbojax.engine.metrics import EngineMetrics, EngineStatus
from turbojax.engine.replicas import BLOCK_LEN, Replicas
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


# -- prompts that begin alike -------------------------------------------------------------------------------


@dataclass(eq=False)
class Counter:
    """An engine that keeps whatever it gets."""

    num_slots: int = 4
    max_open: float = 10
    num_cacheable_tokens: int = 1 << 20
    requests: list = field(default_factory=list)

    @property
    def status(self):
        return EngineStatus(len(self.requests), 0, 0, 0, 9, 0.0, None)

    @property
    def num_open(self):
        return len(self.requests)

    def check_room(self, num_new):
        if self.num_open + num_new > self.max_open:
            raise QueueFullError

    def submit(self, *requests):
        self.requests += requests


def behind(stem, request_id, num_new=8):
    """A request whose prompt begins with `stem` and goes on for as long by itself."""
    return request(request_id, 2 * len(stem), num_new, stem=stem)


def test_a_conversation_goes_on_where_its_pages_are():
    """By turns alone each would be on the other engine, which has none of them."""
    with contextlib.ExitStack() as stack:
        engines = [
            make(num_pages=400, budget=200, session_len=800, runner_type=lambda n, p, _: FakeRunner(n, p), caching=True)
            for _ in range(2)
        ]
        loops = [stack.enter_context(contextlib.closing(EngineLoop(*each))) for each in engines]
        door, asked = Replicas(loops), [request(i, 3 * BLOCK_LEN, 8) for i in range(2)]
        for turn in range(3):
            ends = [heard(r)[1] for r in asked]
            if turn == 0:
                door.submit(*asked)  # one for each engine
            for r in reversed(asked) if turn else ():
                door.submit(r)
            assert all(end.wait(10) for end in ends)
            for r in asked:
                assert r.generated_ids == continuation(r.prompt_ids, r.max_len)
                assert turn == 0 or r.num_cached_tokens >= 3 * BLOCK_LEN
            asked = [
                request(10 * turn + 10 + i, r.num_tokens + 20, 8, stem=[*r.prompt_ids, *r.generated_ids])
                for i, r in enumerate(asked)
            ]
        assert [scheduler.metrics.num_finished_requests for scheduler, _ in engines] == [3, 3]


def test_a_short_beginning_that_all_share_leaves_the_engines_balanced():
    loops = [Counter(num_slots=64) for _ in range(3)]
    stem = prompt_of(BLOCK_LEN, 1)
    Replicas(loops).submit(*(behind(stem, i) for i in range(30)))
    assert [loop.num_open for loop in loops] == [10, 10, 10]


def test_a_long_beginning_is_computed_twice_when_the_engine_that_has_it_has_much_more_to_do():
    loops = [Counter(num_slots=64, max_open=64) for _ in range(2)]
    door, stem = Replicas(loops), prompt_of(128 * BLOCK_LEN, 1)
    door.submit(*(behind(stem, i) for i in range(SLACK + 1)))
    assert [loop.num_open for loop in loops] == [SLACK + 1, 0]
    door.submit(*(behind(stem, i) for i in range(SLACK + 1)))
    assert [loop.num_open for loop in loops] == [SLACK + 1, SLACK + 1]


@pytest.mark.parametrize("fields", [{"reads_cache": False}, {"cache_salt": "another"}])
def test_requests_that_would_find_nothing_go_where_the_fewest_are(fields):
    loops, stem = [Counter(), Counter()], prompt_of(128 * BLOCK_LEN, 1)
    door = Replicas(loops)
    door.submit(behind(stem, 0))
    other = behind(stem, 1)
    for name, value in fields.items():
        setattr(other, name, value)
    door.submit(other)
    assert loops[1].requests == [other]


STEMS = [prompt_of(128 * BLOCK_LEN, seed) for seed in (1, 2)]


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 1, 8, 40, 128]), st.booleans()), max_size=30))
def test_nobody_waits_for_a_prefix_beside_a_free_slot_and_all_room_is_used(arrivals):
    """Each arrival: its stem, how many blocks of it, and whether an engine ends its first request before."""
    loops = [Counter(), Counter(), Counter()]
    door = Replicas(loops)
    for i, (stem, num_blocks, ends) in enumerate(arrivals):
        if ends and (busy := [loop for loop in loops if loop.requests]):
            del busy[i % len(busy)].requests[0]
        before = [loop.num_open for loop in loops]
        new = behind(STEMS[stem][: num_blocks * BLOCK_LEN], i) if num_blocks else request(i, 3, 4)
        if min(before) == 10:
            with pytest.raises(QueueFullError):
                door.submit(new)
            continue
        door.submit(new)
        [chosen] = [k for k, loop in enumerate(loops) if loop.num_open > before[k]]
        assert before[chosen] < 4 or min(before) >= 4
        assert before[chosen] <= most_requests(num_blocks, min(before))


def test_counts_add_up_by_name():
    one, other = EngineMetrics(num_steps=2, num_preemptions=1), EngineMetrics(num_steps=3)
    assert (one + other).snapshot() == EngineMetrics(num_steps=5, num_preemptions=1).snapshot()
