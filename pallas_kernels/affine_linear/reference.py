"""The affine linear in plain JAX, float32: what the kernels are held against, and what CPUs run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.affine_linear.types import AffineWeights

# Dequantised values exist for at most this many weights at a time (2 MiB): beyond a CPU's cache each would travel to
# memory and back, and a vocabulary of them costs 100 MB of page faults a step.
WEIGHTS_PER_TILE = 1 << 19


def dequantise(
    w: AffineWeights, layer: jax.Array | int, start: jax.Array | int = 0, size: int | None = None
) -> jax.Array:
    """The float32 values [size, K] of outputs `start` .. `start + size` of a layer, columns in the codes' order."""
    size = w.N if size is None else size
    take = lambda a: lax.dynamic_slice(a, (layer, start, 0), (1, size, a.shape[2]))[0]  # noqa: E731
    scale = take(w.scale).astype(jnp.float32)
    offset = scale * -(2.0 ** (w.bits - 1)) if w.offset is None else take(w.offset).astype(jnp.float32)
    return grouped_affine(take(w.codes), scale, offset, w.group_size)


def grouped_affine(codes: jax.Array, scale: jax.Array, offset: jax.Array, group_size: int) -> jax.Array:
    """codes [N, K] * scale + offset, both [N, K / group_size], float32."""
    N, K = codes.shape
    G = scale.shape[1]
    codes = jnp.pad(codes, ((0, 0), (0, G * group_size - K))).reshape(N, G, group_size)
    values = codes.astype(jnp.float32) * scale[..., None] + offset[..., None]
    return values.reshape(N, G * group_size)[:, :K]


def reference_linear(
    x: jax.Array, w: AffineWeights, layer: jax.Array | int, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """x [M, K] times layer `layer` -> [M, N]: dequantise a tile of outputs, one float32 dot, the next tile."""
    if w.perm is not None:
        x = jnp.take(x, lax.dynamic_index_in_dim(w.perm, layer, keepdims=False), axis=1)
    x32, out_dtype = x.astype(jnp.float32), out_dtype or x.dtype
    # At least two, since a loop keeps dequantisation and dot apart: fused by XLA on a CPU, 8 rows take 3x as long.
    num_tiles = max(2, -(-w.N * w.K // WEIGHTS_PER_TILE))
    size = -(-w.N // num_tiles)

    def body(i: jax.Array, y: jax.Array) -> jax.Array:
        start = jnp.minimum(i * size, w.N - size)  # the last tile overlaps the one before: same values twice
        tile = lax.dot_general(
            x32, dequantise(w, layer, start, size), (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        return lax.dynamic_update_slice(y, tile.astype(out_dtype), (0, start))

    return lax.fori_loop(0, num_tiles, body, jnp.zeros((x.shape[0], w.N), out_dtype))


def affine_rows(w: AffineWeights, ids: jax.Array) -> jax.Array:
    """Columns `ids` [M] of a one-layer weight as float32 rows [M, K]: the lookup of a quantised embedding [V, D]."""
    scale = w.scale[0, ids].astype(jnp.float32)
    offset = scale * -(2.0 ** (w.bits - 1)) if w.offset is None else w.offset[0, ids].astype(jnp.float32)
    return grouped_affine(w.codes[0, ids], scale, offset, w.group_size)
