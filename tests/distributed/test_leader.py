"""Leader and followers on fake runners: the same steps in the same order; whoever is lost or differs ends the job."""

import threading

import numpy as np
import pytest

from tests.distributed.harness import WAIT_S, Process, job
from tests.engine.fake import VOCAB, FakeRunner, continuation
from tests.engine.harness import PAGE_LEN, make, request
from turbojax.engine.plan import PrefillChunk, SlotJoin, StepPlan
from turbojax.engine.stepper import Stepper
from turbojax.errors import ClusterError, EngineFailedError, ProcessLostError, SlotError


class Recording(FakeRunner):
    """Notes what it is told, and fails where it is told to.

    Attributes:
        fault: (name of a call, step) -> what it raises.
        stuck: dispatch waits for this.
    """

    def __init__(self):
        super().__init__(3, PAGE_LEN)
        self.calls, self.faults, self.gate = [], {}, threading.Event()
        self.gate.set()

    def _note(self, name, step):
        self.calls.append((name, step))
        if (error := self.faults.pop((name, step), None)) is not None:
            raise error

    def dispatch(self, plan):
        self._note("dispatch", plan.step_id)
        assert self.gate.wait(WAIT_S)
        return super().dispatch(plan)

    def pick(self, handle, masks):
        self._note("pick", handle.plan.step_id)
        super().pick(handle, masks)

    def fetch(self, handle):
        self._note("fetch", handle.plan.step_id)
        return super().fetch(handle)

    def reset(self):
        self._note("reset", -1)
        super().reset()


def run(found, requests, events=None):
    """Requests to their end on the job's engine."""
    scheduler, _ = make(num_pages=40, caching=True)
    stepper, step = Stepper(scheduler, found.runner), 0
    for each in requests:
        scheduler.add(each)
    while not stepper.is_idle:
        for event in (events or {}).pop(step, ()):
            event()
        stepper.step()
        step += 1
    return scheduler


def let_go(found):
    """Ends the job as its engine does, and gives what the followers ended with."""
    found.runner.close()
    for follower in found.followers:
        follower.join(WAIT_S)
        assert not follower.is_alive(), "a follower hangs"
    return [follower.error for follower in found.followers]


def requests_of(num):
    return [request(i, 5 + 3 * i, 12) for i in range(num)]


def assert_answered(requests):
    assert [r.generated_ids for r in requests] == [continuation(r.prompt_ids, r.max_len) for r in requests]


def test_all_processes_run_the_same_steps_in_the_same_order():
    with job(Recording) as found:
        requests = requests_of(6)
        run(found, requests)
        assert_answered(requests)
        assert let_go(found) == [None, None]
        leader, *others = found.runners
        assert len(leader.calls) > 10
        for other in others:
            assert other.calls == leader.calls
            assert other.pages == leader.pages
        assert found.left == []


