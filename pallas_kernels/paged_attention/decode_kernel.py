"""Decode attention in Pallas-Triton: split over fixed ranges of keys, then merged by log-sum-exp.

One program takes one range of one sequence and one kv head, with its group of query heads as the rows of the dots.
Ranges are cut at multiples of `range_len`, never by what else is in the batch. The scales of quantised keys multiply
scores and those of values multiply probabilities, once a token instead of once an element; sums over keys stay spread
over the threads until the end, so that the running maximum is the only reduction of a step.
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
    Side,
    ceil_div,
    dot,
    load_vector,
    locate,
    pick,
    power_of_2,
    sides,
)
from pallas_kernels.paged_attention.unpack import BASE, plane_factor, unpack_plane

MERGE_RANGES = 16  # ranges that the merge reads at a time
P_SHIFT = 4.0  # probabilities are 2**4 too large: times a small value scale they stay clear of float16's subnormals


@dataclass(frozen=True)
class DecodeConfig:
    """How the kernel cuts the work: keys of a range, pages of a step, warps, load stages.

    `prefetch` reads the parameters of the next step's tokens while this step's are used.
    """

    range_len: int
    pages_per_step: int
    num_warps: int
    num_stages: int
    prefetch: bool = True
    keys_left: bool = False


@dataclass(frozen=True)
class Problem:
    """Everything static: shapes, score function, how to cut."""

    batch: int
    num_kv_heads: int
    group: int
    table_len: int
    k: Side
    v: Side
    scale: float
    window: int | None
    softcap: float | None
    range_len: int
    pages_per_step: int
    prefetch: bool
    keys_left: bool
    interpret: bool

    @property
    def key_axis(self) -> int:
        return 0 if self.keys_left else 1

    @property
    def rows(self) -> int:
        """Query rows of a dot: its left operand has at least 16, its right one 8."""
        return max(8 if self.keys_left else 16, power_of_2(self.group))

    def by_key(self, x: jax.Array) -> jax.Array:
        return jnp.expand_dims(x, 1 - self.key_axis)

    def by_row(self, x: jax.Array) -> jax.Array:
        return jnp.expand_dims(x, self.key_axis)

    def tile_shape(self, keys: int) -> tuple[int, int]:
        return (keys, self.rows) if self.keys_left else (self.rows, keys)

    @property
    def max_ranges(self) -> int:
        """Ranges that a row can touch; a window of w keys lies in at most ceil((w - 1) / range_len) + 1."""
        in_table = ceil_div(self.table_len * self.k.page_len, self.range_len)
        if self.window is None:
            return in_table
        return min(in_table, ceil_div(self.window - 1, self.range_len) + 1)

    def lowest_key(self, lengths: jax.Array) -> jax.Array:
        """The first key that a row of this length sees."""
        return jnp.zeros_like(lengths) if self.window is None else jnp.maximum(lengths - self.window, 0)

    def ranges(self, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First range and number of ranges of rows of these lengths."""
        first = self.lowest_key(lengths) // self.range_len
        return first, ceil_div(lengths, self.range_len) - first

    def score(self, raw: jax.Array) -> jax.Array:
        """Scores times log2(e), of q.k times `raw_scale`."""
        if self.softcap is None:
            return raw
        return self.softcap * LOG2_E * jnp.tanh(raw / self.softcap)

    @property
    def raw_scale(self) -> float:
        return self.scale * LOG2_E if self.softcap is None else self.scale


def _load_query(q_ref: Any, row: jax.Array, head: jax.Array, p: Problem) -> list[jax.Array]:
    """The group's queries as planes [rows, padded], rows and columns beyond the group and the plane zero."""
    rows = jnp.arange(p.rows, dtype=jnp.int32)
    planes = []
    for j in range(p.k.planes):
        columns, real = p.k.columns(j)
        at = jnp.broadcast_arrays((head * p.group + jnp.minimum(rows, p.group - 1))[:, None], columns[None, :])
        mask = (rows < p.group)[:, None] & real[None, :]
        planes.append(backend.masked_load(q_ref.at[row, at[0], at[1]], mask=mask, other=0.0))
    return planes


