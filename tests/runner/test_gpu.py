"""On an NVIDIA GPU: an engine's first steps take no second pool."""

import jax
import pytest

from turbojax.assembly import assemble_model
from turbojax.buckets import StepShape
from turbojax.configs import EngineConfig
from turbojax.engine.plan import StepPlan
from turbojax.models.random_model import random_model

pytestmark = pytest.mark.gpu
POOL_BYTES = 4 << 30


def test_fresh_state_is_updated_in_place_from_the_first_step_on():
    """The peak of a run beside weights, pool and workspace; a pool takes most of a GPU, so there is no room for two."""
    model = random_model("tiny", "w4", dtype="bfloat16", kv_bits=(8, 8))
    page_bytes = assemble_model(model, EngineConfig(quant_policy=8, cache_max_entry_count=2)).memory.page_bytes
    config = EngineConfig(quant_policy=8, max_batch_size=4, cache_max_entry_count=POOL_BYTES // page_bytes)
    parts = assemble_model(model, config)
    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    for shape in (StepShape(1), StepShape(4), StepShape(0, parts.runner.buckets.prefill_tokens[0], 1)):
        parts.runner._run(StepPlan(step_id=-1), shape)
        jax.block_until_ready(parts.runner._state)
    peak = device.memory_stats()["peak_bytes_in_use"]
    assert before > POOL_BYTES * 0.9
    assert peak - before < POOL_BYTES / 4, f"{(peak - before) / POOL_BYTES:.2f} of the pool beside it"
