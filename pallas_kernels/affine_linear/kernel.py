"""The fused affine linear in Pallas-Triton: packed words go to fragment registers, where they become codes.

One program computes `block_n` columns of one split of K for `block_m` rows as W x^T: tensor cores take their left
operand from registers, so the unpacked weights never touch shared memory, and few rows cost narrow dots.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.affine_linear.tuning import Config
from pallas_kernels.affine_linear.types import PackedAffine, PackedLayout
from pallas_kernels.affine_linear.unpack import unpack_plane, zero_word


def _load_x(x_ref, w: PackedLayout, first_row, block_m: int, plane_index) -> jax.Array:
    """x [BM, W] from `first_row` on, where plane `plane_index` of the whole K multiplies it; zeros past M and K."""
    M, width = x_ref.shape[0], w.plane_width
    rows = (first_row + jnp.arange(block_m))[:, None]
    cols = (plane_index * width + jnp.arange(width))[None, :]
    masks = [rows < M] * (M % block_m != 0) + [cols < w.K] * (w.K % w.tile_k != 0)
    rows, cols = jnp.broadcast_arrays(rows, cols)
    if not masks:
        return x_ref[rows, cols]
    mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), rows.shape)
    return backend.masked_load(x_ref.at[rows, cols], mask=mask, other=0.0)


def _load_params(refs, w: PackedLayout, layer, tile, columns) -> tuple[tuple[jax.Array, ...], ...]:
    """For every group of the K tile (one of them where groups are wider): its rows [BN] of each of `refs`."""
    return tuple(
        tuple(ref[layer, w.group_of_plane(tile, plane), columns] for ref in refs)
        for plane in range(0, w.num_planes, w.planes_per_group)
    )


def _affine_kernel(layer_ref, x_ref, words_ref, *refs, w: PackedLayout, config: Config, interpret: bool):
    *param_refs, out_ref = refs
    layer, split = layer_ref[0], pl.program_id(2)
    BM, BN = config.block_m, config.block_n
    acc_shape = (BM, BN) if config.x_left else (BN, BM)
    first_row, columns = pl.program_id(0) * BM, pl.ds(pl.program_id(1) * BN, BN)
    first = split * w.num_tiles // config.splits
    last = (split + 1) * w.num_tiles // config.splits

    def zeros_of(params):
        zero = params[1] if w.kind == "zero" else jnp.full((BN,), 2 ** (w.bits - 1), jnp.int32)
        word = zero_word(zero, w.bits, x_ref.dtype)
        return jnp.broadcast_to(word[:, None], (BN, w.plane_width))

    def dot(weights, x, acc):
        left, right = (x, weights) if config.x_left else (weights, x)
        return acc + lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    def by_column(params):
        params = params.astype(jnp.float32)
        return params[None, :] if config.x_left else params[:, None]

    def step(tile, carry):
        acc, params = carry
        # one tile ahead: these loads feed no dot, so Triton does not pipeline them
        next_params = _load_params(param_refs, w, layer, jnp.minimum(tile + 1, last - 1), columns)
        words = words_ref[layer, tile, columns, :]
        run = w.planes_per_group
        for start in range(0, w.num_planes, run):
            group_params = params[start // run]
            zeros = zeros_of(group_params)
            part = jnp.zeros(acc_shape, jnp.float32)
            sums = jnp.zeros(acc_shape, jnp.float32)
            for plane in range(start, start + run):
                x = _load_x(x_ref, w, first_row, BM, tile * w.num_planes + plane)
                part = dot(unpack_plane(words, zeros, bits=w.bits, plane=plane, interpret=interpret), x, part)
                if w.kind == "offset":  # every row of ones @ x^T is the sum of x that the offset multiplies
                    sums = dot(jnp.ones((BN, w.plane_width), x.dtype), x, sums)
            acc = acc + part * by_column(group_params[0])
            if w.kind == "offset":
                acc = acc + sums * by_column(group_params[1])
        return acc, next_params

    init = jnp.zeros(acc_shape, jnp.float32), _load_params(param_refs, w, layer, first, columns)
    acc, _ = lax.fori_loop(first, last, step, init)
    _store(out_ref, (acc if config.x_left else acc.T).astype(out_ref.dtype), split)


def _store(out_ref, tile: jax.Array, split) -> None:
    """Writes the tile [BM, BN] of this program, without what lies past M and N."""
    (BM, BN), (_, M, N) = tile.shape, out_ref.shape
    rows = (pl.program_id(0) * BM + jnp.arange(BM))[:, None]
    cols = (pl.program_id(1) * BN + jnp.arange(BN))[None, :]
    masks = [rows < M] * (M % BM != 0) + [cols < N] * (N % BN != 0)
    rows, cols = jnp.broadcast_arrays(rows, cols)
    mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), rows.shape) if masks else None
    backend.masked_store(out_ref.at[split, rows, cols], tile, mask=mask)


def fused_linear(
    x: jax.Array,
    w: PackedAffine,
    layer: jax.Array | int,
    config: Config,
    out_dtype: jnp.dtype,
    *,
    interpret: bool,
) -> jax.Array:
    """x [M, K] times layer `layer` -> [M, N] in out_dtype; splits of K are summed in float32, in order."""
    (M, _), BM, BN = x.shape, config.block_m, config.block_n
    params = [w.scale] + ([] if w.shift is None else [w.shift])
    out = pl.pallas_call(
        functools.partial(_affine_kernel, w=w.layout, config=config, interpret=interpret),
        grid=(pl.cdiv(M, BM), w.words.shape[2] // BN, config.splits),
        out_shape=jax.ShapeDtypeStruct((config.splits, M, w.N), out_dtype if config.splits == 1 else jnp.float32),
        compiler_params=backend.compiler_params(config.num_warps, config.num_stages),
        interpret=interpret,
        name="affine_linear",
    )(jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)), x, w.words, *params)
    return out[0] if config.splits == 1 else out.sum(0).astype(out_dtype)
