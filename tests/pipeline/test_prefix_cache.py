"""The prefix cache as callers see it: tokens that were found, tenants apart, samples of one prompt."""

import pytest

from tests.engine.fake import VOCAB, FakeRunner
from turbojax.api import Pipeline
from turbojax.configs import GenerationConfig
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.scheduler import Scheduler

PROMPT = list(range(14))  # three pages and a half


def config(**fields):
    return GenerationConfig(max_new_tokens=6, ignore_eos=True, **fields)


@pytest.fixture
def pipe():
    runner, pool = FakeRunner(4, page_len=4), BlockPool(60, 4)
    scheduler = Scheduler(SchedulerConfig(4, 100, 16, runner.max_prefill_chunks, 2), pool, cache=PrefixCache(pool))
    with Pipeline(runner, scheduler, None, vocab_size=VOCAB, eos_ids=()) as pipe:
        yield pipe


def test_a_response_says_how_much_of_its_prompt_was_found(pipe):
    first, second = pipe(PROMPT, config()), pipe(PROMPT, config())
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 13)
    assert first.token_ids == second.token_ids
    pieces = list(pipe.stream_infer([*PROMPT, *first.token_ids, 1], config()))
    assert {piece.num_cached_tokens for piece in pieces} == {14 + 5}
    assert pipe.metrics.num_cached_tokens == 13 + 19


def test_tenants_with_salts_find_nothing_of_each_other(pipe):
    salts = ["a", "b", None, "a", "b", None]
    found = [pipe(PROMPT, config(cache_salt=salt)).num_cached_tokens for salt in salts]
    assert found == [0, 0, 0, 13, 13, 13]


def test_samples_share_their_prompt(pipe):
    responses = pipe(PROMPT, config(do_sample=True, random_seed=1, n=4))
    assert [response.num_cached_tokens for response in responses] == [0, 13, 13, 13]
