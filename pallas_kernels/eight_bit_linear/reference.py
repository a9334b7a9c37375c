"""The eight-bit linear in plain JAX, float32 throughout: what CPUs run, and what the kernels are held against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.eight_bit_linear.quantise import quantise_rows
from pallas_kernels.eight_bit_linear.types import BLOCK, EightBitWeights


def by_column(scale: jax.Array, K: int) -> jax.Array:
    """Scales [rows, groups] for each column [rows, K]; one group is left to broadcasting."""
    return scale if scale.shape[1] == 1 else jnp.repeat(scale, BLOCK, axis=1)[:, :K]


def dequantise(w: EightBitWeights, layer: jax.Array | int) -> jax.Array:
    """The float32 values [N, K] of a layer."""
    codes, scale = (lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in (w.codes, w.scale))
    if w.has_blocks:
        scale = jnp.repeat(scale, BLOCK, axis=0)[: w.N]
    return codes.astype(jnp.float32) * by_column(scale, w.K)


def rounded_rows(x: jax.Array, w: EightBitWeights) -> jax.Array:
    """x [M, K] as its quantisation represents it, float32."""
    codes, scale = quantise_rows(x, w.codes.dtype, grouped=w.has_blocks)
    codes = lax.optimization_barrier(codes)  # XLA may skip a conversion to e4m3 and back as excess precision
    return codes.astype(jnp.float32) * by_column(scale.T, w.K)


def reference_linear(x: jax.Array, w: EightBitWeights, layer: jax.Array | int) -> jax.Array:
    """x [M, K], quantised by token, times layer `layer` -> float32 [M, N]."""
    contract_k = (((1,), (1,)), ((), ()))
    return lax.dot_general(rounded_rows(x, w), dequantise(w, layer), contract_k, precision=lax.Precision.HIGHEST)