class _Keys:
    """Scores of a tile of keys against the queries of a program."""

    def __init__(self, query: list[jax.Array], dtype: Any, p: Problem):
        self.p = p
        self.quantised = p.k.bits != 16
        if not self.quantised:
            self.planes = [q.astype(dtype) for q in query]
            return
        exact = [q.astype(jnp.float32) for q in query]
        factors = [plane_factor(p.k.bits, j) for j in range(p.k.planes)]
        self.planes = [(q / f).astype(jnp.float16) for q, f in zip(exact, factors, strict=True)]
        self.sum = functools.reduce(jnp.add, [jnp.sum(q, axis=1) for q in exact]) * p.raw_scale
        self.base = functools.reduce(jnp.add, [jnp.sum(q.astype(jnp.float32), axis=1) for q in self.planes]) * -BASE

    def scores(self, tile: jax.Array, params: tuple[jax.Array, ...]) -> jax.Array:
        """float32 [rows, T], in powers of two."""
        p, shape = self.p, self.p.tile_shape(tile.shape[0])
        if not self.quantised:
            return p.score(self._dot(self.planes[0], tile, jnp.zeros(shape, jnp.float32)) * p.raw_scale)
        acc = jnp.broadcast_to(p.by_row(self.base), shape)
        for j, q in enumerate(self.planes):
            codes = unpack_plane(tile, bits=p.k.bits, plane=j, keep_base=True, interpret=p.interpret)
            acc = self._dot(q, codes, acc)
        scale, offset = (x.astype(jnp.float32) for x in params)
        return p.score(acc * p.by_key(scale * p.raw_scale) + p.by_row(self.sum) * p.by_key(offset))

    def _dot(self, q: jax.Array, keys: jax.Array, acc: jax.Array) -> jax.Array:
        return dot(keys, q, (1, 1), acc) if self.p.keys_left else dot(q, keys, (1, 1), acc)


