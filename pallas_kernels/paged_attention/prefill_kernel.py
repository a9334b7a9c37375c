"""Prefill attention in Pallas-Triton: causal chunks against pages, one tile of query rows of one head a program.

Two programs of 64 rows share a multiprocessor: one's softmax runs under the other's dots, and under its own of the step
before. Keys that every row of the tile sees are taken without a mask. Quantised pages are usually copied out first (see
`scratch`); those that are not are dequantised on their way from shared memory into the dot. Where tiles are too few for
the GPU, the keys of each are cut into ranges, one a program, which are merged by log-sum-exp.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.kv_cache.pages import KVPages
from pallas_kernels.paged_attention.merge_kernel import merge_ranges
from pallas_kernels.paged_attention.tiles import (
    LOG2_E,
    MINUS_INF,
    ScoreFunction,
    Side,
    call_kernel,
    ceil_div,
    dot,
    exp2,
    load_vector,
    locate,
    pick,
    read_block,
    sides,
)


@dataclass(frozen=True)
class PrefillConfig:
    """Query rows of a program, pages of a step, warps, load stages; ranges of a tile's keys, and the least keys of one.

    A tile of few keys has fewer ranges, and the programs of the others end at once.
    """

    tile_rows: int
    pages_per_step: int
    num_warps: int
    num_stages: int
    num_ranges: int = 1
    min_range_len: int = 512


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
    num_ranges: int
    min_range_len: int
    interpret: bool

    @property
    def step_len(self) -> int:
        """Keys of a step."""
        return self.k.page_len * self.pages_per_step


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

    `steps` are the first with keys that any row sees, where those end whose keys every row sees, and where those end
    that any row sees.
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
    step = p.function.lowest_key(history + first) // p.step_len
    seen_by_all = step if p.function.window is not None else (history + first + 1) // p.step_len
    steps = tuple(jnp.where(real, x, 0) for x in (step, seen_by_all, last // p.step_len + 1))
    return _Tile(jnp.minimum(chunk, c - 1), begin + offsets, row_end, history + first + offsets, steps)  # type: ignore[arg-type]


def _range_of(p: Problem, tile: _Tile, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`steps` of one of the tile's ranges, of equal length but for the last; the same twice of an empty one."""
    begin, seen_by_all, end = tile.steps
    length = jnp.maximum(ceil_div(end - begin, p.num_ranges), ceil_div(p.min_range_len, p.step_len))
    first = jnp.minimum(begin + number * length, end)
    last = jnp.minimum(first + length, end)
    return first, jnp.minimum(seen_by_all, last), last


