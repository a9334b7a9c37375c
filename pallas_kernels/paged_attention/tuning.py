"""How attention kernels cut their work: what they can run, and the configuration for a shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.kv_cache.pages import KVPages
from pallas_kernels.paged_attention.decode_kernel import DecodeConfig
from pallas_kernels.paged_attention.tiles import ceil_div, power_of_2

MAX_GROUP = 64
NUM_SMS = 132
PROGRAMS_PER_SM = 4


def kernel_problem(q: jax.Array, pages: KVPages) -> str | None:
    """Why the attention kernels cannot run on these arrays; None where they can."""
    if problem := backend.capability_problem():
        return problem
    if pages.page_len < 16 or pages.page_len != power_of_2(pages.page_len):
        return f"page_len {pages.page_len} is no power of two of at least 16"
    if q.shape[1] // pages.num_kv_heads > MAX_GROUP:
        return f"{q.shape[1] // pages.num_kv_heads} query heads per kv head are more than {MAX_GROUP}"
    for name, array, bits in (("k", pages.k, pages.k_bits), ("v", pages.v, pages.v_bits)):
        if bits == 16 and array.dtype not in (jnp.bfloat16, jnp.float16):
            return f"16-bit {name} pages hold {array.dtype}, and tensor cores take bfloat16 or float16"
    return None


def decode_config(q: jax.Array, pages: KVPages, table_len: int) -> DecodeConfig:
    """The cut for a shape: long ranges where the batch alone fills the GPU, short ones where it does not."""
    programs = q.shape[0] * pages.num_kv_heads
    capacity = table_len * pages.page_len
    pages_per_step = max(1, 64 // pages.page_len)
    step = pages_per_step * pages.page_len
    wanted = ceil_div(NUM_SMS * PROGRAMS_PER_SM, programs)
    range_len = min(2048, max(step, power_of_2(ceil_div(capacity, wanted))))
    if range_len < step or range_len % step:
        range_len = step
    return DecodeConfig(range_len, pages_per_step, num_warps=4, num_stages=4)
