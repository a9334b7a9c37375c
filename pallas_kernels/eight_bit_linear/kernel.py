"""The fused eight-bit linear in Pallas-Triton: codes go straight into the tensor cores, scales onto their sums.

One program computes `block_n` outputs of `block_m` rows over one split of K. x comes quantised (int8 or e4m3 dots), or
in 16 bits on GPUs without e4m3, where the codes are widened in registers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.eight_bit_linear.tuning import Config
from pallas_kernels.eight_bit_linear.types import BLOCK, EightBitWeights
from pallas_kernels.linears import store_tile, sum_partial

TILE_ROWS_TOGETHER = 8  # row tiles that run one after another on the same weights, which then come from L2
E4M3_IN_FLOAT16 = 2.0**8  # e4m3 bits shifted into float16 read as value / 2**8: the exponents' biases are 7 and 15


def widen(codes: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """e4m3 codes / 2**8 in a 16-bit dtype, exactly and without the conversion that GPUs below 8.9 lack."""
    bits = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int16)
    half = lax.bitcast_convert_type(((bits & 0x7F) << 7) | (bits & -0x8000), jnp.float16)
    return half if dtype == jnp.float16 else half.astype(jnp.float32).astype(dtype)


def _place(num_row_tiles: int, num_column_tiles: int) -> tuple[jax.Array, jax.Array]:
    """(row tile, column tile) of this program."""
    tile, together = pl.program_id(0), min(TILE_ROWS_TOGETHER, num_row_tiles)
    if together == 1:
        return jnp.int32(0), tile
    band, inside = tile // (together * num_column_tiles), tile % (together * num_column_tiles)
    height = jnp.minimum(num_row_tiles - band * together, together)
    return band * together + inside % height, inside // height


def _load(ref, index, rows: jax.Array, first_column, block_k: int) -> jax.Array:
    """ref[*index, rows, columns]; zeros past the last column."""
    K = ref.shape[-1]
    rows, columns = jnp.broadcast_arrays(rows[:, None], (first_column + jnp.arange(block_k))[None, :])
    if K % block_k == 0:
        return ref[*index, rows, columns]
    bits = jnp.zeros(rows.shape, ref.dtype)
    return backend.masked_load(ref.at[*index, rows, columns], mask=columns < K, other=bits)


def _sum_blocks(first, last, shape: tuple[int, int], scaled_dot, scales_of_step) -> jax.Array:
    """The sum over steps that have scales of their own."""

    def add(step, carry):
        acc, now = carry
        # one step ahead: these loads feed no dot, so Triton does not pipeline them
        ahead = scales_of_step(jnp.minimum(step + 1, last - 1))
        return acc + scaled_dot(step, now), ahead

    acc, _ = lax.fori_loop(first, last, add, (jnp.zeros(shape, jnp.float32), scales_of_step(first)))
    return acc


def _linear_kernel(layer_ref, x_ref, *refs, rows_per_scale: int, has_blocks: bool, config: Config):
    *x_scale_refs, codes_ref, scale_ref, out_ref = refs
    (M, K), (_, N, _) = x_ref.shape, codes_ref.shape
    BM, BN, BK = config.block_m, config.block_n, config.block_k
    layer, split = layer_ref[0], pl.program_id(1)
    row_tile, column_tile = _place(pl.cdiv(M, BM), pl.cdiv(N, BN))
    # Rows and outputs past the end repeat the last one and are not stored.
    rows = jnp.minimum(row_tile * BM + jnp.arange(BM), M - 1)
    outputs = jnp.minimum(column_tile * BN + jnp.arange(BN), N - 1)
    num_steps = pl.cdiv(K, BK)
    first, last = split * num_steps // config.splits, (split + 1) * num_steps // config.splits
    is_widened = x_ref.dtype != codes_ref.dtype
    sum_dtype = jnp.int32 if codes_ref.dtype == jnp.int8 else jnp.float32

    def scales(group):
        """Of the rows [BM] and of the outputs [BN]."""
        of_outputs = scale_ref[layer, outputs // rows_per_scale, group]
        of_outputs = of_outputs * E4M3_IN_FLOAT16 if is_widened else of_outputs
        of_rows = x_scale_refs[0][group, rows] if x_scale_refs else jnp.ones((BM,), jnp.float32)
        return of_rows, of_outputs

    def scaled(sums, scales):
        of_rows, of_outputs = scales
        left, right = (of_rows, of_outputs) if config.x_left else (of_outputs, of_rows)
        return sums.astype(jnp.float32) * (left[:, None] * right[None, :])

    def dot(step):
        x = _load(x_ref, (), rows, step * BK, BK)
        codes = _load(codes_ref, (layer,), outputs, step * BK, BK)
        codes = widen(codes, x.dtype) if is_widened else codes
        left, right = (x, codes) if config.x_left else (codes, x)
        return lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=sum_dtype)

    shape = (BM, BN) if config.x_left else (BN, BM)
    if has_blocks:
        scaled_dot = lambda step, now: scaled(dot(step), now)  # noqa: E731
        acc = _sum_blocks(first, last, shape, scaled_dot, lambda step: scales(step * BK // BLOCK))
    else:
        sums = lax.fori_loop(first, last, lambda step, sums: sums + dot(step), jnp.zeros(shape, sum_dtype))
        acc = scaled(sums, scales(0))
    store_tile(out_ref, (acc if config.x_left else acc.T).astype(out_ref.dtype), split, row_tile, column_tile)


def fused_linear(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: EightBitWeights,
    layer: jax.Array | int,
    config: Config,
    out_dtype: jnp.dtype,
    *,
    interpret: bool,
) -> jax.Array:
    """x [M, K] with scales [groups, M] times layer `layer` -> [M, N]; splits of K are summed in float32, in order.

    Without `x_scale`, x is in 16 bits and multiplies e4m3 codes that are widened to it.
    """
    M = x.shape[0]
    tiles = pl.cdiv(M, config.block_m) * pl.cdiv(w.N, config.block_n)
    arguments = [x] + ([] if x_scale is None else [x_scale]) + [w.codes, w.scale]
    out = pl.pallas_call(
        functools.partial(_linear_kernel, rows_per_scale=w.rows_per_scale, has_blocks=w.has_blocks, config=config),
        grid=(tiles, config.splits),
        out_shape=jax.ShapeDtypeStruct((config.splits, M, w.N), out_dtype if config.splits == 1 else jnp.float32),
        compiler_params=backend.compiler_params(config.num_warps, config.num_stages),
        interpret=interpret,
        name="eight_bit_linear",
    )(jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)), *arguments)
    return sum_partial(out, out_dtype)
