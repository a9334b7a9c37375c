"""One budget of a step for decode rows and prompts: whatever is planned has a compiled shape."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.harness import PAGE_LEN, StrictRunner, drive, request
from turbojax.buckets import Buckets
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import EVEN, LEAST_SHARE, SchedulerConfig
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.scheduler import Scheduler


class ShapedRunner(StrictRunner):
    """Refuses a step that no program was compiled for, and keeps the shapes of those that it runs."""

    def __init__(self, buckets, *args):
        super().__init__(*args)
        self.buckets, self.shapes, self.max_prefill_chunks = buckets, [], buckets.max_chunks

    def dispatch(self, plan):
        num_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill_chunks)
        shape = self.buckets.shape_of(len(plan.decode_slots), num_tokens, len(plan.prefill_chunks), 1)
        self.shapes.append(shape)
        return super().dispatch(plan)


def run(prompt_lens, *, num_slots, budget, num_new=6, parity_len=math.inf):
    buckets = Buckets.of(
        max_batch_size=num_slots, max_prefill_tokens=budget, num_decode_steps=1, min_prefill_tokens=8, page_len=PAGE_LEN
    )
    pool = BlockPool(400, PAGE_LEN)
    runner = ShapedRunner(buckets, num_slots, PAGE_LEN, pool)
    config = SchedulerConfig(num_slots, 300, budget, buckets.max_chunks, mixed=buckets.mixed, parity_len=parity_len)
    scheduler = Scheduler(config, pool, cache=PrefixCache(pool, is_enabled=False))
    for number, length in enumerate(prompt_lens):
        scheduler.add(request(number, length, num_new))
    drive(scheduler, runner, depth=1)
    return runner.shapes


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=24), st.integers(1, 40), st.sampled_from([4, 8, 16, 60, 128]))
def test_every_step_has_a_shape(prompt_lens, num_slots, budget):
    run(prompt_lens, num_slots=num_slots, budget=budget)


def test_decode_rows_and_chunks_fill_a_size_together():
    """A long prompt beside streams: as many rows a step as it has alone, but for the rest of a page."""
    shapes = run([4] * 8 + [200], num_slots=9, budget=32, num_new=40)
    mixed = [shape for shape in shapes if shape.num_chunks and shape.num_decode_slots]
    assert max(shape.num_rows for shape in mixed) == 9 + (32 - 9) // PAGE_LEN * PAGE_LEN


def test_chunks_get_smaller_behind_a_long_history_where_streams_wait_for_them():
    shapes = run([4] * 8 + [280], num_slots=9, budget=128, num_new=40, parity_len=1000)
    sizes = [shape.num_prefill_tokens for shape in shapes if shape.num_chunks and shape.num_decode_slots]
    sizes = sizes[sizes.index(116) :]  # the first step has little but the short prompts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] >= sizes[0] / LEAST_SHARE


def test_chunks_stay_large_where_nobody_waits():
    shapes = run([280], num_slots=9, budget=128, parity_len=40)
    assert [shape.num_prefill_tokens for shape in shapes if shape.num_chunks] == [128, 128, 32]


@given(st.integers(1, 64), st.integers(0, 10**6), st.integers(1, 10**5))
def test_a_step_behind_a_history_takes_about_as_long_as_one_without(num_decoding, history_len, parity_len):
    buckets = Buckets.of(max_batch_size=64, max_prefill_tokens=512, num_decode_steps=1, page_len=16)
    config = SchedulerConfig(64, 10**7, 512, 8, mixed=buckets.mixed, parity_len=parity_len)
    most, tokens = (config.most_prefill_tokens(num_decoding, length) for length in (0, history_len))
    shape, largest = (buckets.shape_of(num_decoding, n, 1, 1) for n in (tokens, most))
    assert most / LEAST_SHARE <= tokens <= most
    if tokens > most / 2:  # not the smallest that there may be
        assert shape.num_rows + tokens * history_len / parity_len <= EVEN * largest.num_rows


@pytest.mark.parametrize("budget", [4, 8])
def test_slots_come_on_top_of_a_budget_that_they_would_take(budget):
    shapes = run([4] * 8 + [60], num_slots=9, budget=budget, num_new=40)
    assert max(shape.num_prefill_tokens for shape in shapes if shape.num_decode_slots) == budget
