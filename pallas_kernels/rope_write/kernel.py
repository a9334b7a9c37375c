"""RoPE and write in Pallas-Triton: a program takes some rows of one head of q, k or v to where they are read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.kv_cache.kernel import Side, place_of, pools_of, sides_of
from pallas_kernels.kv_cache.pages import KVPages
from pallas_kernels.rope_write.hadamard import hadamard_scale, hadamard_signs
from pallas_kernels.rope_write.types import HeadNorm

MAX_ROWS = 8
DOT_ROWS = 16  # of the left operand of a dot, at least
FEW_ROWS = 32  # up to here a program takes one row: the GPU has room for all of them at once


@dataclass(frozen=True)
class Problem:
    """Everything static. Heads stand as the projection interleaves them: a kv head's q heads, its k, its v."""

    group: int
    head_dim: int
    half: int
    num_parts: int
    rows: int
    k: Side
    v: Side
    norm_eps: float
    norm_offset: float

    @property
    def padded(self) -> int:
        return pl.next_power_of_2(self.head_dim)


class _Rows:
    """Some rows of one head, read column by column; columns come in any order, as whoever stores them wants them."""

    def __init__(self, refs: dict[str, Any], p: Problem, rows: jax.Array, head: jax.Array):
        self.refs, self.p, self.rows, self.head = refs, p, rows, head
        self.layer = refs["layer"][0]

    def _load(self, ref: Any, lead: tuple[Any, ...], columns: jax.Array) -> jax.Array:
        """ref[*lead, rows, columns] in float32."""
        return ref[(*lead, *jnp.broadcast_arrays(self.rows[:, None], columns[None, :]))].astype(jnp.float32)

    def plain(self, columns: jax.Array) -> jax.Array:
        """The projection: parts summed in order, and the bias."""
        at = self.head * self.p.head_dim + columns
        x = functools.reduce(jnp.add, [self._load(self.refs["qkv"], (n,), at) for n in range(self.p.num_parts)])
        return x + self.refs["bias"][self.layer, at].astype(jnp.float32)[None, :] if "bias" in self.refs else x

    def normed(self, name: str) -> Callable[[jax.Array], jax.Array]:
        """`plain`, or its RMSNorm over the head where there is one for `name`."""
        if name not in self.refs:
            return self.plain
        column = jnp.arange(self.p.padded, dtype=jnp.int32)
        x = jnp.where((column < self.p.head_dim)[None, :], self.plain(jnp.minimum(column, self.p.head_dim - 1)), 0.0)
        scale = lax.rsqrt(jnp.sum(x * x, axis=1) / self.p.head_dim + self.p.norm_eps)

        def values(columns: jax.Array) -> jax.Array:
            gain = self.p.norm_offset + self.refs[name][self.layer, columns].astype(jnp.float32)
            return self.plain(columns) * scale[:, None] * gain[None, :]

        return values

    def rotated(self, values: Callable[[jax.Array], jax.Array], columns: jax.Array) -> jax.Array:
        """RoPE: column i < half turns with column i + half; columns from 2 * half on pass through."""
        half, x = self.p.half, values(columns)
        if half == 0:
            return x
        turns, is_low = columns < 2 * half, columns < half
        partner = jnp.where(is_low, columns + half, jnp.where(turns, columns - half, columns))
        angle = jnp.where(turns, jnp.where(is_low, columns, columns - half), 0)
        cos, sin = (self._load(self.refs[name], (), angle) for name in ("cos", "sin"))
        turned = x * cos + values(partner) * jnp.where(is_low[None, :], -sin, sin)
        return jnp.where(turns[None, :], turned, x)

    def attended(self, values: Callable[[jax.Array], jax.Array], columns: jax.Array, power: int) -> jax.Array:
        """`rotated`, times the Hadamard matrix where there is one: a dot of rows repeated to its 16.

        Before it, a scale of keys is taken to `power`: 1 for keys, -1 for queries.
        """
        if "signs" not in self.refs:
            return self.rotated(values, columns)
        p, signs = self.p, self.refs["signs"]
        dim = jnp.arange(p.padded, dtype=jnp.int32)
        inside = jnp.minimum(dim, p.head_dim - 1)
        x = self.rotated(values, inside)
        if "k_scale" in self.refs:
            scale = self.refs["k_scale"][self.layer, self.head // (p.group + 2), inside][None, :]
            x = x * scale if power == 1 else x / scale
        x = jnp.where((dim < p.head_dim)[None, :], x, 0.0).astype(signs.dtype)
        copies = max(DOT_ROWS // p.rows, 1)
        repeated = jnp.broadcast_to(x[:, None, :], (p.rows, copies, p.padded)).reshape(-1, p.padded)
        y = lax.dot_general(
            repeated, signs[tuple(jnp.broadcast_arrays(inside[:, None], columns[None, :]))], (((1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
        )  # fmt: skip
        return jnp.max(y.reshape(p.rows, copies, -1), axis=1) * hadamard_scale(p.head_dim)


def _kernel(*args: Any, names: tuple[str, ...], p: Problem) -> None:
    refs = dict(zip(names, args, strict=True))
    head = pl.program_id(1)
    kv_head, part = head // (p.group + 2), head % (p.group + 2)
    rows = pl.program_id(0) * p.rows + jnp.arange(p.rows, dtype=jnp.int32)
    all_real = jnp.full(p.rows, True)
    source = _Rows(refs, p, rows, head)

    @pl.when(part < p.group)
    def _() -> None:
        column = jnp.arange(p.padded, dtype=jnp.int32)
        real = column < p.head_dim
        x = source.attended(source.normed("q_norm"), jnp.minimum(column, p.head_dim - 1), -1)
        at = jnp.broadcast_arrays(rows[:, None], column[None, :])
        where = refs["out_q"].at[at[0], kv_head * p.group + part, at[1]]
        backend.masked_store(where, x.astype(refs["out_q"].dtype), mask=jnp.broadcast_to(real[None, :], at[0].shape))

    @pl.when(part == p.group)
    def _() -> None:
        x = source.attended(source.normed("k_norm"), p.k.columns(), 1)
        p.k.store(refs, x, place_of(refs, rows, all_real), kv_head)

    @pl.when(part == p.group + 1)
    def _() -> None:
        p.v.store(refs, source.plain(p.v.columns()), place_of(refs, rows, all_real), kv_head)


def hadamard_problem(pages: KVPages, dtype: jnp.dtype) -> str | None:
    """Why the tensor cores cannot multiply heads of this width by the matrix; None where they can."""
    padded = pl.next_power_of_2(pages.head_dim)
    return backend.dot_problem(DOT_ROWS, padded, padded, dtype.itemsize)


def kernel_rope_write(
    pages: KVPages, qkv: jax.Array, layer: jax.Array, page_ids: jax.Array, page_offsets: jax.Array, cos: jax.Array,
    sin: jax.Array, bias: jax.Array | None, norm: HeadNorm | None, dtype: jnp.dtype, hadamard: bool,
    k_scale: jax.Array | None, interpret: bool,
) -> tuple[KVPages, jax.Array]:  # fmt: skip
    """See `rope_write`."""
    num_parts, num_rows, width = qkv.shape
    heads = width // pages.head_dim
    group = heads // pages.num_kv_heads - 2
    rows = math.gcd(num_rows, min(MAX_ROWS, pl.next_power_of_2(pl.cdiv(num_rows, FEW_ROWS))))
    k, v = sides_of(pages)
    p = Problem(group, pages.head_dim, cos.shape[1], num_parts, rows, k, v,
                norm.eps if norm else 0.0, norm.offset if norm else 0.0)  # fmt: skip
    inputs: dict[str, Any] = {"layer": layer.reshape(1), "page_ids": page_ids, "page_offsets": page_offsets,
                              "qkv": qkv}  # fmt: skip
    inputs |= {"cos": cos, "sin": sin} if p.half else {}
    inputs |= {} if bias is None else {"bias": bias}
    inputs |= {} if norm is None else {"q_norm": norm.q, "k_norm": norm.k}
    inputs |= {"signs": jnp.asarray(hadamard_signs(pages.head_dim), dtype)} if hadamard else {}
    inputs |= {} if k_scale is None else {"k_scale": k_scale}
    pools = pools_of(pages)
    names = (*inputs, *pools, "out_q", *("out_" + name for name in pools))
    q = jax.ShapeDtypeStruct((num_rows, pages.num_kv_heads * group, pages.head_dim), dtype)
    q, *written = pl.pallas_call(
        functools.partial(_kernel, names=names, p=p),
        grid=(num_rows // rows, heads),
        out_shape=[q, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools.values())],
        input_output_aliases={len(inputs) + n: 1 + n for n in range(len(pools))},
        compiler_params=backend.compiler_params(1, 1),
        interpret=interpret,
        name="rope_write",
    )(*inputs.values(), *pools.values())
    return replace(pages, **dict(zip(pools, written, strict=True))), q
