"""Requests that begin alike: computed once, found again after their ends, apart by salt, regime and bad numbers."""

import numpy as np
import pytest

from tests.engine.fake import continuation, prompt_of
from tests.engine.faulty import FaultyRunner, FetchesFlags
from tests.engine.harness import PAGE_LEN, StrictRunner, drive, make, request
from turbojax.engine.prefilling import MAX_PASSED_OVER
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.scheduler import Scheduler
from turbojax.engine.stepper import Stepper

STEM = prompt_of(16, 1000)


class CountingRunner(StrictRunner):
    """Notes which tokens of prompts are computed, as (slot, history, count), and what is copied, for each step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.computed, self.copies = [], []

    def dispatch(self, plan):
        self.computed.append([(c.slot, c.num_history_tokens, len(c.token_ids)) for c in plan.prefill_chunks])
        self.copies += plan.page_copies
        return super().dispatch(plan)

    @property
    def num_computed(self):
        return sum(count for step in self.computed for _, _, count in step)


def engine(runner_type=CountingRunner, **setup):
    return make(**{"num_pages": 40, "budget": 40, "caching": True, "runner_type": runner_type} | setup)


def run(scheduler, runner, *requests, depth=1):
    """The tokens of prompts that were computed for these requests, which arrive together; what they gave is checked."""
    before = runner.num_computed
    drive(scheduler, runner, depth, {0: [lambda r=r: scheduler.add(r) for r in requests]})
    for r in requests:
        assert r.generated_ids == continuation(r.prompt_ids, r.max_len, r.stop_token_ids)
    return runner.num_computed - before


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [8, 40])
def test_a_beginning_that_arrives_several_times_together_is_computed_once(depth, budget):
    scheduler, runner = engine(num_slots=5, budget=budget)
    requests = [request(i, 16 + 3, 4, stem=STEM) for i in range(5)]
    assert run(scheduler, runner, *requests, depth=depth) == 16 + 5 * 3
    assert [r.num_cached_tokens for r in requests] == [0, 16, 16, 16, 16]
    assert (scheduler.metrics.num_prompt_tokens, scheduler.metrics.num_cached_tokens) == (5 * 19, 4 * 16)


def test_samples_of_one_prompt_compute_it_once_and_then_a_token_each():
    """14 tokens are three pages and a half: the half is copied."""
    scheduler, runner = engine(num_slots=4)
    requests = [request(0, 14, 5 + i) for i in range(4)]
    assert run(scheduler, runner, *requests) == 14 + 3 * 1
    assert [copy.num_tokens for copy in runner.copies] == [1, 1, 1]
    assert [r.num_cached_tokens for r in requests] == [0, 13, 13, 13]


@pytest.mark.parametrize("prompt_len", [15, 16, 17])
def test_of_a_prompt_that_is_there_already_the_last_token_is_computed(prompt_len):
    scheduler, runner = engine()
    assert run(scheduler, runner, request(0, prompt_len, 3)) == prompt_len
    assert run(scheduler, runner, request(0, prompt_len, 3)) == 1
    assert [copy.num_tokens for copy in runner.copies] == ([] if prompt_len == 17 else [(prompt_len - 1) % PAGE_LEN])


def test_generated_tokens_are_found_by_the_next_turn():
    scheduler, runner = engine()
    first = request(0, 9, 14)
    run(scheduler, runner, first)
    second = request(1, 30, 3, stem=[*first.prompt_ids, *first.generated_ids])
    assert run(scheduler, runner, second) == 30 - 22, "K and V of the last generated token are not there"


def test_a_request_that_wants_every_row_computes_every_row():
    scheduler, runner = engine()
    run(scheduler, runner, request(0, 16, 3))
    again = request(0, 16, 3)
    again.reads_cache = False
    assert run(scheduler, runner, again) == 16


def test_salts_and_regimes_are_apart():
    scheduler, runner = engine()
    salted = [request(0, 16, 3) for _ in range(4)]
    salts = ["a", "b", "a", None]
    for r, salt in zip(salted, salts, strict=True):
        r.cache_salt = salt
    assert [run(scheduler, runner, r) for r in salted] == [16, 16, 1, 16]
    scheduler, runner = engine()
    cache = PrefixCache(scheduler.pool, regime_of=lambda length: length > 20)
    scheduler = Scheduler(scheduler.config, scheduler.pool, cache=cache)
    lengths = [20, 21, 20, 22]
    assert [run(scheduler, runner, request(0, n, 3, stem=prompt_of(22, 0))) for n in lengths] == [20, 21, 1, 1]


def test_switched_off_nothing_is_shared():
    scheduler, runner = engine(caching=False, num_slots=2)
    assert run(scheduler, runner, request(0, 16, 3), request(0, 16, 3)) == 32
    assert run(scheduler, runner, request(0, 16, 3)) == 16
    assert scheduler.pool.num_free_pages() == scheduler.pool.num_usable_pages


@pytest.mark.parametrize("num_pages", [10, 17])
def test_a_preempted_request_computes_little_again(num_pages):
    """Three sequences of 6 pages; what of a preempted one the others did not need is found again."""
    computed = {}
    for caching in (True, False):
        scheduler, runner = engine(num_pages=num_pages, num_slots=3, budget=16, caching=caching)
        computed[caching] = run(scheduler, runner, *[request(i, 7, 15) for i in range(3)])
        assert scheduler.metrics.num_preemptions > 0
    assert computed[True] < 0.65 * computed[False]


def test_idle_pages_go_before_anybody_gives_way_and_leaves_go_first():
    scheduler, runner = engine(num_pages=11, num_slots=2)
    run(scheduler, runner, request(0, 12, 4, stem=STEM))  # 3 pages of STEM, and one of generated tokens
    run(scheduler, runner, request(1, 13, 3))  # 4 other pages, the last one not full
    assert scheduler.pool.num_free_pages() == 2
    run(scheduler, runner, request(2, 16, 4))  # needs 5, so the oldest 3 go: the last pages behind STEM
    assert scheduler.metrics.num_preemptions == 0
    left = request(3, 12, 1, stem=STEM)
    scheduler.add(left)
    assert scheduler._cache.find(left).num_tokens == PAGE_LEN, "the first page is the one that most sequences share"
    old = request(1, 13, 3)
    assert scheduler._cache.find(old).num_tokens == 12


def test_who_waits_for_a_beginning_lets_others_pass_and_keeps_its_place():
    scheduler, runner = engine(num_slots=8, budget=12)
    leader, follower, other = request(0, 18, 4, stem=STEM), request(1, 18, 4, stem=STEM), request(2, 4, 4)
    for r in (leader, follower, other):
        scheduler.add(r)
    plan = scheduler.plan()
    assert [chunk.slot for chunk in plan.prefill_chunks] == [leader.slot], "no budget is left for the other one"
    scheduler.commit(plan, runner.fetch(runner.dispatch(plan)))
    plan = scheduler.plan()
    assert [chunk.slot for chunk in plan.prefill_chunks] == [leader.slot, other.slot]
    scheduler.commit(plan, runner.fetch(runner.dispatch(plan)))
    plan = scheduler.plan()
    assert [(c.slot, c.num_history_tokens) for c in plan.prefill_chunks] == [(follower.slot, 16)]


def test_a_step_looks_at_few_of_those_who_wait_for_a_beginning(monkeypatch):
    scheduler, _ = engine(num_slots=30, budget=400)
    for i in range(100):
        scheduler.add(request(i, 18, 4, stem=STEM))
    asked, find = [], scheduler._cache.find
    monkeypatch.setattr(scheduler._cache, "find", lambda r: asked.append(r) or find(r))
    scheduler.plan()
    assert len(asked) == 1 + MAX_PASSED_OVER
    scheduler.plan()
    assert len(asked) == 1 + MAX_PASSED_OVER, "nothing has changed for those who wait"


def test_who_waits_for_a_request_that_goes_away_goes_on_alone():
    scheduler, runner = engine(num_slots=2, budget=8)
    leader, follower = request(0, 18, 4, stem=STEM), request(1, 18, 4, stem=STEM)
    cancel = {1: [lambda: scheduler.cancel(leader)]}
    drive(scheduler, runner, 1, {0: [lambda: scheduler.add(leader), lambda: scheduler.add(follower)]} | cancel)
    assert follower.generated_ids == continuation(follower.prompt_ids, follower.max_len)
    assert follower.num_cached_tokens == 8, "what the leader's committed step has left"


def test_bad_numbers_are_not_found_and_their_pages_are_zeroed_when_the_last_one_lets_go():
    """The bad request and a good one share pages that the bad one computed."""
    scheduler, runner = engine(runner_type=FetchesFlags, num_slots=2)
    runner.not_finite = {0: 22}
    bad, good = request(0, 18, 20, stem=STEM), request(1, 18, 12, stem=STEM)
    stepper, dirty = Stepper(scheduler, runner), []
    dispatch = runner.dispatch
    runner.dispatch = lambda plan: dirty.extend(plan.dirty_pages) or dispatch(plan)
    scheduler.add(bad)
    scheduler.add(good)
    while bad.finish_reason is None:
        shared = list(bad.page_ids)[:4]
        stepper.step()
    assert bad.finish_reason == "error"
    assert good.page_ids[:4] == shared
    late = request(2, 18, 2, stem=STEM)
    assert scheduler._cache.find(late).num_tokens == 0
    while good.finish_reason is None:
        assert not set(dirty) & set(shared), "they are still read"
        stepper.step()
    scheduler.add(late)
    while not stepper.is_idle:
        stepper.step()
    assert set(shared) <= set(dirty)
    for r in (good, late):
        assert r.generated_ids == continuation(r.prompt_ids, r.max_len)


def test_pages_that_a_bad_request_only_shared_stay():
    scheduler, runner = engine(runner_type=FetchesFlags)
    runner.not_finite = {1: 20}
    stepper, dirty = Stepper(scheduler, runner), []
    dispatch = runner.dispatch
    runner.dispatch = lambda plan: dirty.extend(plan.dirty_pages) or dispatch(plan)
    requests = [request(i, 18, 6, stem=STEM) for i in range(3)]
    for r in requests:
        scheduler.add(r)
        while not stepper.is_idle:
            stepper.step()
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    assert [r.num_cached_tokens for r in requests] == [0, 16, 16]
    assert requests[2].generated_ids == continuation(requests[2].prompt_ids, 24)
    assert dirty, "its own pages are zeroed"
    assert runner.num_resets == 0


def test_a_failed_step_empties_the_cache():
    scheduler, runner = engine(runner_type=FaultyRunner)
    stepper = Stepper(scheduler, runner)
    scheduler.add(request(0, 16, 3))
    while not stepper.is_idle:
        stepper.step()
    assert scheduler._cache.num_pages > 0
    runner.transient = {runner.num_dispatched: "fetch"}
    again = request(0, 16, 3)
    scheduler.add(again)
    stepper.step()
    assert again.num_cached_tokens == 15
    stepper.step()
    assert runner.num_resets == 1
    assert scheduler._cache.num_pages == 0
    scheduler.check_integrity()
    while not stepper.is_idle:
        stepper.step()
    assert again.generated_ids == continuation(again.prompt_ids, again.max_len)


def test_a_page_that_two_computed_stays_with_both():
    """Greedy twins without a common full page in their prompts compute the same pages side by side."""
    scheduler, runner = engine(num_slots=2)
    twins = [request(0, 4, 20), request(0, 4, 20)]
    run(scheduler, runner, *twins)
    next_turn = request(1, 30, 3, stem=[*twins[0].prompt_ids, *twins[0].generated_ids])
    assert run(scheduler, runner, next_turn) == 30 - 23
    assert np.array_equal(twins[0].generated_ids, twins[1].generated_ids)
