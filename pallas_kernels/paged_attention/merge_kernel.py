"""Merges attention over ranges of keys by log-sum-exp."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.paged_attention.tiles import LOG2_E, MINUS_INF, call_kernel, ceil_div

RANGES_PER_WARP = 16  # 64 float32 a thread at H = 128
MAX_RANGES_PER_STEP = 64


def _kernel(
    *args: Any,
    names: tuple[str, ...],
    num_ranges: Callable[[jax.Array], jax.Array] | None,
    slots: int,
    head_dim: int,
    step: int,
) -> None:
    """One program a sequence and query head: its ranges' outputs, weighted by their share of the softmax's sum."""
    refs = dict(zip(names, args, strict=True))
    row, head = pl.program_id(0), pl.program_id(1)
    count: Any = slots if num_ranges is None else num_ranges(refs["lengths"][row])
    columns = jnp.arange(pl.next_power_of_2(head_dim), dtype=jnp.int32)
    real_columns = columns < head_dim

    def body(i: jax.Array, carry: Any) -> Any:
        top, total, acc = carry
        ranges = i * step + jnp.arange(step, dtype=jnp.int32)
        index, real = jnp.minimum(ranges, slots - 1), ranges < count
        lse = backend.masked_load(refs["lse"].at[row, head, index], mask=real, other=MINUS_INF)
        at = jnp.broadcast_arrays(index[:, None], jnp.minimum(columns, head_dim - 1)[None, :])
        real &= lse > MINUS_INF
        mask = real[:, None] & real_columns[None, :]
        part = backend.masked_load(refs["partial"].at[row, head, at[0], at[1]], mask=mask, other=0.0)
        new_top = jnp.maximum(top, jnp.max(lse))
        keep, weight = jnp.exp2(top - new_top), jnp.where(real, jnp.exp2(lse - new_top), 0.0)
        return new_top, total * keep + jnp.sum(weight), acc * keep + jnp.sum(part * weight[:, None], axis=0)

    if "sinks" in refs:
        start = (refs["sinks"][head] * LOG2_E, jnp.float32(1.0))
    else:
        start = (jnp.float32(MINUS_INF), jnp.float32(0.0))
    _, total, acc = lax.fori_loop(0, ceil_div(count, step), body, (*start, jnp.zeros(columns.shape, jnp.float32)))
    y = acc / jnp.where(total > 0, total, 1.0)
    backend.masked_store(refs["out"].at[row, head, columns], y.astype(refs["out"].dtype), mask=real_columns)


def merge_ranges(
    partial: jax.Array, lse: jax.Array, sinks: jax.Array | None, out: jax.ShapeDtypeStruct, name: str, interpret: bool,
    lengths: jax.Array | None = None, num_ranges: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:  # fmt: skip
    """Softmax over all ranges of a row from the softmax within each.

    Args:
        partial: float32 [B, N, S, H], outputs of the ranges, normalised; not read of those that are empty.
        lse: float32 [B, N, S], log2 of the ranges' sums of 2**score; MINUS_INF of those that are empty.
        sinks: float32 [N] or None.
        out: shape and dtype of the result, [B, N, H].
        name: of the kernel.
        interpret: run the kernel in the interpreter.
        lengths: int32 [B], for `num_ranges`.
        num_ranges: ranges of a row of some length, traced in the kernel; 0 gives zeros. Slots beyond are not read.
            None reads them all.
    """
    batch, heads, slots, head_dim = partial.shape
    step = min(MAX_RANGES_PER_STEP, max(2, pl.next_power_of_2(slots)))
    inputs = {"lengths": lengths, "partial": partial, "lse": lse, "sinks": sinks}
    kernel = functools.partial(_kernel, num_ranges=num_ranges, slots=slots, head_dim=head_dim, step=step)
    num_warps = max(1, step // RANGES_PER_WARP)
    return call_kernel(
        kernel, name, (batch, heads), inputs, {"out": out}, num_warps=num_warps, num_stages=1, interpret=interpret
    )["out"]
