"""What a pipeline and its responses say of the engine: how it stands, and how long a request waited."""

import time

from tests.pipeline.harness import GEN, make, wait_until_idle
from turbojax.configs import GenerationConfig

LONG = GenerationConfig(max_new_tokens=12, ignore_eos=True)


def test_every_piece_says_when_its_request_took_a_slot():
    with make(num_slots=1) as pipe:
        before = time.monotonic()
        pieces = list(pipe.stream_infer([[1, 2], [3]], GEN))
        started = [{p.started_s for p in pieces if p.index == i} for i in (0, 1)]
        assert all(len(times) == 1 for times in started)
        assert before <= min(started[0]) < min(started[1]) <= time.monotonic()


def test_a_whole_response_says_it_too_and_one_that_never_ran_does_not():
    with make(num_slots=1) as pipe:
        first, second = pipe([[1, 2], [3]], [GEN, GenerationConfig(max_new_tokens=4, timeout_s=1e-9)])
        assert first.started_s is not None
        assert (second.finish_reason, second.started_s) == ("timeout", None)


def test_every_piece_says_when_it_was_made_and_when_the_first_token_came():
    with make(num_slots=1) as pipe:
        before = time.monotonic()
        pieces = list(pipe.stream_infer([1, 2], LONG))
        (first,) = {p.first_token_s for p in pieces}
        made = [p.made_s for p in pieces]
        assert made == sorted(made)
        assert before <= pieces[0].started_s <= first <= made[0] < made[-1] <= time.monotonic()
        whole = pipe([1, 2], LONG)
        assert whole.started_s <= whole.first_token_s < whole.made_s, "whole, it knows of its first token all the same"


def test_one_that_never_had_a_token_says_so():
    with make(num_slots=1) as pipe:
        late = pipe([1, 2], GenerationConfig(max_new_tokens=4, timeout_s=1e-9))
        assert (late.first_token_s, late.token_ids) == (None, [])
        assert late.made_s > 0


def test_responses_that_differ_in_time_alone_are_equal():
    with make() as pipe:
        first, second = pipe([1, 2], GEN), pipe([1, 2], GEN)
        assert first == second
        assert first.started_s < second.started_s


def test_a_pipeline_has_the_status_of_its_engine():
    with make(num_slots=1, num_pages=60) as pipe:
        stream = pipe.stream_infer([[1, 2], [3]], GEN)
        next(stream)
        status = pipe.status
        assert status.num_pages == 59
        assert status.num_running + status.num_waiting in (1, 2)
        stream.close()
        assert wait_until_idle(pipe)
        assert pipe.status == (0, 0, 0, 0, 59, 0.0, None)
    assert "closed" in pipe.status.failure
