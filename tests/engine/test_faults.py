"""Steps that fail: the request at fault ends, the others give what they give undisturbed, everything is freed once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake import continuation
from tests.engine.faulty import FaultyRunner, FetchesFlags
from tests.engine.harness import Load, arrivals, check_plan, make, request, setups, slots_of, stop_id_sets
from turbojax.engine import stepper as stepper_module
from turbojax.engine.request import Status
from turbojax.engine.stepper import Stepper
from turbojax.errors import EngineFailedError, NumericsError, SlotError, StepFailedError


def run(scheduler, runner, events=None):
    """Steps to the end; the plans that were dispatched."""
    stepper, events, plans, step = Stepper(scheduler, runner), dict(events or {}), [], 0
    dispatch = runner.dispatch

    def watched(plan):
        check_plan(scheduler, plan)
        plans.append(plan)
        return dispatch(plan)

    runner.dispatch = watched
    while events or not stepper.is_idle:
        for event in events.pop(step, ()):
            event()
        stepper.step()
        scheduler.check_integrity()
        step += 1
        assert step < 5000, "no progress"
    return plans


def start(scheduler, *shapes):
    """Requests of (prompt length, new tokens) that are queued at once, and what their sinks heard."""
    requests, heard = [request(i, *shape) for i, shape in enumerate(shapes)], {}
    for r in requests:
        heard[r] = []
        r.sink = lambda progress, r=r: heard[r].append(progress) or False
        scheduler.add(r)
    return requests, heard


@settings(max_examples=150, deadline=None)
@given(
    arrivals=arrivals,
    setup=setups,
    stop_ids=stop_id_sets,
    transient=st.dictionaries(st.integers(0, 60), st.sampled_from(["dispatch", "fetch"]), max_size=5),
    poison=st.dictionaries(st.integers(0, 8), st.integers(2, 40), max_size=3),
    not_finite=st.dictionaries(st.integers(0, 8), st.integers(2, 40), max_size=3),
    names_slots=st.booleans(),
)
def test_survivors_of_random_faults_equal_the_undisturbed_run(
    arrivals, setup, stop_ids, transient, poison, not_finite, names_slots
):
    scheduler, runner = make(**setup, runner_type=FetchesFlags)
    runner.transient, runner.poison, runner.not_finite = dict(transient), poison, not_finite
    runner.names_slots = names_slots
    load = Load(arrivals, scheduler, stop_ids)
    run(scheduler, runner, load.events)
    assert scheduler.pool.num_available_pages() == setup["num_pages"] - 1
    load.check(may_fail=poison.keys() | not_finite.keys())
    for r, _ in load.requests:
        error = load.ends.get(r, [(None, None)])[0][1]
        if error is not None:
            assert isinstance(error, NumericsError | StepFailedError | SlotError)
            assert r.request_id in (not_finite if isinstance(error, NumericsError) else poison)
    assert scheduler.metrics.num_failed_steps == runner.num_resets


@pytest.mark.parametrize("names_slots", [False, True])
def test_only_the_request_at_fault_fails(names_slots):
    scheduler, runner = make(runner_type=FaultyRunner, num_pages=40)
    runner.poison, runner.names_slots = {1: 12}, names_slots
    requests, heard = start(scheduler, (5, 20), (6, 20), (7, 20))
    plans = run(scheduler, runner)
    for r in (requests[0], requests[2]):
        assert (r.finish_reason, r.generated_ids) == ("length", continuation(r.prompt_ids, r.max_len))
    error = heard[requests[1]][-1].error
    assert requests[1].finish_reason == "error"
    assert requests[1].generated_ids == continuation(requests[1].prompt_ids, 26)[:5], "tokens from before stay"
    if names_slots:
        assert isinstance(error, SlotError)
        assert runner.num_resets == 1
        return
    assert isinstance(error, StepFailedError)
    assert str(error).startswith("request 1: its step failed twice, the second time alone on fresh state")
    assert runner.num_resets == 2
    alone = [plan for plan in plans if len(slots_of(plan)) == 1 and plan.num_decode_steps == 1]
    assert len(alone) >= 3, "the three were tried one after the other"


def test_a_fault_that_does_not_come_back_fails_nobody():
    scheduler, runner = make(runner_type=FaultyRunner, num_pages=50, num_decode_steps=2)
    runner.transient = {4: "fetch", 30: "dispatch"}
    requests, _ = start(scheduler, (5, 40), (6, 40), (7, 40))
    run(scheduler, runner)
    assert [r.generated_ids for r in requests] == [continuation(r.prompt_ids, r.max_len) for r in requests]
    assert runner.num_resets == 2
    assert scheduler.metrics.num_failed_requests == 0


def test_tokens_of_the_step_before_the_failed_dispatch_are_kept():
    scheduler, runner = make(runner_type=FaultyRunner)
    runner.transient = {3: "dispatch"}
    (r,), heard = start(scheduler, (5, 20))
    stepper = Stepper(scheduler, runner)
    for _ in range(4):
        stepper.step()
    assert len(r.generated_ids) == 3
    assert r.status is Status.WAITING
    assert [t for p in heard[r] for t in p.token_ids] == r.generated_ids


def test_a_lost_device_ends_the_step_with_one_clear_error():
    scheduler, runner = make(runner_type=FaultyRunner)
    runner.transient, runner.is_lost = {2: "fetch"}, True
    requests, _ = start(scheduler, (5, 20), (6, 20))
    with pytest.raises(EngineFailedError, match=r"the device is lost: .*the step failed.*RuntimeError: no device"):
        run(scheduler, runner)
    scheduler.check_integrity()
    assert [r.status for r in requests] == [Status.WAITING] * 2, "the loop ends them all"


def test_failures_without_end_end_the_engine(monkeypatch):
    """Each runs alone, and together they never do: at most so many rounds."""
    monkeypatch.setattr(stepper_module, "MAX_UNEXPLAINED_FAILURES", 4)
    scheduler, runner = make(runner_type=FaultyRunner, session_len=200, num_pages=80)
    runner.too_many = 2
    requests, _ = start(scheduler, (5, 100), (6, 100))
    with pytest.raises(EngineFailedError, match="5 steps failed and no request finished between them"):
        run(scheduler, runner)
    assert all(r.generated_ids == continuation(r.prompt_ids, r.max_len)[: len(r.generated_ids)] for r in requests)


def test_logits_that_are_not_finite_fail_their_request_and_its_pages_are_zeroed():
    scheduler, runner = make(runner_type=FetchesFlags, num_slots=2, num_pages=40)
    runner.not_finite = {0: 9}
    scheduler.endings.explain = lambda r: f"first in layer {len(r.generated_ids)}"
    requests, heard = start(scheduler, (5, 20), (6, 20), (7, 5))
    plans = run(scheduler, runner)
    error = heard[requests[0]][-1].error
    assert isinstance(error, NumericsError)
    assert str(error) == (
        "request 0: its logits are not finite behind 5 prompt tokens and 3 generated ones: first in layer 3"
    )
    for r in requests[1:]:
        assert r.generated_ids == continuation(r.prompt_ids, r.max_len)
    assert runner.num_resets == 0, "the others go on where they are"
    held = {page for join in plans[0].joins if join.slot == plans[0].joins[0].slot for page in join.page_ids[0]}
    dirty = [plan.dirty_pages for plan in plans if plan.dirty_pages]
    assert len(dirty) == 1
    assert held <= set(dirty[0])


def test_nobody_runs_beside_a_suspect_and_a_tight_pool_lets_each_through():
    """Those that were cleared keep their pages only as long as nobody on probation needs them."""
    scheduler, runner = make(runner_type=FaultyRunner, num_slots=3, num_pages=9, budget=16)
    runner.transient = {6: "fetch"}
    requests, _ = start(scheduler, (8, 14), (7, 15), (6, 16))
    plans = run(scheduler, runner)
    assert [r.generated_ids for r in requests] == [continuation(r.prompt_ids, r.max_len) for r in requests]
    failed = 6
    num_suspects = len(slots_of(plans[failed]))
    after = plans[failed + 2 : failed + 2 + 2 * num_suspects]
    assert all(len(slots_of(plan)) == 1 for plan in after)
