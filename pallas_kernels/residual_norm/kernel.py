"""Residual addition and RMSNorm in Pallas-Triton: a program takes a row, in registers from end to end."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend

COLUMNS_PER_WARP = 512  # 16 float32 a thread
MAX_WARPS = 16


def _kernel(
    layer_ref: Any, x_ref: Any, partial_ref: Any, weight_ref: Any, out_ref: Any, normed_ref: Any, *, eps: float,
    offset: float,
) -> None:  # fmt: skip
    row, layer = pl.program_id(0), layer_ref[0]
    num_parts, _, width = partial_ref.shape
    column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    real = column < width if column.size != width else None

    def load(ref: Any, *at: Any) -> jax.Array:
        other = None if real is None else 0.0
        return backend.masked_load(ref.at[(*at, column)], mask=real, other=other).astype(jnp.float32)

    gain = offset + load(weight_ref, layer)  # loaded first: behind the reduction its latency would show
    y = functools.reduce(jnp.add, [load(partial_ref, n, row) for n in range(num_parts)])
    # Rounded before the norm: the stream is what the next layer reads again.
    x = (load(x_ref, row) + y).astype(out_ref.dtype)
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(x32 * x32) / width + eps)
    normed = x32 * scale * gain
    backend.masked_store(out_ref.at[row, column], x, mask=real)
    backend.masked_store(normed_ref.at[row, column], normed.astype(normed_ref.dtype), mask=real)


def kernel_add_rms_norm(
    x: jax.Array, partial: jax.Array, weight: jax.Array, layer: jax.Array, eps: float, offset: float, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See `add_rms_norm`."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    num_warps = max(1, min(MAX_WARPS, pl.next_power_of_2(x.shape[1]) // COLUMNS_PER_WARP))
    x, normed = pl.pallas_call(
        functools.partial(_kernel, eps=eps, offset=offset),
        grid=(x.shape[0],),
        out_shape=[out, out],
        input_output_aliases={1: 0},
        compiler_params=backend.compiler_params(num_warps, 1),
        interpret=interpret,
        name="add_rms_norm",
    )(layer.reshape(1), x, partial, weight)
    return x, normed