def _attend(
    refs: dict[str, Any], p: Problem, tile: _Tile, head: jax.Array, query: list[jax.Array], running: Any
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Maximum and sum [rows] and unnormalised planes of values [rows, padded] of a tile's steps, from the two before.

    While a step's scores become probabilities the tensor cores multiply those of the step before with its values; the
    first step multiplies zeros, and one more behind the last has no keys of its own. Page ids are read a step ahead.
    """
    keys, unit = jnp.arange(p.step_len, dtype=jnp.int32), p.function.unit
    dtype = refs["v"].dtype if p.v.bits == 16 else jnp.float16

    def pages(step: jax.Array) -> tuple[jax.Array, ...]:
        numbers = [step * p.pages_per_step + n for n in range(p.pages_per_step)]
        return tuple(refs["tables"][tile.chunk, jnp.clip(n, 0, p.table_len - 1)] for n in numbers)

    def block(side: Side, name: str, pages: tuple[jax.Array, ...]) -> list[jax.Array]:
        return read_block(side, name, refs, pages, head, p.interpret)

    def hide(scores: jax.Array, step: jax.Array) -> jax.Array:
        ahead = tile.positions[:, None] - (step * p.step_len + keys)[None, :]
        window = p.function.window
        visible = (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)
        if p.num_ranges > 1:
            visible &= step < end  # the keys behind are another range's
        return jnp.where(visible, scores, MINUS_INF)

    def body(i: jax.Array, carry: Any) -> Any:
        top, total, keep, prob, outs, v_pages, k_pages = carry
        prob = prob.astype(dtype)
        scores = jnp.zeros((p.tile_rows, p.step_len), jnp.float32)
        for q, k in zip(query, block(p.k, "k", k_pages), strict=True):
            scores = dot(q, k, (1, 1), scores)
        values = block(p.v, "v", v_pages)
        outs = [dot(prob, v, (1, 0), o * keep[:, None]) for o, v in zip(outs, values, strict=True)]
        scores = p.function.bend(scores)
        scores = lax.cond(i >= seen_by_all, lambda s: hide(s, i), lambda s: s, scores)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1) * unit)
        keep = exp2(top - new_top, p.interpret)
        prob = exp2(scores * unit - new_top[:, None], p.interpret)
        total = total * keep + jnp.sum(prob, axis=1)
        return new_top, total, keep, prob, outs, tuple(jnp.maximum(n, 0) for n in k_pages), pages(i + 1)

    begin, seen_by_all, end = tile.steps
    outs = [jnp.zeros((p.tile_rows, p.v.padded), jnp.float32) for _ in range(p.v.planes)]
    prob = jnp.zeros((p.tile_rows, p.step_len), jnp.float32)
    carry = (*running, jnp.ones_like(running[0]), prob, outs, pages(begin - 1), pages(begin))
    carry = lax.fori_loop(begin, jnp.where(end > begin, end + 1, begin), body, carry)
    return carry[0], carry[1], carry[4]


def _query(refs: dict[str, Any], p: Problem, tile: _Tile, head: jax.Array) -> list[jax.Array]:
    """The tile's queries of a head as planes [rows, padded]; zeros in rows and columns that are not real."""
    dtype = refs["k"].dtype if p.k.bits == 16 else jnp.float16
    rows, valid, planes = jnp.minimum(tile.rows, p.num_rows - 1), tile.rows < tile.row_end, []
    for j in range(p.k.planes):
        columns, real = p.k.columns(j)
        at = jnp.broadcast_arrays(rows[:, None], columns[None, :])
        mask = valid[:, None] & real[None, :]
        planes.append(backend.masked_load(refs["q"].at[at[0], head, at[1]], mask=mask, other=0.0).astype(dtype))
    return planes


def _store(ref: Any, p: Problem, tile: _Tile, at_head: tuple[jax.Array, ...], planes: list[jax.Array]) -> None:
    """Writes planes [rows, padded] to ref[row, *at_head, H]."""
    columns = jnp.arange(p.v.padded, dtype=jnp.int32)
    mask = (tile.rows < tile.row_end)[:, None] & (columns < p.v.width)[None, :]
    for j, plane in enumerate(planes):
        at = jnp.broadcast_arrays(tile.rows[:, None], (j * p.v.width + columns)[None, :])
        backend.masked_store(ref.at[(at[0], *at_head, at[1])], plane.astype(ref.dtype), mask=mask)


def _whole_kernel(*args: Any, names: tuple[str, ...], p: Problem) -> None:
    """One program: a tile of rows of one query head."""
    refs = dict(zip(names, args, strict=True))
    tile, head = _find_tile(refs, p, pl.program_id(0)), pl.program_id(1)
    if "sinks" in refs:
        top = jnp.broadcast_to(refs["sinks"][head] * LOG2_E, (p.tile_rows,))
        total = jnp.ones((p.tile_rows,), jnp.float32)
    else:
        top = jnp.full((p.tile_rows,), MINUS_INF, jnp.float32)
        total = jnp.zeros((p.tile_rows,), jnp.float32)
    _, total, outs = _attend(refs, p, tile, head // p.group, _query(refs, p, tile, head), (top, total))
    inverse = (1.0 / jnp.where(total > 0, total, 1.0))[:, None]
    _store(refs["out"], p, tile, (head,), [o * inverse for o in outs])


def _range_kernel(*args: Any, names: tuple[str, ...], p: Problem) -> None:
    """One program: a range of the keys of a tile of rows of one query head."""
    refs = dict(zip(names, args, strict=True))
    tile, head, number = _find_tile(refs, p, pl.program_id(0)), pl.program_id(1), pl.program_id(2)
    tile = replace(tile, steps=_range_of(p, tile, number))
    valid = tile.rows < tile.row_end
    is_empty = tile.steps[0] == tile.steps[2]

    @pl.when(is_empty)
    def _() -> None:
        nothing = jnp.full((p.tile_rows,), MINUS_INF, jnp.float32)
        backend.masked_store(refs["lse"].at[tile.rows, head, number], nothing, mask=valid)

    @pl.when(jnp.logical_not(is_empty))
    def _() -> None:
        start = jnp.full((p.tile_rows,), MINUS_INF, jnp.float32), jnp.zeros((p.tile_rows,), jnp.float32)
        top, total, outs = _attend(refs, p, tile, head // p.group, _query(refs, p, tile, head), start)
        total = jnp.where(total > 0, total, 1.0)  # rows that see none of these keys; their maximum makes them weigh 0
        inverse = (1.0 / total)[:, None]
        _store(refs["partial"], p, tile, (head, number), [o * inverse for o in outs])
        backend.masked_store(refs["lse"].at[tile.rows, head, number], top + jnp.log2(total), mask=valid)


def prefill_attention(
    q: jax.Array, pages: KVPages, layer: jax.Array, tables: jax.Array, starts: jax.Array, history_lens: jax.Array,
    function: ScoreFunction, sinks: jax.Array | None, config: PrefillConfig, interpret: bool,
) -> jax.Array:  # fmt: skip
    """See `paged_prefill_attention`."""
    num_rows, num_heads, _ = q.shape
    num_chunks = history_lens.shape[0]
    p = Problem(
        num_rows, num_chunks, num_heads, num_heads // pages.num_kv_heads, tables.shape[1], *sides(pages), function,
        config.tile_rows, config.pages_per_step, config.num_ranges, config.min_range_len, interpret,
    )  # fmt: skip
    inputs = {"layer": layer.reshape(1), "tables": tables, "starts": starts, "history": history_lens, "q": q,
              "k": pages.k, "v": pages.v, "k_params": pages.k_params, "v_params": pages.v_params}  # fmt: skip
    # Chunks leave at most one tile each partly filled: this many tiles hold any split, and the padding behind it.
    grid = (ceil_div(num_rows, config.tile_rows) + num_chunks, num_heads)
    out, f32 = jax.ShapeDtypeStruct(q.shape, q.dtype), jnp.float32
    call = functools.partial(call_kernel, num_warps=config.num_warps, num_stages=config.num_stages, interpret=interpret)
    if p.num_ranges == 1:
        kernel = functools.partial(_whole_kernel, p=p)
        return call(kernel, "paged_prefill", grid, inputs | {"sinks": sinks}, {"out": out})["out"]
    parts = {"partial": jax.ShapeDtypeStruct((num_rows, num_heads, p.num_ranges, pages.head_dim), f32),
             "lse": jax.ShapeDtypeStruct((num_rows, num_heads, p.num_ranges), f32)}  # fmt: skip
    kernel = functools.partial(_range_kernel, p=p)
    found = call(kernel, "paged_prefill_range", (*grid, p.num_ranges), inputs, parts)
    return merge_ranges(found["partial"], found["lse"], sinks, out, "paged_prefill_merge", interpret)