class _Reader:
    """Pages of one sequence and head by their number in its block table; numbers beyond it read its last page."""

    def __init__(self, refs: dict[str, Any], p: Problem, row: jax.Array, head: jax.Array):
        self.refs, self.p, self.row, self.head = refs, p, row, head
        self.layer = refs["layer"][0]

    def _page(self, number: jax.Array) -> jax.Array:
        return self.refs["tables"][self.row, jnp.minimum(number, self.p.table_len - 1)]

    def keys(self, number: jax.Array) -> jax.Array:
        return self.p.k.tile(self.refs["k"], self.layer, self._page(number), self.head)

    def values(self, number: jax.Array) -> jax.Array:
        read = self.p.v.tile_transposed if self.p.keys_left else self.p.v.tile
        return read(self.refs["v"], self.layer, self._page(number), self.head)

    def params(self, number: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Parameters of K and of V, empty for 16 bits."""
        page = self._page(number)
        k, v = (
            side.params(self.refs[name], self.layer, page, self.head) if side.bits != 16 else ()
            for side, name in ((self.p.k, "k_params"), (self.p.v, "v_params"))
        )
        return k, v


def _attend(
    refs: dict[str, Any], p: Problem, row: jax.Array, head: jax.Array, low: jax.Array, high: jax.Array
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Attention over keys low .. high - 1 of a row: maximum and sum [rows], unnormalised output planes."""
    reader = _Reader(refs, p, row, head)
    keys = _Keys(_load_query(refs["q"], row, head, p), refs["k"].dtype, p)
    v_quantised = p.v.bits != 16
    page_len = p.k.page_len
    offsets = jnp.arange(page_len, dtype=jnp.int32)

    def body(i: jax.Array, carry: Any) -> Any:
        top, total, shift, outs, params = carry
        pages = [i * p.pages_per_step + n for n in range(p.pages_per_step)]
        if not p.prefetch:
            params = [reader.params(page) for page in pages]
        scores = [keys.scores(reader.keys(page), k_params) for page, (k_params, _) in zip(pages, params, strict=True)]
        for n, page in enumerate(pages):
            key = page * page_len + offsets
            visible = (key < high) if p.window is None else (key < high) & (key >= low)
            scores[n] = jnp.where(p.by_key(visible), scores[n], MINUS_INF)
        new_top = jnp.maximum(top, jnp.max(functools.reduce(jnp.maximum, scores), axis=p.key_axis))
        keep = jnp.exp2(top - new_top)
        probs = [jnp.exp2(s - p.by_row(new_top - P_SHIFT)) for s in scores]
        total = functools.reduce(jnp.add, probs, total * p.by_row(keep))
        outs = [o * p.by_row(keep) for o in outs]
        if v_quantised:
            shift = shift * p.by_row(keep)
        for page, prob, (_, v_params) in zip(pages, probs, params, strict=True):
            words = reader.values(page)
            if v_quantised:
                scale, offset = (x.astype(jnp.float32) for x in v_params)
                shift = shift + prob * p.by_key(offset)
                prob = prob * p.by_key(scale)
            for j in range(p.v.planes):
                values = words
                if v_quantised:
                    values = unpack_plane(words, bits=p.v.bits, plane=j, keep_base=False, interpret=p.interpret)
                prob16 = prob.astype(values.dtype)
                outs[j] = dot(*((values, prob16) if p.keys_left else (prob16, values)), (1, 0), outs[j])
        if p.prefetch:
            params = [reader.params(page + p.pages_per_step) for page in pages]
        return new_top, total, shift, outs, params

    step_len = page_len * p.pages_per_step
    begin, end = low // step_len, ceil_div(high, step_len)
    zeros = jnp.zeros(p.tile_shape(page_len), jnp.float32)
    first = [reader.params(begin * p.pages_per_step + n) for n in range(p.pages_per_step)] if p.prefetch else []
    outs = [jnp.zeros(p.tile_shape(p.v.padded), jnp.float32) for _ in range(p.v.planes)]
    start = (jnp.full((p.rows,), MINUS_INF, jnp.float32), zeros, zeros if v_quantised else (), outs, first)
    top, total, shift, outs, _ = lax.fori_loop(begin, end, body, start)
    if p.keys_left:
        outs = [o.T for o in outs]
    if v_quantised:
        added = jnp.sum(shift, axis=p.key_axis)[:, None]
        outs = [o * (1 / plane_factor(p.v.bits, j)) + added for j, o in enumerate(outs)]
    return top - P_SHIFT, jnp.sum(total, axis=p.key_axis), outs


def _store(ref: Any, lead: tuple[Any, ...], head: jax.Array, planes: list[jax.Array], p: Problem, valid: Any) -> None:
    """Writes planes [rows, padded] to ref[*lead[:1], heads of the group, *lead[1:], H]."""
    rows = jnp.arange(planes[0].shape[0], dtype=jnp.int32)
    columns = jnp.arange(p.v.padded, dtype=jnp.int32)
    real = columns < p.v.width
    for j, plane in enumerate(planes):
        # Masked places keep indices of their own: the interpreter writes old values back there.
        at = jnp.broadcast_arrays((head * p.group + rows)[:, None], (j * p.v.width + columns)[None, :])
        mask = (rows < p.group)[:, None] & real[None, :] & valid
        where = ref.at[(lead[0], at[0], *lead[1:], at[1])]
        backend.masked_store(where, plane.astype(ref.dtype), mask=mask)


def _whole_kernel(*args: Any, names: tuple[str, ...], p: Problem) -> None:
    """One program a sequence and kv head: its only range, straight into the output."""
    refs = dict(zip(names, args, strict=True))
    row, head = pl.program_id(0) // p.num_kv_heads, pl.program_id(0) % p.num_kv_heads
    length = refs["lengths"][row]
    top, total, planes = _attend(refs, p, row, head, p.lowest_key(length), length)
    if "sinks" in refs:
        rows = jnp.minimum(jnp.arange(top.shape[0], dtype=jnp.int32), p.group - 1)
        sink = refs["sinks"][head * p.group + rows] * LOG2_E
        new_top = jnp.maximum(top, sink)
        planes = [o * jnp.exp2(top - new_top)[:, None] for o in planes]
        total = total * jnp.exp2(top - new_top) + jnp.exp2(sink - new_top)
    inverse = 1.0 / jnp.where(total > 0, total, 1.0)
    _store(refs["out"], (row,), head, [o * inverse[:, None] for o in planes], p, True)


def _range_kernel(*args: Any, names: tuple[str, ...], p: Problem) -> None:
    """One program a range and kv head; programs beyond the batch's last range do nothing."""
    refs = dict(zip(names, args, strict=True))
    item, head = pl.program_id(0) // p.num_kv_heads, pl.program_id(0) % p.num_kv_heads
    lengths = load_vector(refs["lengths"], 0, p.batch)
    first, counts = p.ranges(lengths)
    row, number, total_items = locate(item, counts)
    valid = item < total_items
    length = pick(lengths, row)
    begin = (pick(first, row) + number) * p.range_len
    high = jnp.minimum(begin + p.range_len, length)
    low = jnp.minimum(jnp.maximum(begin, p.lowest_key(length)), high)  # a program without work has low = high = 0
    row = jnp.minimum(row, p.batch - 1)
    top, total, planes = _attend(refs, p, row, head, low, high)
    slot = jnp.minimum(number, p.max_ranges - 1)
    safe = jnp.where(total > 0, total, 1.0)
    _store(refs["partial"], (row, slot), head, [o / safe[:, None] for o in planes], p, valid)
    rows = jnp.arange(top.shape[0], dtype=jnp.int32)
    backend.masked_store(refs["lse"].at[row, head * p.group + rows, slot], top + jnp.log2(safe), mask=(rows < p.group) & valid)


def _merge_kernel(*args: Any, names: tuple[str, ...], p: Problem) -> None:
    """One program a sequence and query head: the ranges' outputs, weighted by their share of the softmax's sum."""
    refs = dict(zip(names, args, strict=True))
    row, head = pl.program_id(0), pl.program_id(1)
    count = p.ranges(refs["lengths"][row])[1]
    index = jnp.arange(MERGE_RANGES, dtype=jnp.int32)
    head_dim = p.k.head_dim
    columns = jnp.arange(power_of_2(head_dim), dtype=jnp.int32)
    safe_columns = jnp.minimum(columns, head_dim - 1)

    def body(i: jax.Array, carry: Any) -> Any:
        top, total, acc = carry
        ranges = i * MERGE_RANGES + index
        slots, real = jnp.minimum(ranges, p.max_ranges - 1), ranges < count
        lse = backend.masked_load(refs["lse"].at[row, head, slots], mask=real, other=MINUS_INF)
        at = jnp.broadcast_arrays(slots[:, None], safe_columns[None, :])
        mask = jnp.broadcast_to(real[:, None], at[0].shape)
        part = backend.masked_load(refs["partial"].at[row, head, at[0], at[1]], mask=mask, other=0.0)
        new_top = jnp.maximum(top, jnp.max(lse))
        keep, weight = jnp.exp2(top - new_top), jnp.where(real, jnp.exp2(lse - new_top), 0.0)
        return new_top, total * keep + jnp.sum(weight), acc * keep + jnp.sum(part * weight[:, None], axis=0)

    if "sinks" in refs:
        start = (refs["sinks"][head] * LOG2_E, jnp.float32(1.0))
    else:
        start = (jnp.float32(MINUS_INF), jnp.float32(0.0))
    acc = jnp.zeros(columns.shape, jnp.float32)
    _, total, acc = lax.fori_loop(0, ceil_div(count, MERGE_RANGES), body, (*start, acc))
    y = (acc / jnp.where(total > 0, total, 1.0)).astype(refs["out"].dtype)
    backend.masked_store(refs["out"].at[row, head, columns], y, mask=columns < head_dim)


def decode_attention(
    q: jax.Array, pages: KVPages, layer: jax.Array, tables: jax.Array, lengths: jax.Array,
    scale: float, window: int | None, softcap: float | None, sinks: jax.Array | None,
    config: DecodeConfig, interpret: bool,
) -> jax.Array:  # fmt: skip
    """See `paged_decode_attention`."""
    batch, num_heads, head_dim = q.shape
    k, v = sides(pages)
    problem = Problem(
        batch, pages.num_kv_heads, num_heads // pages.num_kv_heads, tables.shape[1], k, v, scale, window, softcap,
        config.range_len, config.pages_per_step, config.prefetch, config.keys_left, interpret,
    )  # fmt: skip
    inputs = {"layer": layer.reshape(1), "tables": tables, "lengths": lengths, "q": q, "k": pages.k, "v": pages.v}
    inputs |= {"k_params": pages.k_params} if pages.k_params is not None else {}
    inputs |= {"v_params": pages.v_params} if pages.v_params is not None else {}
    sink = {} if sinks is None else {"sinks": sinks}
    call = functools.partial(_call, problem=problem, interpret=interpret)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    slots = problem.max_ranges
    if slots == 1:
        grid = (batch * pages.num_kv_heads,)
        (y,) = call(_whole_kernel, inputs | sink, {"out": out}, grid, config.num_warps, config.num_stages)
        return y
    parts = {
        "partial": jax.ShapeDtypeStruct((batch, num_heads, slots, head_dim), jnp.float32),
        "lse": jax.ShapeDtypeStruct((batch, num_heads, slots), jnp.float32),
    }
    grid = (batch * slots * pages.num_kv_heads,)
    partial, lse = call(_range_kernel, inputs, parts, grid, config.num_warps, config.num_stages)
    merged = {"lengths": lengths, "partial": partial, "lse": lse} | sink
    (y,) = call(_merge_kernel, merged, {"out": out}, (batch, num_heads), 4, 2)
    return y


def _call(
    kernel: Any, inputs: dict[str, Any], outputs: dict[str, Any], grid: tuple[int, ...], num_warps: int,
    num_stages: int, *, problem: Problem, interpret: bool,
) -> list[jax.Array]:  # fmt: skip
    """pallas_call with refs by name."""
    names = (*inputs, *outputs)
    return pl.pallas_call(
        functools.partial(kernel, names=names, p=problem),
        grid=grid,
        out_shape=list(outputs.values()),
        compiler_params=backend.compiler_params(num_warps, num_stages),
        interpret=interpret,
        name="paged_decode" + kernel.__name__.removesuffix("_kernel"),
    )(*inputs.values())
