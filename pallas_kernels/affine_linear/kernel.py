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
from pallas_kernels.affine_linear.unpack import scale_terms, unpack_plane, zero_word
from pallas_kernels.linears import store_tile


def _load_x(x_ref, w: PackedLayout, first_row, block_m: int, first_col, width: int) -> jax.Array:
    """x [BM, width] from a row and a column on; zeros past M and K."""
    M = x_ref.shape[0]
    rows = (first_row + jnp.arange(block_m))[:, None]
    cols = (first_col + jnp.arange(width))[None, :]
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


def _add_piece(acc, words, params, x_of_plane, *, w: PackedLayout, config: Config, interpret: bool) -> jax.Array:
    """acc [BN, BM] plus weights times x^T over one piece of K.

    Args:
        acc: float32 [BN, BM].
        words: uint16 [BN, W], the piece.
        params: of every group, its scale [BN] and, where the kind has one, its zero point or offset.
        x_of_plane: gives x [BM, W] for a plane of the words.
    """
    (BN, W), run = words.shape, w.planes_per_group

    def dot(weights, x, total):
        return total + lax.dot_general(weights, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    def by_word(column):
        return jnp.broadcast_to(column[:, None], (BN, W))

    for start in range(0, w.num_planes, run):
        scale, *shift = params[start // run]
        zero = shift[0] if w.kind == "zero" else jnp.full((BN,), 2 ** (w.bits - 1), jnp.int32)
        part = acc if config.scale_weights else jnp.zeros_like(acc)
        sums = jnp.zeros_like(acc)
        for plane in range(start, start + run):
            x = x_of_plane(plane)
            zeros = by_word(zero_word(zero, w.bits, x.dtype))
            scales = map(by_word, scale_terms(scale, x.dtype) if config.scale_weights else ())
            part = dot(unpack_plane(words, zeros, *scales, bits=w.bits, plane=plane, interpret=interpret), x, part)
            if w.kind == "offset":  # every row of ones @ x^T is the sum of x that the offset multiplies
                sums = dot(jnp.ones((BN, W), x.dtype), x, sums)
        acc = part if config.scale_weights else acc + part * scale.astype(jnp.float32)[:, None]
        if w.kind == "offset":
            acc = acc + sums * shift[0].astype(jnp.float32)[:, None]
    return acc


def _affine_kernel(layer_ref, x_ref, words_ref, *refs, w: PackedLayout, config: Config, interpret: bool):
    *param_refs, out_ref = refs
    layer, split = layer_ref[0], pl.program_id(2)
    BM, BN, W = config.block_m, config.block_n, w.plane_width // config.parts
    first_row, columns = pl.program_id(0) * BM, pl.ds(pl.program_id(1) * BN, BN)
    first = split * w.num_tiles // config.splits * config.parts
    last = (split + 1) * w.num_tiles // config.splits * config.parts

    def params_of(piece):
        tile = jnp.minimum(piece, last - 1) // config.parts
        return _load_params(param_refs, w, layer, tile, columns)

    def step(piece, carry):
        acc, params = carry
        # one piece ahead: these loads feed no dot, so Triton does not pipeline them
        next_params = params_of(piece + 1)
        tile, offset = (piece, 0) if config.parts == 1 else (piece // config.parts, piece % config.parts * W)
        words = words_ref[layer, tile, columns, pl.ds(offset, W)]

        def x_of_plane(plane):
            return _load_x(x_ref, w, first_row, BM, (tile * w.num_planes + plane) * w.plane_width + offset, W)

        return _add_piece(acc, words, params, x_of_plane, w=w, config=config, interpret=interpret), next_params

    acc, _ = lax.fori_loop(first, last, step, (jnp.zeros((BN, BM), jnp.float32), params_of(first)))
    store_tile(out_ref, acc.T.astype(out_ref.dtype), split, pl.program_id(0), pl.program_id(1))


def fused_linear(
    x: jax.Array,
    w: PackedAffine,
    layer: jax.Array | int,
    config: Config,
    out_dtype: jnp.dtype,
    *,
    interpret: bool,
) -> jax.Array:
    """x [M, K] times layer `layer` -> the splits' sums [splits, M, N] in float32, in out_dtype where there is one."""
    (M, _), BM, BN = x.shape, config.block_m, config.block_n
    params = [w.scale] + ([] if w.shift is None else [w.shift])
    return pl.pallas_call(
        functools.partial(_affine_kernel, w=w.layout, config=config, interpret=interpret),
        grid=(pl.cdiv(M, BM), pl.cdiv(w.N, BN), config.splits),  # no program past N: its stores have no mask
        out_shape=jax.ShapeDtypeStruct((config.splits, M, w.N), out_dtype if config.splits == 1 else jnp.float32),
        compiler_params=backend.compiler_params(config.num_warps, config.num_stages),
        interpret=interpret,
        name="affine_linear",
    )(jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)), x, w.words, *params)
