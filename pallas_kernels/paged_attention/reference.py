"""Paged attention in plain JAX with online softmax over fixed ranges of keys: the oracle, and what CPUs run.

A range that a row cannot see leaves the row's running state bitwise as it was, so loops may run as far as the longest
row needs and a row's result does not depend on its neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_cache.pages import KVPages
from pallas_kernels.kv_cache.quantise import dequantise

# Keys of a range. A prefill tile's scores and dequantised keys stay in a core's L2; a decode row takes a page of 64 at
# a time, which needs no transpose and wastes little on short contexts.
PREFILL_KEYS_PER_RANGE, DECODE_KEYS_PER_RANGE = 256, 64
ROWS_PER_TILE = 128
MINUS_INF = -1e30  # finite, so that the difference of two of them is 0 and not NaN


class Running(NamedTuple):
    """Online softmax of rows [..., M]: maximum, sum, and weighted values [..., M, H]."""

    top: jax.Array
    total: jax.Array
    acc: jax.Array


class Options(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None


def gather(pages: KVPages, layer: jax.Array, page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 keys and values [B, K, S * page_len, H] of pages [B, S]; one gather each, no layer is sliced out."""

    def side(stored: jax.Array, params: jax.Array | None, bits: int) -> jax.Array:
        x = dequantise(stored[layer, page_ids], None if params is None else params[layer, page_ids], bits)
        b, s, k, t, h = x.shape
        return x.transpose(0, 2, 1, 3, 4).reshape(b, k, s * t, h)

    return side(pages.k, pages.k_params, pages.k_bits), side(pages.v, pages.v_params, pages.v_bits)


def start(lead: tuple[int, ...], head_dim: int, sinks: jax.Array | None) -> Running:
    """The state before any key; a sink is a key seen already that has no value. `sinks` broadcasts to `lead`."""
    acc = jnp.zeros((*lead, head_dim), jnp.float32)
    if sinks is None:
        return Running(jnp.full(lead, MINUS_INF), jnp.zeros(lead), acc)
    return Running(jnp.broadcast_to(sinks.astype(jnp.float32), lead), jnp.ones(lead), acc)


def absorb(state: Running, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, options: Options) -> Running:
    """Takes one range of keys into the running softmax.

    Args:
        state: of rows [B, K, M].
        q: float32 [B, K, M, H].
        k, v: float32 [B, K, S, H].
        visible: bool, broadcasts to [B, K, M, S].
        options: the score function.
    """
    batch = ((0, 1), (0, 1))
    scores = lax.dot_general(q, k, (((3,), (3,)), batch)) * options.scale
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    scores = jnp.where(visible, scores, MINUS_INF)
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    p = jnp.where(visible, jnp.exp(scores - top[..., None]), 0.0)
    keep = jnp.exp(state.top - top)
    acc = state.acc * keep[..., None] + lax.dot_general(p, v, (((3,), (2,)), batch))
    return Running(top, state.total * keep + jnp.sum(p, axis=-1), acc)


def finish(state: Running) -> jax.Array:
    """acc / total, zeros for rows that saw nothing."""
    return state.acc / jnp.where(state.total > 0, state.total, 1.0)[..., None]


def padded_tables(tables: jax.Array, page_len: int, keys_per_range: int) -> tuple[jax.Array, int]:
    """Tables widened to whole ranges, and the pages of a range."""
    pages_per_range = max(1, keys_per_range // page_len)
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages_per_range))), pages_per_range


def see(positions: jax.Array, keys: jax.Array, window: int | None) -> jax.Array:
    """bool [..., M, S]: which key positions [S] a row at `positions` [..., M] sees; position -1 sees none."""
    ahead = positions[..., None] - keys.reshape((1,) * positions.ndim + (-1,))
    return (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)


def first_range(lowest_position: jax.Array, window: int | None, keys_per_range: int) -> jax.Array:
    """The first range that a row at this position, or any behind it, can see."""
    if window is None:
        return jnp.int32(0)
    return jnp.maximum(lowest_position - window + 1, 0) // keys_per_range


