"""Whose turn it is: first come first served in a priority, priorities by level, and nobody waits for ever."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.harness import drive, make, request
from turbojax.engine.waiting import ADMISSIONS_PER_LEVEL, WaitingQueue


def waiting_request(request_id, priority=0):
    r = request(request_id, 1, 1)
    r.priority = priority
    return r


def admit_first(queue):
    r = queue.first()
    queue.admit(r)
    return r


def admit_all(queue):
    return [admit_first(queue).request_id for _ in range(len(queue))]


def test_first_come_first_served_and_lower_priorities_first():
    queue = WaitingQueue()
    for i, priority in enumerate([1, 0, -1, 1, 0, -1, 7]):
        queue.append(waiting_request(i, priority))
    assert [r.request_id for r in queue] == [2, 5, 1, 4, 0, 3, 6]
    assert admit_all(queue) == [2, 5, 1, 4, 0, 3, 6]
    assert queue.first() is None


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_a_worse_priority_gets_one_admission_for_so_many_of_a_better_one_that_never_ends(levels):
    queue = WaitingQueue(admissions_per_level=4)
    for i in range(3):
        queue.append(waiting_request(i, priority=levels))
    gaps, num_passed = [], 0
    for i in range(100, 200):
        queue.append(waiting_request(i))
        if admit_first(queue).priority == levels:
            gaps.append(num_passed)
            num_passed = 0
        else:
            num_passed += 1
    assert gaps == [4 * levels] * 3


def test_a_long_queue_of_a_worse_priority_does_not_age_by_serving_itself():
    """A user who comes after hours of a bulk run is served next."""
    queue = WaitingQueue()
    for i in range(10 * ADMISSIONS_PER_LEVEL):
        queue.append(waiting_request(i, priority=1))
    for _ in range(5 * ADMISSIONS_PER_LEVEL):
        admit_first(queue)
    queue.append(waiting_request(9999, priority=0))
    assert queue.first().request_id == 9999


def test_who_gave_way_stands_in_front_of_its_priority_with_the_turn_that_it_had():
    queue = WaitingQueue(admissions_per_level=4)
    first, second, third, urgent = (waiting_request(i, priority) for i, priority in enumerate([1, 1, 1, 0]))
    for r in (first, second, third):
        queue.append(r)
    queue.admit(first)
    queue.admit(second)
    queue.append(urgent)
    queue.put_back(second)
    queue.put_back(first)
    assert admit_all(queue) == [3, 0, 1, 2]
    low, better = waiting_request(9, priority=1), [waiting_request(20 + i) for i in range(9)]
    queue.append(low)
    for r in better:
        queue.append(r)
    assert [admit_first(queue).request_id for _ in range(5)] == [20, 21, 22, 23, 9]
    queue.put_back(low)
    assert queue.first() is low, "it waited for its turn once, and does not again"


operations = st.lists(
    st.tuples(st.sampled_from(["append", "append", "admit", "remove", "put_back", "admit_any"]), st.integers(0, 10**6)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(
    operations=operations, priorities=st.lists(st.integers(-3, 3), min_size=1, max_size=5), per_level=st.integers(1, 4)
)
def test_the_queue_keeps_its_promises(operations, priorities, per_level):
    """Against lists, and counting for the first of each priority the better ones that were admitted before it."""
    queue = WaitingQueue(per_level)
    lines = {p: deque() for p in priorities}
    out, heads, num_put_back = [], {}, 0
    for i, (kind, pick) in enumerate(operations):
        waiting = [r for line in lines.values() for r in line]
        if kind == "append":
            r = waiting_request(i, priorities[pick % len(priorities)])
            queue.append(r)
            lines[r.priority].append(r)
        elif kind == "put_back" and out:
            r = out.pop(pick % len(out))
            queue.put_back(r)
            lines[r.priority].appendleft(r)
            num_put_back += 1
        elif waiting and kind in ("remove", "admit_any"):
            r = waiting[pick % len(waiting)]
            queue.remove(r) if kind == "remove" else queue.admit(r)
            lines[r.priority].remove(r)
            if kind == "admit_any":
                out.append(r)
                heads.pop(r.priority, None)
        elif waiting and kind == "admit":
            r = admit_first(queue)
            assert r is lines[r.priority].popleft()
            out.append(r)
            for p, line in lines.items():
                if line and p > r.priority:
                    head, num_passed = heads.get(p, (line[0], 0))
                    heads[p] = (line[0], num_passed + 1 if head is line[0] else 1)
                    assert heads[p][1] <= per_level * (p - min(priorities)) + num_put_back
            heads.pop(r.priority, None)
        queue.check()
        assert len(queue) == sum(map(len, lines.values()))
        assert sorted(r.request_id for r in queue) == sorted(r.request_id for line in lines.values() for r in line)
        assert all(r in queue for line in lines.values() for r in line)
        assert all(r not in queue for r in out)


def test_priorities_decide_who_takes_the_slots():
    scheduler, runner = make(num_slots=1)
    ended = []
    requests = [request(i, 3, 2) for i in range(4)]
    for r, priority in zip(requests, [0, 5, -5, 0], strict=True):
        r.priority = priority
        r.sink = lambda progress, r=r: progress.finish_reason and ended.append(r.request_id)
    drive(scheduler, runner, 1, {0: [lambda: [scheduler.add(r) for r in requests]]})
    assert ended == [2, 0, 3, 1]


def test_a_request_of_a_worse_priority_ends_while_better_ones_keep_coming():
    scheduler, runner = make(num_slots=1)
    patient = request(0, 3, 2)
    patient.priority = 1
    scheduler.add(patient)
    for i in range(1, 2 * ADMISSIONS_PER_LEVEL):
        scheduler.add(request(i, 3, 2))
    left = []
    patient.sink = lambda progress: left.append(len(scheduler.waiting))
    drive(scheduler, runner, 1)
    assert left
    assert left[-1] >= ADMISSIONS_PER_LEVEL - 2