def test_masks_reach_every_process_before_it_samples():
    join = SlotJoin(0, ((1, 2),), request(0, 1, 1).sampling, (), 9, has_guide=True)
    plan = StepPlan(0, joins=(join,), prefill_chunks=(chunk([1, 2, 3]),))
    mask = np.zeros(-(-VOCAB // 32), np.uint32)
    mask[0] = 1 << 7
    with job(Recording) as found:
        handle = found.runner.dispatch(plan)
        found.runner.pick(handle, {0: mask})
        assert found.runner.fetch(handle).tokens == {0: [7]}
        let_go(found)
        for runner in found.runners:
            assert runner.calls == [("dispatch", 0), ("pick", 0), ("fetch", 0)]
            assert runner.slots[0]["last"] == 7


def chunk(token_ids):
    return PrefillChunk(0, np.asarray(token_ids, np.int32), 0, True)


@pytest.mark.parametrize("name", ["dispatch", "fetch"])
def test_a_step_that_fails_everywhere_is_recovered_from_everywhere(name):
    with job(Recording) as found:
        for runner in found.runners:
            runner.faults = {(name, 5): RuntimeError("a bad step")}
        requests = requests_of(4)
        scheduler = run(found, requests)
        assert_answered(requests)
        assert scheduler.metrics.num_failed_steps == 1
        assert let_go(found) == [None, None]
        assert [runner.num_resets for runner in found.runners] == [1, 1, 1]


def test_a_slot_that_is_at_fault_everywhere_ends_its_request_alone():
    with job(Recording) as found:
        for runner in found.runners:
            runner.faults = {("dispatch", 4): SlotError(0, "page 99 of slot 0")}
        requests = requests_of(3)
        run(found, requests)
        whole = [r for r in requests if r.generated_ids == continuation(r.prompt_ids, r.max_len)]
        assert whole == [r for r in requests if r.request_id != requests[0].request_id]
        assert let_go(found) == [None, None]


@pytest.mark.parametrize("name", ["dispatch", "fetch"])
def test_a_step_that_fails_on_one_process_ends_the_job_on_all(name):
    with job(Recording) as found:
        found.runners[2].faults = {(name, 4): RuntimeError("its device")}
        words = rf"process 2 of 3 .* failed where others went on: {name}: RuntimeError: its device"
        with pytest.raises(EngineFailedError, match=words):
            run(found, requests_of(3))
        for error in let_go(found):
            assert isinstance(error, ClusterError)
            assert "its device" in str(error)


def test_a_step_that_fails_on_the_leader_alone_ends_the_job_too():
    with job(Recording) as found:
        found.runners[0].faults = {("fetch", 4): RuntimeError("its device")}
        with pytest.raises(EngineFailedError, match="process 0 failed where others went on: fetch: RuntimeError"):
            run(found, requests_of(3))
        assert all("process 0 failed" in str(error) for error in let_go(found))


def test_a_lost_follower_ends_the_engine_between_two_steps():
    with job(Recording) as found:
        failed = threading.Event()
        found.watches[0].on_failure = lambda error: failed.set()
        found.follower_links[1].close()
        assert failed.wait(WAIT_S), "nobody noticed"
        with pytest.raises(EngineFailedError, match=r"process 2 of 3 \(127.0.0.1\) is lost"):
            run(found, requests_of(1))
        (of_another, _) = let_go(found)
        assert "process 2 of 3" in str(of_another), "the other follower hears who was lost"
        assert found.left == [], "no process had to be ended"


def test_a_leader_that_waits_inside_a_device_for_a_lost_follower_is_ended():
    with job(Recording) as found:
        found.runners[0].gate.clear()
        engine = Process(run, found, requests_of(1))
        while not found.runners[0].calls:
            assert engine.is_alive()
        found.follower_links[0].close()
        while not found.left:
            assert engine.is_alive()
        assert "process 1 of 3" in found.left[0]
        found.runners[0].gate.set()
        with pytest.raises(EngineFailedError, match="process 1 of 3"):
            engine.end()
        let_go(found)


def test_a_follower_that_waits_inside_a_device_for_a_lost_leader_is_ended():
    with job(Recording, num=2) as found:
        found.runners[1].gate.clear()
        handle = found.runner.dispatch(StepPlan(0))
        assert handle[0] == 0
        while not found.runners[1].calls:
            assert found.followers[0].is_alive()
        found.leader_links[0].close()  # as the system does for a process that was killed
        while not found.left:
            assert found.followers[0].is_alive()
        assert all("is lost" in reason for reason in found.left)
        found.runners[1].gate.set()
        (error,) = let_go(found)
        assert isinstance(error, ProcessLostError)
        assert "process 0 of 2" in str(error)


def test_a_follower_whose_device_is_slow_is_waited_for():
    with job(Recording, num=2) as found:
        found.runners[1].gate.clear()
        opened = threading.Timer(0.5, found.runners[1].gate.set)
        opened.start()
        requests = requests_of(2)
        run(found, requests)
        opened.join()
        assert_answered(requests)
        assert found.runners[1].calls == found.runners[0].calls
        assert let_go(found) == [None]
        assert found.left == []
