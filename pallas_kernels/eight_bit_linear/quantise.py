"""Activations to eight bits, symmetric and dynamic: the same few lines in plain JAX and in the prologue kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.eight_bit_linear.types import BLOCK, CODE_MAX

SMALLEST_SCALE = 1e-30  # rows of zeros are divided by it: their codes are 0, and so is their scale
FEW_ROWS = 256
ROW_PADDING = 256  # the most rows of a program: kernels load scales of whole tiles, and use those of real rows


def quantise(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """scale = max |x| / code_max over the last axis, codes = round(x * (1 / scale)): one division a row.

    Args:
        x: float32 [..., columns under one scale].
        dtype: int8 or float8_e4m3fn.

    Returns:
        Codes, `dtype` [..., columns]; scale, float32 [..., 1].
    """
    code_max = CODE_MAX[jnp.dtype(dtype).name]
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / code_max
    codes = x * (1.0 / jnp.maximum(scale, SMALLEST_SCALE))  # at most a rounding beyond code_max, which goes back
    if dtype == jnp.int8:
        codes = codes + jnp.where(codes < 0, -0.5, 0.5)  # the conversion truncates: half goes away from zero
    return codes.astype(dtype), scale


def quantise_rows(x: jax.Array, dtype: jnp.dtype, *, grouped: bool) -> tuple[jax.Array, jax.Array]:
    """x [M, K] -> codes [M, K] and scales [groups, M], a group 128 columns or all of them; plain JAX."""
    M, K = x.shape
    width = BLOCK if grouped else K
    groups = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -K % width))).reshape(M, -1, width)
    codes, scale = quantise(groups, dtype)
    return codes.reshape(M, -1)[:, :K], scale[..., 0].T


def _quantise_kernel(x_ref, codes_ref, scale_ref, *, width: int):
    (M, K), (num_groups, _) = x_ref.shape, scale_ref.shape
    row = pl.program_id(0)
    groups = jnp.arange(pl.next_power_of_2(num_groups))
    inside = jnp.arange(pl.next_power_of_2(width))
    columns, inside = jnp.broadcast_arrays(groups[:, None] * width + inside[None, :], inside[None, :])
    mask = (columns < K) & (inside < width)
    x = backend.masked_load(x_ref.at[jnp.minimum(row, M - 1), columns], mask=mask, other=0.0)
    codes, scale = quantise(x.astype(jnp.float32), codes_ref.dtype)
    backend.masked_store(codes_ref.at[row, columns], codes, mask=mask)
    backend.masked_store(scale_ref.at[groups, row], scale[:, 0], mask=groups < num_groups)


def _num_warps(num_rows: int, num_elements: int) -> int:
    """Many for a few long rows, which nothing else hides; with more rows than fit at once they only wait for each other
    (4096 rows of 14336 to int8: 61 us with 16 warps, 49 with 4)."""
    return min(16 if num_rows <= FEW_ROWS else 4, max(1, num_elements // 1024))


def quantise_rows_kernel(
    x: jax.Array, dtype: jnp.dtype, *, num_rows: int, grouped: bool, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """`quantise_rows` as one kernel, a program for each row.

    Returns:
        Codes [num_rows, K], rows past M repeat the last; scales [groups, num_rows rounded up to `ROW_PADDING`], those
        past num_rows undefined.
    """
    K = x.shape[1]
    width = BLOCK if grouped else K
    num_groups = pl.cdiv(K, width)
    num_elements = pl.next_power_of_2(num_groups) * pl.next_power_of_2(width)
    return pl.pallas_call(
        functools.partial(_quantise_kernel, width=width),
        grid=(num_rows,),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, K), dtype),
            jax.ShapeDtypeStruct((num_groups, pl.cdiv(num_rows, ROW_PADDING) * ROW_PADDING), jnp.float32),
        ),
        compiler_params=backend.compiler_params(_num_warps(num_rows, num_elements), num_stages=1),
        interpret=interpret,
        name="eight_bit_quantise",
    )(x)
