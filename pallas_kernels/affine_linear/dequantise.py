"""Packed weights back to 16-bit values, as a kernel and in plain JAX: the way for many rows, and the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.affine_linear.types import PackedAffine, PackedLayout
from pallas_kernels.affine_linear.unpack import unpack_plane, zero_word

BLOCK_N = 64


def packed_values(w: PackedAffine, layer: jax.Array | int) -> jax.Array:
    """The float32 values [N, K] of one layer, in plain JAX."""
    layout = w.layout
    take = functools.partial(lax.dynamic_index_in_dim, index=layer, keepdims=False)
    words = take(w.words)  # [tiles, N padded, W]
    planes = [words >> (w.bits * plane) & (2**w.bits - 1) for plane in range(layout.num_planes)]
    codes = jnp.stack(planes, axis=2).astype(jnp.float32).transpose(1, 0, 2, 3).reshape(words.shape[1], -1)

    def by_row(params: jax.Array) -> jax.Array:
        rows = jnp.repeat(take(params).astype(jnp.float32).T, w.group_size, axis=1)
        return jnp.pad(rows, ((0, 0), (0, max(0, codes.shape[1] - rows.shape[1]))))[:, : codes.shape[1]]

    middle = jnp.float32(2 ** (w.bits - 1))
    zero = by_row(w.shift) if w.kind == "zero" and w.shift is not None else middle
    values = (codes - zero) * by_row(w.scale)
    if w.kind == "offset" and w.shift is not None:
        values = values + by_row(w.shift)
    return values[: w.N, : w.K]


def _dequantise_kernel(layer_ref, words_ref, *refs, w: PackedLayout, dtype: jnp.dtype, interpret: bool):
    *param_refs, out_ref = refs
    layer, tile = layer_ref[0], pl.program_id(0)
    columns = pl.ds(pl.program_id(1) * BLOCK_N, BLOCK_N)
    words = words_ref[layer, tile, columns, :]
    for plane in range(w.num_planes):
        scale, *shift = (ref[layer, w.group_of_plane(tile, plane), columns] for ref in param_refs)
        middle = jnp.full((BLOCK_N,), 2 ** (w.bits - 1), jnp.int32)
        zero = zero_word(shift[0] if w.kind == "zero" else middle, w.bits, dtype)
        zeros = jnp.broadcast_to(zero[:, None], words.shape)
        codes = unpack_plane(words, zeros, bits=w.bits, plane=plane, interpret=interpret)
        values = codes.astype(jnp.float32) * scale.astype(jnp.float32)[:, None]
        if w.kind == "offset":
            values = values + shift[0].astype(jnp.float32)[:, None]
        _store_values(out_ref, values.astype(dtype), tile * w.num_planes + plane, is_whole=w.K % w.tile_k == 0)


def _store_values(out_ref, values: jax.Array, plane_index, *, is_whole: bool) -> None:
    """Writes values [BN, W] to their columns of K, without what lies past N and, unless K `is_whole` tiles, past K."""
    (BN, W), (N, K) = values.shape, out_ref.shape
    rows = (pl.program_id(1) * BN + jnp.arange(BN))[:, None]
    cols = (plane_index * W + jnp.arange(W))[None, :]
    rows, cols = jnp.broadcast_arrays(rows, cols)
    mask = None if N % BN == 0 and is_whole else (rows < N) & (cols < K)
    backend.masked_store(out_ref.at[rows, cols], values, mask=mask)


def dequantise_layer(w: PackedAffine, layer: jax.Array | int, dtype: jnp.dtype, *, interpret: bool) -> jax.Array:
    """The values [N, K] of one layer, rounded to `dtype` (bfloat16 or float16)."""
    params = [w.scale] if w.shift is None else [w.scale, w.shift]
    _, tiles, padded, _ = w.words.shape
    return pl.pallas_call(
        functools.partial(_dequantise_kernel, w=w.layout, dtype=dtype, interpret=interpret),
        grid=(tiles, padded // BLOCK_N),  # tiles of K first: programs that run together write whole rows
        out_shape=jax.ShapeDtypeStruct((w.N, w.K), dtype),
        compiler_params=backend.compiler_params(num_warps=4, num_stages=1),
        interpret=interpret,
        name="affine_dequantise",
    )(jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)), w.words, *params)
