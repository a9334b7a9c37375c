"""Dequantised copies of the pages in use, for prefill: a page is read by many tiles of rows, and unpacked once."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.kv_cache.pages import KVPages
from pallas_kernels.paged_attention.tiles import Side, call_kernel, read_block, sides

MAX_COPY_BYTES = 1 << 30  # the memory plan counts with it


@dataclass(frozen=True)
class _Copy:
    """Everything static: the sides, table entries of a chunk, pages of a step of the attention kernel."""

    k: Side
    v: Side
    table_len: int
    pages_per_step: int
    interpret: bool


def pays(pages: KVPages, tables: jax.Array) -> bool:
    """Whether pages are quantised and a 16-bit copy of all in the tables is small enough.

    Pages behind a chunk's last key cost nothing. 64 rows over 8k keys of 4 bits: 151 us with the copy, 279 without.
    """
    num_bytes = 4 * tables.size * pages.page_len * pages.num_kv_heads * pages.head_dim
    return (pages.k_bits != 16 or pages.v_bits != 16) and num_bytes <= MAX_COPY_BYTES


def _kernel(*args: Any, names: tuple[str, ...], p: _Copy) -> None:
    """One program a page and kv head; steps behind a chunk's last key are left as they are.

    The last step is copied whole: its hidden keys have probability 0, and 0 times what was never written may be NaN.
    """
    refs = dict(zip(names, args, strict=True))
    entry, head = pl.program_id(0), pl.program_id(1)
    chunk, number = entry // p.table_len, entry % p.table_len
    num_keys = refs["history"][chunk] + refs["starts"][chunk + 1] - refs["starts"][chunk]

    @pl.when(number // p.pages_per_step * p.pages_per_step * p.k.page_len < num_keys)
    def _() -> None:
        page = (refs["tables"][chunk, number],)
        tokens = jnp.arange(p.k.page_len, dtype=jnp.int32)
        for side, name in ((p.k, "k"), (p.v, "v")):
            columns = jnp.arange(side.padded, dtype=jnp.int32)
            for j, plane in enumerate(read_block(side, name, refs, page, head, p.interpret)):
                out = refs["new_" + name]
                at = jnp.broadcast_arrays(tokens[:, None], (j * side.width + columns)[None, :])
                mask = None if side.padded == side.width else jnp.broadcast_to(columns < side.width, at[0].shape)
                backend.masked_store(out.at[0, entry, head, at[0], at[1]], plane.astype(out.dtype), mask=mask)


def dequantised_pages(
    pages: KVPages, layer: jax.Array, tables: jax.Array, starts: jax.Array, history_lens: jax.Array, dtype: jnp.dtype,
    pages_per_step: int, interpret: bool,
) -> tuple[KVPages, jax.Array]:  # fmt: skip
    """One layer of 16-bit pages [1, C * S, ...] in the order of the tables [C, S], and the tables that say so.

    Pages in steps (of `pages_per_step`) behind a chunk's last key are undefined.
    """
    p = _Copy(*sides(pages), tables.shape[1], pages_per_step, interpret)
    shape = (1, tables.size, pages.num_kv_heads, pages.page_len, pages.head_dim)
    inputs = {"layer": layer.reshape(1), "tables": tables, "starts": starts, "history": history_lens, "k": pages.k,
              "v": pages.v, "k_params": pages.k_params, "v_params": pages.v_params}  # fmt: skip
    found = call_kernel(
        functools.partial(_kernel, p=p), "paged_prefill_copy", (tables.size, pages.num_kv_heads), inputs,
        {name: jax.ShapeDtypeStruct(shape, dtype) for name in ("new_k", "new_v")}, num_warps=4, num_stages=1,
        interpret=interpret,
    )  # fmt: skip
    in_order = jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape)
    return KVPages(found["new_k"], found["new_v"], None, None, 16, 16, pages.head_dim), in_order
