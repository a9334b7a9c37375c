"""Prefill attention in Pallas-Triton: causal chunks against pages, one tile of query rows of one head a program.

Each page is dequantised to float16 on its way from shared memory into the dot, so that a page costs its bytes and two
instructions per two codes; pages that every row of the tile sees are taken without a mask.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.kv_cache.pages import KVPages
from pallas_kernels.paged_attention.tiles import (
    LOG2_E,
    MINUS_INF,
    ScoreFunction,
    Side,
    call_kernel,
    ceil_div,
    dot,
    load_vector,
    locate,
    pick,
    sides,
)
from pallas_kernels.paged_attention.unpack import dequantise_plane


@dataclass(frozen=True)
class PrefillConfig:
    """Query rows of a program, pages of a step, warps, load stages."""

    tile_rows: int
    pages_per_step: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Problem:
    """Everything static."""

    num_rows: int
    num_chunks: int
    num_heads: int
    group: int
    table_len: int
    k: Side
    v: Side
    function: ScoreFunction
    tile_rows: int
    pages_per_step: int
    interpret: bool


@dataclass(frozen=True)
class _Tile:
    """The rows of a program: their chunk, their places in q, their positions and the steps over the keys they see."""

    chunk: jax.Array
    rows: jax.Array
    row_end: jax.Array
    positions: jax.Array
    steps: tuple[jax.Array, jax.Array, jax.Array]


def _find_tile(refs: dict[str, Any], p: Problem, item: jax.Array) -> _Tile:
    """Tile `item`, the latest positions of each chunk first; tiles beyond the last zero the padding behind the chunks.

    `steps` are where to begin, where those end whose keys every row sees, and where those end that any row sees.
    """
    m, c = p.tile_rows, p.num_chunks
    starts, ends = load_vector(refs["starts"], 0, c), load_vector(refs["starts"], 1, c)
    counts = ceil_div(ends - starts, m)
    chunk, number = locate(item, counts)
    num_tiles = jnp.sum(counts)
    real = item < num_tiles
    first = jnp.where(real, (pick(counts, chunk) - 1 - number) * m, 0)
    begin = jnp.where(real, pick(starts, chunk) + first, refs["starts"][c] + (item - num_tiles) * m)
    row_end = jnp.where(real, pick(ends, chunk), p.num_rows)
    history = pick(load_vector(refs["history"], 0, c), chunk)
    offsets = jnp.arange(m, dtype=jnp.int32)
    last = history + jnp.minimum(first + m, row_end - begin + first) - 1
    step_len = p.k.page_len * p.pages_per_step
    step = p.function.lowest_key(history + first) // step_len
    seen_by_all = step if p.function.window is not None else (history + first + 1) // step_len
    steps = tuple(jnp.where(real, x, 0) for x in (step, seen_by_all, last // step_len + 1))
    return _Tile(jnp.minimum(chunk, c - 1), begin + offsets, row_end, history + first + offsets, steps)  # type: ignore[arg-type]


def _planes(side: Side, stored: jax.Array, params: Any, interpret: bool) -> list[jax.Array]:
    """float16 values [page_len, padded] of each plane of a page."""
    if side.bits == 16:
        return [stored]
    scale, offset = (jnp.broadcast_to(x[:, None], stored.shape) for x in params)
    return [
        dequantise_plane(stored, scale, offset, bits=side.bits, plane=j, interpret=interpret)
        for j in range(side.planes)
    ]


def _kernel(*args: Any, names: tuple[str, ...], p: Problem) -> None:
    refs = dict(zip(names, args, strict=True))
    tile = _find_tile(refs, p, pl.program_id(0))
    head = pl.program_id(1)
    layer, kv_head = refs["layer"][0], head // p.group
    valid = tile.rows < tile.row_end
    dtype = refs["k"].dtype if p.k.bits == 16 else jnp.float16
    query = []
    for j in range(p.k.planes):
        columns, real = p.k.columns(j)
        at = jnp.broadcast_arrays(jnp.minimum(tile.rows, p.num_rows - 1)[:, None], columns[None, :])
        mask = valid[:, None] & real[None, :]
        query.append(backend.masked_load(refs["q"].at[at[0], head, at[1]], mask=mask, other=0.0).astype(dtype))
    keys = jnp.arange(p.k.page_len, dtype=jnp.int32)

    def read(side: Side, name: str, page: jax.Array) -> list[jax.Array]:
        stored = side.tile(refs[name], layer, page, kv_head)
        params = None if side.bits == 16 else side.params(refs[name + "_params"], layer, page, kv_head)
        return _planes(side, stored, params, p.interpret)

    def body(masked: bool, i: jax.Array, carry: Any) -> Any:
        top, total, outs = carry
        unit, all_scores = p.function.unit, []
        numbers = [i * p.pages_per_step + n for n in range(p.pages_per_step)]
        pages = [refs["tables"][tile.chunk, jnp.minimum(number, p.table_len - 1)] for number in numbers]
        for number, page in zip(numbers, pages, strict=True):
            scores = jnp.zeros((p.tile_rows, p.k.page_len), jnp.float32)
            for q, k in zip(query, read(p.k, "k", page), strict=True):
                scores = dot(q, k, (1, 1), scores)
            scores = p.function.bend(scores)
            if masked:
                ahead = tile.positions[:, None] - (number * p.k.page_len + keys)[None, :]
                window = p.function.window
                visible = (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)
                scores = jnp.where(visible, scores, MINUS_INF)
            all_scores.append(scores)
        new_top = jnp.maximum(top, jnp.max(functools.reduce(jnp.maximum, all_scores), axis=1) * unit)
        keep = jnp.exp2(top - new_top)
        probs = [jnp.exp2(scores * unit - new_top[:, None]) for scores in all_scores]
        total = total * keep + jnp.sum(functools.reduce(jnp.add, probs), axis=1)
        outs = [o * keep[:, None] for o in outs]
        for page, prob in zip(pages, probs, strict=True):
            values = read(p.v, "v", page)
            outs = [dot(prob.astype(v.dtype), v, (1, 0), o) for o, v in zip(outs, values, strict=True)]
        return new_top, total, outs

    if "sinks" in refs:
        top = jnp.broadcast_to(refs["sinks"][head] * LOG2_E, (p.tile_rows,))
        total = jnp.ones((p.tile_rows,), jnp.float32)
    else:
        top = jnp.full((p.tile_rows,), MINUS_INF, jnp.float32)
        total = jnp.zeros((p.tile_rows,), jnp.float32)
    outs = [jnp.zeros((p.tile_rows, p.v.padded), jnp.float32) for _ in range(p.v.planes)]
    begin, middle, end = tile.steps
    carry = (top, total, outs)
    if p.function.window is None:
        carry = lax.fori_loop(begin, middle, functools.partial(body, False), carry)
    _, total, outs = lax.fori_loop(middle, end, functools.partial(body, True), carry)
    inverse = 1.0 / jnp.where(total > 0, total, 1.0)
    columns = jnp.arange(p.v.padded, dtype=jnp.int32)
    for j, out in enumerate(outs):
        at = jnp.broadcast_arrays(tile.rows[:, None], (j * p.v.width + columns)[None, :])
        mask = valid[:, None] & (columns < p.v.width)[None, :]
        y = (out * inverse[:, None]).astype(refs["out"].dtype)
        backend.masked_store(refs["out"].at[at[0], head, at[1]], y, mask=mask)


def prefill_attention(
    q: jax.Array, pages: KVPages, layer: jax.Array, tables: jax.Array, starts: jax.Array, history_lens: jax.Array,
    function: ScoreFunction, sinks: jax.Array | None, config: PrefillConfig, interpret: bool,
) -> jax.Array:  # fmt: skip
    """See `paged_prefill_attention`."""
    num_rows, num_heads, _ = q.shape
    num_chunks = history_lens.shape[0]
    p = Problem(
        num_rows, num_chunks, num_heads, num_heads // pages.num_kv_heads, tables.shape[1], *sides(pages), function,
        config.tile_rows, config.pages_per_step, interpret,
    )  # fmt: skip
    inputs = {"layer": layer.reshape(1), "tables": tables, "starts": starts, "history": history_lens, "q": q,
              "k": pages.k, "v": pages.v, "k_params": pages.k_params, "v_params": pages.v_params,
              "sinks": sinks}  # fmt: skip
    # Chunks leave at most one tile each partly filled: this many tiles hold any split, and the padding behind it.
    grid = (ceil_div(num_rows, config.tile_rows) + num_chunks, num_heads)
    out = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    return call_kernel(
        functools.partial(_kernel, p=p), "paged_prefill", grid, inputs, out, num_warps=config.num_warps,
        num_stages=config.num_stages, interpret=interpret,
    )["out"]  # fmt: skip
