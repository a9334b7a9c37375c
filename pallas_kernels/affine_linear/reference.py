"""The affine linear in plain JAX, float32: what the kernels are held against, and what CPUs run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.affine_linear.types import AffineWeights


def dequantise(w: AffineWeights, layer: jax.Array | int) -> jax.Array:
    """The float32 values [K, N] of one layer, rows in the order of the codes."""
    codes, scale = (lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in (w.codes, w.scale))
    scale = scale.astype(jnp.float32)
    if w.offset is None:
        offset = scale * -(2.0 ** (w.bits - 1))
    else:
        offset = lax.dynamic_index_in_dim(w.offset, layer, keepdims=False).astype(jnp.float32)
    G, g = w.num_groups, w.group_size
    codes = jnp.pad(codes, ((0, G * g - w.K), (0, 0))).reshape(G, g, w.N)
    values = codes.astype(jnp.float32) * scale[:, None] + offset[:, None]
    return values.reshape(G * g, w.N)[: w.K]


def reference_linear(x: jax.Array, w: AffineWeights, layer: jax.Array | int) -> jax.Array:
    """x [M, K] times layer `layer` -> [M, N] in x.dtype: dequantise the whole layer, then one float32 dot."""
    if w.perm is not None:
        x = jnp.take(x, lax.dynamic_index_in_dim(w.perm, layer, keepdims=False), axis=1)
    y = jnp.dot(x.astype(jnp.float32), dequantise(w, layer), precision=lax.Precision.HIGHEST)
    return y.astype(x.dtype)