def reference_decode(
    q: jax.Array, pages: KVPages, layer: jax.Array, tables: jax.Array, lengths: jax.Array,
    scale: float, window: int | None, softcap: float | None, sinks: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """See `paged_decode_attention`."""
    num_rows, _, head_dim = q.shape
    num_kv = pages.num_kv_heads
    tables, pages_per_range = padded_tables(tables, pages.page_len, DECODE_KEYS_PER_RANGE)
    keys_per_range = pages_per_range * pages.page_len
    grouped = q.astype(jnp.float32).reshape(num_rows, num_kv, -1, head_dim)
    positions = jnp.broadcast_to(lengths[:, None, None] - 1, grouped.shape[:3])
    options = Options(scale, window, softcap)

    def body(i: jax.Array, state: Running) -> Running:
        page_ids = lax.dynamic_slice_in_dim(tables, i * pages_per_range, pages_per_range, axis=1)
        k, v = gather(pages, layer, page_ids)
        keys = i * keys_per_range + jnp.arange(keys_per_range, dtype=jnp.int32)
        return absorb(state, grouped, k, v, see(positions, keys, window), options)

    begin = first_range(jnp.min(jnp.where(lengths > 0, lengths - 1, jnp.iinfo(jnp.int32).max)), window, keys_per_range)
    end = (jnp.max(lengths) + keys_per_range - 1) // keys_per_range
    per_head = None if sinks is None else sinks.reshape(1, num_kv, -1)
    state = lax.fori_loop(begin, end, body, start(grouped.shape[:3], head_dim, per_head))
    return finish(state).reshape(q.shape).astype(q.dtype)


def reference_prefill(
    q: jax.Array, pages: KVPages, layer: jax.Array, tables: jax.Array, starts: jax.Array, history_lens: jax.Array,
    scale: float, window: int | None, softcap: float | None, sinks: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """See `paged_prefill_attention`: tiles of rows in order, each over the ranges of keys that it can see."""
    num_rows, num_heads, head_dim = q.shape
    num_kv, tile = pages.num_kv_heads, min(ROWS_PER_TILE, num_rows)
    group = num_heads // num_kv
    tables, pages_per_range = padded_tables(tables, pages.page_len, PREFILL_KEYS_PER_RANGE)
    keys_per_range = pages_per_range * pages.page_len
    options = Options(scale, window, softcap)
    q_padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    chunk_lens = starts[1:] - starts[:-1]
    tiles_end = jnp.cumsum((chunk_lens + tile - 1) // tile)
    per_head = None if sinks is None else jnp.repeat(sinks.reshape(num_kv, group), tile, axis=1)[None]

    def one_tile(t: jax.Array, out: jax.Array) -> jax.Array:
        chunk = jnp.sum(t >= tiles_end)
        first = tile * (t - jnp.where(chunk > 0, tiles_end[jnp.maximum(chunk - 1, 0)], 0))  # within the chunk
        row = starts[chunk] + first
        local = first + jnp.arange(tile, dtype=jnp.int32)
        valid = local < chunk_lens[chunk]
        positions = jnp.where(valid, history_lens[chunk] + local, -1)
        rows = lax.dynamic_slice_in_dim(q_padded, row, tile).astype(jnp.float32)
        grouped = rows.reshape(tile, num_kv, group, head_dim).transpose(1, 2, 0, 3).reshape(1, num_kv, -1, head_dim)

        def body(i: jax.Array, state: Running) -> Running:
            page_ids = lax.dynamic_slice(tables, (chunk, i * pages_per_range), (1, pages_per_range))
            k, v = gather(pages, layer, page_ids)
            keys = i * keys_per_range + jnp.arange(keys_per_range, dtype=jnp.int32)
            visible = jnp.tile(see(positions, keys, window), (group, 1))
            return absorb(state, grouped, k, v, visible[None, None], options)

        begin = first_range(history_lens[chunk] + first, window, keys_per_range)
        end = jnp.max(positions) // keys_per_range + 1
        state = lax.fori_loop(begin, end, body, start(grouped.shape[:3], head_dim, per_head))
        y = (
            finish(state)
            .reshape(num_kv, group, tile, head_dim)
            .transpose(2, 0, 1, 3)
            .reshape(tile, num_heads, head_dim)
        )
        # Rows behind the chunk's end are zeroed here and belong to later tiles, or to nobody.
        return lax.dynamic_update_slice_in_dim(out, jnp.where(valid[:, None, None], y, 0.0).astype(q.dtype), row, 0)

    out = lax.fori_loop(0, tiles_end[-1], one_tile, jnp.zeros_like(q_padded))
    return out[:num_rows]
