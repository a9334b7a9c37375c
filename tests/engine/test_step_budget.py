"""One budget of a step for decode rows and prompts: whatever is planned has a compiled shape."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.harness import PAGE_LEN, StrictRunner, drive, request
from turbojax.buckets import Buckets
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
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


def run(prompt_lens, *, num_slots, budget, num_new=6):
    buckets = Buckets.of(
        max_batch_size=num_slots, max_prefill_tokens=budget, num_decode_steps=1, min_prefill_tokens=8, page_len=PAGE_LEN
    )
    pool = BlockPool(400, PAGE_LEN)
    runner = ShapedRunner(buckets, num_slots, PAGE_LEN, pool)
    config = SchedulerConfig(num_slots, 300, budget, buckets.max_chunks, most_beside=buckets.most_beside)
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
    """A long prompt beside streams: as many rows a step as it has alone."""
    shapes = run([4] * 8 + [200], num_slots=9, budget=32, num_new=40)
    mixed = [shape for shape in shapes if shape.num_chunks and shape.num_decode_slots]
    assert max(shape.num_rows for shape in mixed) == 32


@pytest.mark.parametrize("budget", [4, 8])
def test_slots_come_on_top_of_a_budget_that_they_would_take(budget):
    shapes = run([4] * 8 + [60], num_slots=9, budget=budget, num_new=40)
    assert max(shape.num_prefill_tokens for shape in shapes if shape.num_decode_slots) == budget
