"""What requests want of their rows comes once, of the right rows, and guides bound their tokens, under any load."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake import VOCAB, next_token
from tests.engine.harness import make, request
from turbojax.engine.guides import as_mask
from turbojax.engine.request import Status
from turbojax.engine.stepper import Stepper
from turbojax.engine.wants import Wants
from turbojax.errors import GuideError

EXTENTS = st.sampled_from([None, "all", "generation"])
TOPS = st.none() | st.integers(0, 2)


class Every:
    """Allows the tokens of one remainder, another at each place; ends after `length` tokens."""

    vocab_size = VOCAB

    def __init__(self, step, length=10**6, dead_end=10**6):
        self.step, self.length, self.dead_end, self.seen = step, length, dead_end, []

    def allows(self, token):
        return token % self.step == len(self.seen) % self.step

    def advance(self, token_ids):
        for token in token_ids:
            assert self.allows(token), "a token that the mask forbids"
            self.seen.append(token)

    def mask(self):
        if len(self.seen) >= self.dead_end:
            raise GuideError("no token")
        return as_mask(np.array([self.allows(token) for token in range(VOCAB)]))

    @property
    def is_finished(self):
        return len(self.seen) >= self.length


def guided_continuation(prompt, num_new, guide):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_new and not guide.is_finished:
        token = next_token(tokens)
        while not guide.allows(token):
            token = (token + 1) % VOCAB
        guide.advance([token])
        tokens.append(token)
    return tokens[len(prompt) :]


def run(scheduler, runner, requests):
    stepper, num_steps = Stepper(scheduler, runner), 0
    for r in requests:
        scheduler.add(r)
    while not stepper.is_idle:
        stepper.step()
        scheduler.check_integrity()
        num_steps += 1
        assert num_steps < 3000, "no progress"


def hear(r):
    """Keeps what the sink of a request hears."""
    heard = []
    r.sink = lambda progress: heard.append(progress)
    return heard


setups = st.fixed_dictionaries(
    {
        "num_pages": st.integers(12, 24),  # 11 pages are the longest of these requests: they give way to each other
        "num_slots": st.integers(1, 4),
        "budget": st.integers(4, 30),
        "num_decode_steps": st.sampled_from([1, 3]),
    }
)
asks = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.builds(Wants, TOPS, TOPS, EXTENTS, EXTENTS)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=100)
@given(setups, asks, st.sets(st.integers(1, 12), max_size=3))
def test_each_row_that_is_wanted_comes_once_and_in_order(setup, asks, failing):
    """Prompts are computed again behind steps that fail, in other chunks than before."""
    scheduler, runner = make(**setup)
    fetch, num_fetched = runner.fetch, count()

    def fails_sometimes(handle):
        if next(num_fetched) in failing and len(scheduler.named_in(handle.plan)) > 1:  # nobody is blamed
            raise RuntimeError("the step failed")
        return fetch(handle)

    runner.fetch = fails_sometimes
    requests = [request(i, prompt_len, num_new) for i, (prompt_len, num_new, _) in enumerate(asks)]
    heard = []
    for r, (_, _, wants) in zip(requests, asks, strict=True):
        r.wants, r.reads_cache = wants, not wants.of_prompt
        heard.append(hear(r))
    run(scheduler, runner, requests)
    for r, progress in zip(requests, heard, strict=True):
        num_prompt, num_new = len(r.prompt_ids), len(r.generated_ids)
        of_prompt = [p.prompt_outputs for p in progress if p.prompt_outputs is not None]
        of_tokens = [p.outputs for p in progress if p.outputs is not None]
        prompt_rows, token_rows = list(range(num_prompt - 1)), list(range(num_prompt - 1, num_prompt - 1 + num_new))
        wants = r.wants
        assert logprob_positions(of_prompt) == (prompt_rows if wants.num_prompt_logprobs is not None else [])
        assert logprob_positions(of_tokens) == (token_rows if wants.num_logprobs is not None else [])
        for extent, name in ((wants.logits, "logits"), (wants.hidden, "hidden")):
            assert positions(of_prompt, name) == (prompt_rows if extent == "all" else [])
            assert positions(of_tokens, name) == (token_rows if extent else [])


def positions(parts, name):
    return [int(row[0]) for part in parts if getattr(part, name) is not None for row in getattr(part, name)]


def logprob_positions(parts):
    return [-row.logprob for part in parts if part.logprobs is not None for row in part.logprobs]


@settings(max_examples=60)
@given(
    setups,
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 20), st.none() | st.integers(2, 7), st.integers(3, 30)),
        min_size=1,
        max_size=6,
    ),
)
def test_guided_and_unguided_requests_share_steps_and_give_what_they_give_alone(setup, asks):
    scheduler, runner = make(**setup)
    requests = []
    for i, (prompt_len, num_new, step, length) in enumerate(asks):
        r = request(i, prompt_len, num_new)
        r.guide = None if step is None else Every(step, length)
        requests.append(r)
    run(scheduler, runner, requests)
    for r, (_, num_new, step, length) in zip(requests, asks, strict=True):
        guide = Every(1) if step is None else Every(step, length)
        assert r.generated_ids == guided_continuation(r.prompt_ids, num_new, guide)
        assert r.finish_reason == ("stop" if guide.is_finished else "length")


def test_a_guide_without_a_token_ends_its_request_alone():
    scheduler, runner = make(num_decode_steps=2)
    bad, good = request(0, 5, 12), request(1, 5, 12)
    bad.guide, good.guide = Every(3, dead_end=4), Every(3)
    heard = hear(bad)
    run(scheduler, runner, [bad, good])
    assert (bad.finish_reason, len(bad.generated_ids)) == ("error", 4)
    assert isinstance(heard[-1].error, GuideError)
    assert good.generated_ids == guided_continuation(good.prompt_ids, 12, Every(3))
    assert runner.num_resets == 0, "no step failed"


def test_a_guided_request_that_is_cancelled_in_flight_leaves_the_others_alone():
    scheduler, runner = make(num_decode_steps=2)
    gone, stays = request(0, 5, 12), request(1, 5, 12)
    gone.guide, stays.guide = Every(3, dead_end=5), Every(3)
    heard = hear(gone)
    stays.sink = lambda progress: len(stays.generated_ids) == 5 and scheduler.cancel(gone)
    run(scheduler, runner, [gone, stays])
    assert gone.finish_reason == "cancelled"
    assert len(heard) <= 6
    assert all(progress.error is None for progress in heard), "nobody asks the guide of one that is gone"
    assert stays.generated_ids == guided_continuation(stays.prompt_ids, 12, Every(3))


def test_a_guide_that_refuses_a_token_ends_its_request():
    class Refuses(Every):
        def advance(self, token_ids):
            raise GuideError("not this one")

    scheduler, runner = make()
    r = request(0, 5, 12)
    r.guide = Refuses(1)
    run(scheduler, runner, [r])
    assert (r.status, r.finish_reason) == (Status.FINISHED, "error")


@pytest.mark.parametrize("place", ["dispatch", "pick", "fetch"])
def test_a_guided_request_survives_a_step_that_fails(place):
    scheduler, runner = make()
    requests = [request(i, 5, 12) for i in range(2)]
    for r in requests:
        r.guide = Every(3)
    inner, calls = getattr(runner, place), []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("the step failed")
        return inner(*args)

    setattr(runner, place, fails_once)
    run(scheduler, runner, requests)
    assert runner.num_resets == 1
    for r in requests:
        assert r.generated_ids == guided_continuation(r.prompt_ids, 12, Every(3))


def test_requests_that_are_not_plain_take_one_token_a_call_and_others_several():
    for wants, guide, most in ((Wants(), None, 3), (Wants(num_logprobs=0), None, 1), (Wants(), Every(2), 1)):
        scheduler, runner = make(num_decode_steps=3)
        r = request(0, 5, 12)
        r.wants, r.guide = wants, guide
        steps, dispatch = [], runner.dispatch
        runner.dispatch = lambda plan, steps=steps, dispatch=dispatch: steps.append(plan) or dispatch(plan)
        run(scheduler, runner, [r])
        assert max(plan.num_decode_steps for plan in steps) == most
