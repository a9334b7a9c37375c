"""Decode attention in Pallas-Triton: split over fixed ranges of keys, then merged by log-sum-exp.

One program takes one range of one sequence and one kv head. Ranges are cut at multiples of `range_len`, never by what
else is in the batch. Keys and values are the left operand of the dots and the group's query heads the right one: codes
become float16 in the registers that the tensor cores read, and a group of up to 8 heads costs 8 columns instead of 16
rows. The scales of quantised keys multiply scores and those of values multiply probabilities, once a token instead of
once an element; sums over keys stay spread over the threads until the end, so that the running maximum is the only
reduction of a step.
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
    sides,
)
from pallas_kernels.paged_attention.unpack import BASE, plane_factor, unpack_plane

P_SHIFT = 4.0  # probabilities are 2**4 too large: times a small value scale they stay clear of float16's subnormals
SIZE_CLASSES = 4  # last ranges go in order of their lengths, in quarters of a range


@dataclass(frozen=True)
class DecodeConfig:
    """How the kernel cuts the work: keys of a range, pages of a step, warps, load stages."""

    range_len: int
    pages_per_step: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Problem:
    """Everything static: shapes, score function, how to cut."""

    batch: int
    num_kv_heads: int
    group: int
    table_len: int
    k: Side
    v: Side
    function: ScoreFunction
    range_len: int
    pages_per_step: int
    interpret: bool

    @property
    def rows(self) -> int:
        """Query heads of a dot: its right operand has at least 8 columns."""
        return max(8, pl.next_power_of_2(self.group))

    @property
    def max_ranges(self) -> int:
        """Ranges that a row can touch; a window of w keys lies in at most ceil((w - 1) / range_len) + 1."""
        in_table = ceil_div(self.table_len * self.k.page_len, self.range_len)
        window = self.function.window
        return in_table if window is None else min(in_table, ceil_div(window - 1, self.range_len) + 1)

    def ranges(self, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First range and number of ranges of rows of these lengths."""
        first = self.function.lowest_key(lengths - 1) // self.range_len
        return first, ceil_div(lengths, self.range_len) - first


