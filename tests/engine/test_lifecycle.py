"""Pages and slots over their whole life: a strict runner, tight pools, many cancels, up to two steps ahead."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake import continuation
from tests.engine.harness import Load, arrivals, drive, make, request, setups, stop_id_sets


@settings(max_examples=250, deadline=None)
@given(arrivals=arrivals, setup=setups, depth=st.integers(0, 2), stop_ids=stop_id_sets)
def test_no_page_or_slot_changes_hands_too_early_and_every_request_gives_what_it_gives_alone(
    arrivals, setup, depth, stop_ids
):
    scheduler, runner = make(**setup)
    load = Load(arrivals, scheduler, stop_ids)
    drive(scheduler, runner, depth, load.events)
    assert scheduler.pool.num_available_pages() == setup["num_pages"] - 1
    load.check()


def test_sequences_that_outgrow_the_pool_take_turns():
    scheduler, runner = make(num_pages=8, num_slots=4, budget=16, num_decode_steps=4)
    requests = [request(i, 4, 24) for i in range(4)]
    drive(scheduler, runner, 1, {0: [lambda r=r: scheduler.add(r) for r in requests]})
    assert [r.generated_ids for r in requests] == [continuation(r.prompt_ids, 28) for r in requests]
    assert runner.num_joins > 4, "28 tokens fill the pool, so others must have given way"
    assert scheduler.metrics.num_preemptions == runner.num_joins - 4


def test_a_request_that_never_came_can_be_cancelled():
    """A caller may be interrupted between the requests of a list."""
    scheduler, runner = make()
    never, other = request(0, 4, 8), request(1, 4, 8)
    drive(scheduler, runner, 1, {0: [lambda: scheduler.add(other), lambda: scheduler.cancel(never)]})
    assert (never.finish_reason, other.finish_reason) == ("cancelled", "length")
