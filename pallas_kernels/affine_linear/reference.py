"""The affine linear in plain JAX, float32: what the kernels are held against, and what CPUs run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.affine_linear.types import AffineWeights


def dequantise(w: AffineWeights, layer: jax.Array | int) -> jax.Array:
    """The float32 values [N, K] of one layer, columns in the order of the codes."""
    codes, scale = (lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in (w.codes, w.scale))
    scale = scale.astype(jnp.float32)
    if w.offset is None:
        offset = scale * -(2.0 ** (w.bits - 1))
    else:
        offset = lax.dynamic_index_in_dim(w.offset, layer, keepdims=False).astype(jnp.float32)
    return grouped_affine(codes, scale, offset, w.group_size)


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
    """x [M, K] times layer `layer` -> [M, N]: dequantise the whole layer, then one float32 dot."""
    if w.perm is not None:
        x = jnp.take(x, lax.dynamic_index_in_dim(w.perm, layer, keepdims=False), axis=1)
    contract_k = (((1,), (1,)), ((), ()))
    y = lax.dot_general(x.astype(jnp.float32), dequantise(w, layer), contract_k, precision=lax.Precision.HIGHEST)
    return y.astype(out_dtype or x.dtype)


def affine_rows(w: AffineWeights, ids: jax.Array) -> jax.Array:
    """Columns `ids` [M] of a one-layer weight as float32 rows [M, K]: the lookup of a quantised embedding [V, D]."""
    scale = w.scale[0, ids].astype(jnp.float32)
    offset = scale * -(2.0 ** (w.bits - 1)) if w.offset is None else w.offset[0, ids].astype(jnp.float32)
    return grouped_affine(w.codes[0, ids], scale, offset, w.group_size)