class _Reader:
    """Pages of one sequence and head by their number in its block table; numbers beyond it read its last page."""

    def __init__(self, refs: dict[str, Any], p: Problem, row: jax.Array, head: jax.Array):
        self.refs, self.p, self.row, self.head = refs, p, row, head
        self.layer = refs["layer"][0]

    def _page(self, number: jax.Array) -> jax.Array:
        return self.refs["tables"][self.row, jnp.minimum(number, self.p.table_len - 1)]

    def keys(self, number: jax.Array) -> jax.Array:
        """[page_len, padded]."""
        return self.p.k.tile(self.refs["k"], self.layer, self._page(number), self.head)

    def values(self, number: jax.Array) -> jax.Array:
        """[padded, page_len]."""
        return self.p.v.tile_transposed(self.refs["v"], self.layer, self._page(number), self.head)

    def params(self, number: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Parameters of K and of V, empty for 16 bits."""
        page = self._page(number)
        k, v = (
            side.params(self.refs[name], self.layer, page, self.head) if side.bits != 16 else ()
            for side, name in ((self.p.k, "k_params"), (self.p.v, "v_params"))
        )
        return k, v

    def query(self) -> list[jax.Array]:
        """The group's queries as planes [rows, padded], zero beyond the group and the plane."""
        p, rows, planes = self.p, jnp.arange(self.p.rows, dtype=jnp.int32), []
        heads = self.head * p.group + jnp.minimum(rows, p.group - 1)
        for j in range(p.k.planes):
            columns, real = p.k.columns(j)
            at = jnp.broadcast_arrays(heads[:, None], columns[None, :])
            mask = (rows < p.group)[:, None] & real[None, :]
            planes.append(backend.masked_load(self.refs["q"].at[self.row, at[0], at[1]], mask=mask, other=0.0))
        return planes


class _Scores:
    """Scores of tiles of keys against the queries of a program, in powers of two."""

    def __init__(self, query: list[jax.Array], dtype: Any, p: Problem):
        self.p = p
        if p.k.bits == 16:
            self.planes = [query[0].astype(dtype)]
            return
        exact = [q.astype(jnp.float32) for q in query]
        factors = [plane_factor(p.k.bits, j) for j in range(p.k.planes)]
        self.planes = [(q / f).astype(jnp.float16) for q, f in zip(exact, factors, strict=True)]
        self.sum = functools.reduce(jnp.add, [jnp.sum(q, axis=1) for q in exact]) * p.function.factor
        self.base = functools.reduce(jnp.add, [jnp.sum(q.astype(jnp.float32), axis=1) for q in self.planes]) * -BASE

    def of(self, keys: jax.Array, params: tuple[jax.Array, ...]) -> jax.Array:
        """float32 [page_len, rows]."""
        p, shape = self.p, (keys.shape[0], self.p.rows)
        if p.k.bits == 16:
            raw = dot(keys, self.planes[0], (1, 1), jnp.zeros(shape, jnp.float32))
            return p.function.finish(raw * p.function.factor)
        raw = jnp.broadcast_to(self.base[None, :], shape)
        for j, q in enumerate(self.planes):
            codes = unpack_plane(keys, bits=p.k.bits, plane=j, keep_base=True, interpret=p.interpret)
            raw = dot(codes, q, (1, 1), raw)
        scale, offset = (x.astype(jnp.float32)[:, None] for x in params)
        return p.function.finish(raw * (scale * p.function.factor) + self.sum[None, :] * offset)


def _attend(
    refs: dict[str, Any], p: Problem, row: jax.Array, head: jax.Array, low: jax.Array, high: jax.Array
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Attention over keys low .. high - 1 of a row: maximum and sum [rows], unnormalised planes [padded, rows]."""
    reader = _Reader(refs, p, row, head)
    score = _Scores(reader.query(), refs["k"].dtype, p)
    page_len, steps = p.k.page_len, p.pages_per_step
    offsets = jnp.arange(page_len, dtype=jnp.int32)

    def values_dot(page: jax.Array, prob: jax.Array, outs: list[jax.Array]) -> list[jax.Array]:
        stored = reader.values(page)
        if p.v.bits == 16:
            return [dot(stored, prob.astype(stored.dtype), (1, 0), outs[0])]
        unpack = functools.partial(unpack_plane, stored, bits=p.v.bits, keep_base=False, interpret=p.interpret)
        prob = prob.astype(jnp.float16)
        return [dot(unpack(plane=j), prob, (1, 0), o) for j, o in enumerate(outs)]

    def body(i: jax.Array, carry: Any) -> Any:
        top, total, shift, outs, params = carry
        pages = [i * steps + n for n in range(steps)]
        scores = []
        for page, (k_params, _) in zip(pages, params, strict=True):
            key = page * page_len + offsets
            visible = (key < high) if p.function.window is None else (key < high) & (key >= low)
            scores.append(jnp.where(visible[:, None], score.of(reader.keys(page), k_params), MINUS_INF))
        new_top = jnp.maximum(top, jnp.max(functools.reduce(jnp.maximum, scores), axis=0))
        keep = exp2(top - new_top, p.interpret)[None, :]
        probs = [exp2(s - (new_top - P_SHIFT)[None, :], p.interpret) for s in scores]
        total = functools.reduce(jnp.add, probs, total * keep)
        outs, shift = [o * keep for o in outs], shift * keep
        for page, prob, (_, v_params) in zip(pages, probs, params, strict=True):
            if p.v.bits != 16:
                scale, offset = (x.astype(jnp.float32)[:, None] for x in v_params)
                shift, prob = shift + prob * offset, prob * scale
            outs = values_dot(page, prob, outs)
        # The next step's parameters travel while this step's dots run.
        return new_top, total, shift, outs, [reader.params(page + steps) for page in pages]

    begin, end = low // (page_len * steps), ceil_div(high, page_len * steps)
    zeros = jnp.zeros((page_len, p.rows), jnp.float32)
    outs = [jnp.zeros((p.v.padded, p.rows), jnp.float32) for _ in range(p.v.planes)]
    params = [reader.params(begin * steps + n) for n in range(steps)]
    start = (jnp.full((p.rows,), MINUS_INF, jnp.float32), zeros, zeros, outs, params)
    top, total, shift, outs, _ = lax.fori_loop(begin, end, body, start)
    if p.v.bits != 16:
        shift = jnp.sum(shift, axis=0)[None, :]
        outs = [o * (1 / plane_factor(p.v.bits, j)) + shift for j, o in enumerate(outs)]
    return top - P_SHIFT, jnp.sum(total, axis=0), outs


def _store(ref: Any, lead: tuple[Any, ...], head: jax.Array, planes: list[jax.Array], p: Problem) -> None:
    """Writes planes [padded, rows] to ref[lead[0], heads of the group, *lead[1:], H]."""
    rows = jnp.arange(p.rows, dtype=jnp.int32)
    columns = jnp.arange(p.v.padded, dtype=jnp.int32)
    mask = (rows < p.group)[:, None] & (columns < p.v.width)[None, :]
    for j, plane in enumerate(planes):
        # Masked places keep indices of their own: the interpreter writes old values back there.
        at = jnp.broadcast_arrays((head * p.group + rows)[:, None], (j * p.v.width + columns)[None, :])
        backend.masked_store(ref.at[(lead[0], at[0], *lead[1:], at[1])], plane.T.astype(ref.dtype), mask=mask)


def _whole_kernel(*args: Any, names: tuple[str, ...], p: Problem) -> None:
    """One program a sequence and kv head: its only range, straight into the output."""
    refs = dict(zip(names, args, strict=True))
    row, head = pl.program_id(0) // p.num_kv_heads, pl.program_id(0) % p.num_kv_heads
    length = refs["lengths"][row]
    low = p.function.lowest_key(length - 1)
    top, total, planes = _attend(refs, p, row, head, low, length)
    if "sinks" in refs:
        rows = jnp.minimum(jnp.arange(p.rows, dtype=jnp.int32), p.group - 1)
        sink = refs["sinks"][head * p.group + rows] * LOG2_E
        new_top = jnp.maximum(top, sink)
        planes = [o * jnp.exp2(top - new_top)[None, :] for o in planes]
        total = total * jnp.exp2(top - new_top) + jnp.exp2(sink - new_top)
    inverse = 1.0 / jnp.where(total > 0, total, 1.0)
    _store(refs["out"], (row,), head, [o * inverse[None, :] for o in planes], p)


def _range_kernel(*args: Any, names: tuple[str, ...], p: Problem) -> None:
    """One program a range and kv head; longer ones come first, so that the shortest fill the gaps at the end."""
    refs = dict(zip(names, args, strict=True))
    item, head = pl.program_id(0) // p.num_kv_heads, pl.program_id(0) % p.num_kv_heads
    lengths = load_vector(refs["lengths"], 0, p.batch)
    first, counts = p.ranges(lengths)

    @pl.when(item < jnp.sum(counts))  # the grid is as large as the table: most programs of a ragged batch end here
    def _() -> None:
        left = lengths - jnp.maximum(first + counts - 1, 0) * p.range_len
        row, number = locate(item, counts, (left - 1) * SIZE_CLASSES // p.range_len, SIZE_CLASSES)
        length = pick(lengths, row)
        begin = (pick(first, row) + number) * p.range_len
        low = jnp.maximum(begin, p.function.lowest_key(length - 1))
        top, total, planes = _attend(refs, p, row, head, low, jnp.minimum(begin + p.range_len, length))
        _store(refs["partial"], (row, number), head, [o / total[None, :] for o in planes], p)
        rows = jnp.arange(p.rows, dtype=jnp.int32)
        where = refs["lse"].at[row, head * p.group + rows, number]
        backend.masked_store(where, top + jnp.log2(total), mask=rows < p.group)


def decode_attention(
    q: jax.Array, pages: KVPages, layer: jax.Array, tables: jax.Array, lengths: jax.Array,
    function: ScoreFunction, sinks: jax.Array | None, config: DecodeConfig, interpret: bool,
) -> jax.Array:  # fmt: skip
    """See `paged_decode_attention`."""
    batch, num_heads, head_dim = q.shape
    p = Problem(
        batch, pages.num_kv_heads, num_heads // pages.num_kv_heads, tables.shape[1], *sides(pages), function,
        config.range_len, config.pages_per_step, interpret,
    )  # fmt: skip
    inputs = {"layer": layer.reshape(1), "tables": tables, "lengths": lengths, "q": q, "k": pages.k, "v": pages.v,
              "k_params": pages.k_params, "v_params": pages.v_params}  # fmt: skip
    call = functools.partial(call_kernel, num_warps=config.num_warps, num_stages=config.num_stages, interpret=interpret)
    out, f32 = jax.ShapeDtypeStruct(q.shape, q.dtype), jnp.float32
    slots = p.max_ranges
    if slots == 1:
        kernel = functools.partial(_whole_kernel, p=p)
        grid = (batch * p.num_kv_heads,)
        return call(kernel, "paged_decode_whole", grid, inputs | {"sinks": sinks}, {"out": out})["out"]
    parts = {"partial": jax.ShapeDtypeStruct((batch, num_heads, slots, head_dim), f32),
             "lse": jax.ShapeDtypeStruct((batch, num_heads, slots), f32)}  # fmt: skip
    kernel = functools.partial(_range_kernel, p=p)
    found = call(kernel, "paged_decode_range", (batch * slots * p.num_kv_heads,), inputs, parts)
    return merge_ranges(
        found["partial"], found["lse"], sinks, out, "paged_decode_merge", interpret, lengths,
        lambda length: p.ranges(length)[1],
    )  # fmt: skip
