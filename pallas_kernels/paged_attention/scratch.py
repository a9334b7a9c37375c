"""Dequantised copies of pages, for prefills whose rows outnumber the work of making them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_cache.pages import KVPages
from pallas_kernels.kv_cache.quantise import dequantise

MAX_KEYS_PER_ROW = 4  # table entries are dequantised whether used or not: worth it where rows are as many as keys
MAX_BYTES = 1 << 30


def pays(num_rows: int, pages: KVPages, tables: jax.Array) -> bool:
    """Whether a 16-bit copy of every page in the tables costs little beside the attention of `num_rows` rows."""
    num_keys = tables.size * pages.page_len
    num_bytes = 4 * num_keys * pages.num_kv_heads * pages.head_dim
    quantised = pages.k_bits != 16 and pages.v_bits != 16
    return quantised and num_keys <= MAX_KEYS_PER_ROW * num_rows and num_bytes <= MAX_BYTES


def dequantised_pages(pages: KVPages, layer: jax.Array, tables: jax.Array) -> tuple[KVPages, jax.Array]:
    """One layer of float16 pages [1, C * S, ...] in the order of the tables [C, S], and the tables that say so."""

    def side(stored: jax.Array, params: jax.Array, bits: int) -> jax.Array:
        return dequantise(stored[layer, flat], params[layer, flat], bits).astype(jnp.float16)[None]

    assert pages.k_params is not None, "see `pays`"
    assert pages.v_params is not None, "see `pays`"
    flat = tables.reshape(-1)
    k, v = side(pages.k, pages.k_params, pages.k_bits), side(pages.v, pages.v_params, pages.v_bits)
    in_order = jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape)
    return KVPages(k, v, None, None, 16, 16, pages.head_dim), in_order
