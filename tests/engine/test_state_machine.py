"""Any order of arrivals, cancels, time-outs, failures and steps: pages are held once or free, requests end once."""

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.fake import continuation, prompt_of
from tests.engine.faulty import FetchesFlags
from tests.engine.harness import check_plan, make, setups, stop_id_sets
from turbojax.engine.plan import SamplingParams
from turbojax.engine.request import Request, Status
from turbojax.engine.stepper import Stepper
from turbojax.errors import EngineFailedError, NumericsError, RequestTimeoutError, SlotError, StepFailedError

# Prompts begin as one of these does, so that they share pages.
STEMS = [prompt_of(16, 1000 + i) for i in range(2)]
ERRORS_OF_ITS_OWN = (NumericsError, SlotError, StepFailedError)

arrivals = st.fixed_dictionaries(
    {
        "stem": st.sampled_from(STEMS),
        "stem_len": st.integers(0, 16),
        "tail_len": st.integers(1, 6),
        "num_new": st.integers(1, 20),
        "num_samples": st.sampled_from([1, 1, 1, 3]),
        "salt": st.sampled_from([None, None, "tenant"]),
        "priority": st.integers(-2, 2),
        "time": st.none() | st.integers(0, 20),
        "word_at": st.none() | st.integers(1, 10),  # its sink ends it here, as a stop word would
        "fault": st.none() | st.tuples(st.sampled_from(["poison", "not_finite"]), st.integers(2, 40)),
    }
)


