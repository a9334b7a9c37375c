"""How attention kernels cut their work: what they can run, and the configuration for a shape."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.kv_cache.pages import KVPages
from pallas_kernels.paged_attention.decode_kernel import DecodeConfig
from pallas_kernels.paged_attention.prefill_kernel import PrefillConfig

TABLE = Path(__file__).with_name("tuned.json")
MAX_GROUP = 64
PROGRAMS_PER_SM = 4
# Below these a merge costs more than a range saves: one sequence of 1k took 7.2 us in ranges of 128 and 7.3 of 64,
# 16 of them 15.4 in ranges of 256 and more than 18.5 of 128.
MIN_RANGE_LEN_ALONE, MIN_RANGE_LEN = 128, 256
TYPICAL_LEN_ALONE, TYPICAL_LEN = 16384, 1024
# Of prefill: two programs share a multiprocessor's registers. That a wave of programs writes parts of a result, and the
# merge of them, are reckoned as 0.036 of a wave over 16k keys: 8 us of 220, of which 4 (the merge) were measured.
PREFILL_PROGRAMS_PER_SM, MAX_PREFILL_RANGES, RANGE_COST = 2, 8, 0.036
MAX_PROGRAMS = 4096  # of a grid, which is as large as the tables: those past the end of a sequence are not free


def kernel_problem(q: jax.Array, pages: KVPages) -> str | None:
    """Why the attention kernels cannot run on these arrays; None where they can."""
    if problem := backend.capability_problem():
        return problem
    if pages.page_len < 16 or pages.page_len != pl.next_power_of_2(pages.page_len):
        return f"page_len {pages.page_len} is no power of two of at least 16"
    if q.shape[1] // pages.num_kv_heads > MAX_GROUP:
        return f"{q.shape[1] // pages.num_kv_heads} query heads per kv head are more than {MAX_GROUP}"
    for name, array, bits in (("k", pages.k, pages.k_bits), ("v", pages.v, pages.v_bits)):
        if bits == 16 and array.dtype not in (jnp.bfloat16, jnp.float16):
            return f"16-bit {name} pages hold {array.dtype}, and tensor cores take bfloat16 or float16"
    return None


def _tuned() -> dict[str, Any]:
    """This GPU's measured cuts, or those of the table's default for GPUs that nobody measured."""
    table = json.loads(TABLE.read_text())
    kind = backend.device_kind() if backend.on_gpu() else "default"
    return table.get(kind, table["default"])


def _num_sms() -> int:
    """Multiprocessors of the GPU that ops are traced for; a Hopper's where the device does not say (no GPU)."""
    found = getattr(jax.devices()[0], "core_count", None) if backend.on_gpu() else None
    return found or backend.HOPPER_MULTIPROCESSORS


def decode_config(q: jax.Array, pages: KVPages, table_len: int) -> DecodeConfig:
    """The cut for a shape: whole sequences where the batch alone fills the GPU, shorter ranges where it does not.

    What does not fill it gets ranges of which sequences of a typical length do, however long its tables are. KV8, 16
    sequences of 1k: 15.4 us in ranges of 256, 18.0 of 512, more than 18.5 of 128; 64 of them, which fill the GPU: 40.4
    whole, 49.0 in ranges of 512; one of 16k: 15.6 in ranges of 256, 18.9 of 512.
    """
    by_bits = _tuned()["decode"]
    bits = f"{pages.k_bits},{pages.v_bits}"
    tuned = by_bits.get(bits, by_bits[str(min(pages.k_bits, pages.v_bits))])
    batch, places, table_keys = q.shape[0], _num_sms() * PROGRAMS_PER_SM, table_len * pages.page_len
    programs = batch * pages.num_kv_heads  # of whole sequences
    shortest = max(pages.page_len, MIN_RANGE_LEN_ALONE if batch == 1 else MIN_RANGE_LEN)
    fair = programs * min(table_keys, TYPICAL_LEN_ALONE if batch == 1 else TYPICAL_LEN) / places
    fair = max(fair, programs * table_keys / MAX_PROGRAMS)
    fits = tuned["max_range_len"] if programs >= 0.9 * places else 2 ** round(math.log2(fair))
    range_len = max(shortest, min(tuned["max_range_len"], fits))
    steps = min(tuned["pages_per_step"], range_len // pages.page_len)
    return DecodeConfig(range_len, steps, tuned["num_warps"], tuned["num_stages"])


def prefill_config(q: jax.Array, pages: KVPages) -> PrefillConfig:
    """The measured cut, with fewer rows where there are fewer, and as many load stages as shared memory holds."""
    tuned = _tuned()["prefill"]
    tile_rows = min(tuned["tile_rows"], max(16, pl.next_power_of_2(q.shape[0])))
    steps = max(1, tuned["keys_per_step"] // pages.page_len)
    columns = pl.next_power_of_2(pages.head_dim)
    block = 2 * steps * pages.page_len * columns  # of keys or values, 16 bits
    stored = block * (pages.k_bits + pages.v_bits) // 16
    unpacked = block * ((pages.k_bits != 16) + (pages.v_bits != 16))
    room = backend.shared_bytes() - 2 * tile_rows * columns - unpacked
    num_stages = max(1, min(tuned["num_stages"], room // stored))
    num_ranges = prefill_ranges(-(-q.shape[0] // tile_rows) * q.shape[1])
    return PrefillConfig(tile_rows, steps, tuned["num_warps"], num_stages, num_ranges)


def prefill_ranges(num_tiles: int) -> int:
    """Ranges that the keys of each of so many tiles of one head are cut into.

    The time over many keys is a share for each range that a place of the GPU takes one after the other, and that of
    writing and merging what the ranges give. Where tiles alone leave few places empty, nothing is cut.
    """
    waves = num_tiles / (_num_sms() * PREFILL_PROGRAMS_PER_SM)
    cost = lambda n: math.ceil(waves * n) / n + (RANGE_COST * waves * n if n > 1 else 0)  # noqa: E731
    return min(range(1, MAX_PREFILL_RANGES + 1), key=cost)
