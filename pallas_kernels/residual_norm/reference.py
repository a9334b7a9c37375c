"""The op in plain JAX: what the kernel is held against, and what CPUs run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, offset: float = 0.0) -> jax.Array:
    """x / rms(x) * (offset + weight) over the last axis, in float32, back in x.dtype.

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean square.
        offset: 1 for Gemma, whose weights are stored less 1.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    gain = offset + weight.astype(jnp.float32)
    return (x32 * scale * jnp.expand_dims(gain, range(x.ndim - 1))).astype(x.dtype)


def reference_add_rms_norm(
    x: jax.Array, partial: jax.Array, weight: jax.Array, layer: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """See `add_rms_norm`."""
    y = partial[0] if partial.shape[0] == 1 else partial.sum(0)
    x = (x.astype(y.dtype) + y).astype(x.dtype)
    return x, rms_norm(x, lax.dynamic_index_in_dim(weight, layer, keepdims=False), eps=eps, offset=offset)