class Engine(RuleBasedStateMachine):
    """The scheduler and the stepper on a runner that refuses what a real pool could not serve, and fails as told."""

    @initialize(setup=setups, stop_ids=stop_id_sets, names_slots=st.booleans(), num_passes=st.integers(1, 40))
    def start(self, setup, stop_ids, names_slots, num_passes):
        self.scheduler, self.runner = make(**setup, runner_type=FetchesFlags)
        self.runner.names_slots = names_slots
        self.scheduler.waiting._admissions_per_level = num_passes
        self.stepper, self.dispatch = Stepper(self.scheduler, self.runner), self.runner.dispatch
        self.runner.dispatch = self.checked_dispatch
        self.scheduler.endings.on_end = lambda request: self.ends.update([request])
        self.stop_ids, self.now_s, self.failure = tuple(stop_ids), 0, None
        self.requests, self.words = [], {}
        self.heard, self.ends = {}, Counter()

    def checked_dispatch(self, plan):
        check_plan(self.scheduler, plan)
        return self.dispatch(plan)

    # -- what happens -------------------------------------------------------------------------------------

    @precondition(lambda self: self.failure is None)
    @rule(arrival=arrivals)
    def arrive(self, arrival):
        tail = prompt_of(arrival["tail_len"], len(self.requests))
        prompt = np.concatenate([arrival["stem"][: arrival["stem_len"]], tail])
        for sample_index in range(arrival["num_samples"]):
            self.arrive_one(arrival, prompt, sample_index)

    def arrive_one(self, arrival, prompt, sample_index):
        number = len(self.requests)
        sampling = SamplingParams(seed=number, sample_index=sample_index)
        r = Request(number, prompt, sampling, self.stop_ids, len(prompt) + arrival["num_new"])
        r.priority, r.cache_salt = arrival["priority"], arrival["salt"]
        r.deadline_s = None if arrival["time"] is None else self.now_s + arrival["time"]
        r.sink = lambda progress: self.hear(r, progress)
        self.requests.append(r)
        self.heard[r], self.words[r] = [], arrival["word_at"]
        if arrival["fault"] is not None:
            kind, length = arrival["fault"]
            getattr(self.runner, kind)[number] = length
        self.scheduler.add(r)

    def hear(self, r, progress):
        assert not self.heard[r] or self.heard[r][-1].finish_reason is None, "it had ended"
        self.heard[r].append(progress)
        return self.words[r] is not None and len(r.generated_ids) >= self.words[r]

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 10**6))
    def cancel(self, pick):
        self.scheduler.cancel(self.requests[pick % len(self.requests)])

    @rule()
    def cancel_one_that_never_came(self):
        self.scheduler.cancel(Request(-1, STEMS[0], SamplingParams(), (), 20))

    @rule(seconds=st.integers(0, 12))
    def pass_time(self, seconds):
        self.now_s += seconds
        self.scheduler.expire(self.now_s)

    @rule(place=st.sampled_from(["dispatch", "fetch"]))
    def break_the_next_step(self, place):
        self.runner.transient[self.runner.num_dispatched] = place

    @precondition(lambda self: self.failure is None)
    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps):
        try:
            for _ in range(num_steps):
                self.stepper.step()
                self.holds()
        except EngineFailedError as failure:  # more failures in a row than it takes
            self.failure = failure
            self.scheduler.fail_all(failure)

    # -- what holds ---------------------------------------------------------------------------------------

    @invariant()
    def holds(self):
        self.scheduler.check_integrity()
        self.pages_are_counted()
        for r in self.requests:
            assert self.ends[r] == (r.finish_reason is not None), "every request ends exactly once"
            assert (r.status in (Status.RETIRING, Status.FINISHED)) == (self.ends[r] == 1)
            assert (r in self.scheduler.waiting) == (r.status is Status.WAITING)
        metrics = self.scheduler.metrics
        num_ended = metrics.num_finished_requests + metrics.num_failed_requests
        num_ended += metrics.num_cancelled_requests + metrics.num_timed_out_requests
        assert num_ended == self.ends.total()

    def pages_are_counted(self):
        """Free, used and cached pages are all pages, each is one of these; no step names one that nobody holds."""
        pool = self.scheduler.pool
        holders = Counter(page for r in self.requests for page in r.page_ids)
        assert all(r.slot < 0 for r in self.requests if r.status in (Status.WAITING, Status.FINISHED))
        assert all(pool._references[0][page] == holders[page] for page in range(pool.num_pages))
        free, cached = set(pool._free[0]), set(pool._idle[0])
        assert len(free) == len(pool._free[0]), "a page is free twice"
        assert len(free) + len(holders) + len(cached) == pool.num_usable_pages
        assert len(free | holders.keys() | cached) == pool.num_usable_pages
        for step in self.runner.in_flight if self.failure is None else ():
            for slot in step:
                assert (free | cached).isdisjoint(self.runner.slots[slot]["table"]), "a step in flight lost a page"

    def teardown(self):
        """Whatever happened, the requests that are left run to their ends and all pages are free again."""
        if not hasattr(self, "requests"):
            return
        num_left = 3000
        while self.failure is None and not self.stepper.is_idle:
            self.step(1)
            num_left -= 1
            assert num_left, "no progress"
        assert self.scheduler.is_idle
        assert self.scheduler.pool.num_available_pages() == self.scheduler.pool.num_usable_pages
        for r in self.requests:
            self.check_end(r)

    def check_end(self, r):
        assert r.status is Status.FINISHED
        whole, got, pieces = continuation(r.prompt_ids, r.max_len, self.stop_ids), r.generated_ids, self.heard[r]
        assert got == whole[: len(got)]
        assert [token for piece in pieces for token in piece.token_ids] == got
        error = pieces[-1].error if pieces else None
        if r.finish_reason == "cancelled":
            assert error is None
        elif r.finish_reason == "timeout":
            assert isinstance(error, RequestTimeoutError)
            assert r.deadline_s <= self.now_s
        elif r.finish_reason == "error":
            assert error is self.failure or isinstance(error, ERRORS_OF_ITS_OWN)
            assert error is self.failure or r.request_id in self.runner.poison.keys() | self.runner.not_finite.keys()
        else:
            assert error is None
            assert got == whole or len(got) >= self.words[r]


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
