"""One step ahead: what is dispatched when, and how many tokens a call takes."""

import itertools

from tests.engine.fake import continuation
from tests.engine.harness import StrictRunner, make, request
from turbojax.engine.stepper import Stepper


class RecordingRunner(StrictRunner):
    """Notes the order of what it is asked, as ("dispatch" | "fetch", step)."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls, self.plans = [], []

    def dispatch(self, plan):
        self.calls.append(("dispatch", plan.step_id))
        self.plans.append(plan)
        return super().dispatch(plan)

    def fetch(self, handle):
        self.calls.append(("fetch", handle.plan.step_id))
        return super().fetch(handle)


def run(scheduler, runner, events=None):
    stepper, step = Stepper(scheduler, runner), 0
    while not stepper.is_idle or events:
        for event in (events or {}).pop(step, ()):
            event()
        stepper.step()
        step += 1


def test_the_next_step_is_dispatched_before_the_tokens_of_the_one_before_are_asked_for():
    scheduler, runner = make(runner_type=RecordingRunner, num_pages=40)
    requests = [request(i, 5 + i, 20) for i in range(3)]
    run(scheduler, runner, {0: [lambda r=r: scheduler.add(r) for r in requests]})
    dispatched = [step for kind, step in runner.calls if kind == "dispatch"]
    for before, after in itertools.pairwise(dispatched):
        # Chunks, first decode steps and the last ones alike: no step waits for the tokens of another.
        assert runner.calls.index(("dispatch", after)) < runner.calls.index(("fetch", before))
    assert [step for kind, step in runner.calls if kind == "fetch"] == dispatched
    assert [r.generated_ids for r in requests] == [continuation(r.prompt_ids, r.max_len) for r in requests]


def test_a_call_takes_several_steps_exactly_while_nobody_waits_or_prefills():
    scheduler, runner = make(runner_type=RecordingRunner, num_slots=2, num_pages=60, num_decode_steps=4)
    early, long, late = request(0, 5, 30), request(1, 21, 6), request(2, 5, 12)
    events = {0: [lambda: scheduler.add(early)], 3: [lambda: scheduler.add(long)], 6: [lambda: scheduler.add(late)]}
    waits, plan_of = {}, scheduler.plan

    def plan():
        prefills = any(not r.is_prefilled for r in scheduler.running)
        busy = bool(scheduler.waiting) or prefills
        found = plan_of()
        waits[found.step_id] = busy
        return found

    scheduler.plan = plan
    run(scheduler, runner, events)
    pure = [plan for plan in runner.plans if not plan.prefill_chunks]
    assert {plan.num_decode_steps for plan in pure} == {1, 4}
    for plan in runner.plans:
        assert plan.num_decode_steps == (1 if waits[plan.step_id] else 4)


def test_long_sequences_take_one_step_a_call():
    scheduler, runner = make(runner_type=RecordingRunner, num_pages=60, num_decode_steps=4)
    object.__setattr__(scheduler.config, "max_multi_step_pages", 4)  # of 4 tokens
    long = request(0, 5, 30)
    run(scheduler, runner, {0: [lambda: scheduler.add(long)]})
    assert long.generated_ids == continuation(long.prompt_ids, 35)
    steps = [(plan.max_decode_pages, plan.num_decode_steps) for plan in runner.plans if not plan.prefill_chunks]
    assert {num_steps for pages, num_steps in steps if pages > 4} == {1}
    assert (4, 4) in steps


def test_large_batches_take_one_step_a_call():
    scheduler, runner = make(runner_type=RecordingRunner, num_slots=3, num_pages=60, num_decode_steps=4)
    object.__setattr__(scheduler.config, "max_multi_step_slots", 2)
    requests = [request(0, 5, 12), request(1, 5, 30), request(2, 5, 30)]
    run(scheduler, runner, {0: [lambda r=r: scheduler.add(r) for r in requests]})
    steps = {(len(p.decode_slots), p.num_decode_steps) for p in runner.plans if not p.prefill_chunks}
    assert (3, 1) in steps
    assert (2, 4) in steps
    assert (3, 4) not in steps
