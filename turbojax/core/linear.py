"""One linear, whatever its weights are stored as: the only place that knows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.affine_linear import AffineWeights, affine_linear, affine_rows
from turbojax.core.weights import Linear


def at_layer(stack: jax.Array, layer: jax.Array) -> jax.Array:
    """Layer `layer` of a stacked array [L, ...]."""
    return lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False)


def linear(x: jax.Array, w: Linear, layer: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x @ W[layer] (+ bias[layer]), accumulated in float32.

    Args:
        x: [M, K].
        w: the stacked linear.
        layer: int32 scalar.
        out_dtype: of the result; x.dtype by default.

    Returns:
        [M, N].
    """
    out_dtype = out_dtype or x.dtype
    if isinstance(w.weight, jax.Array):
        contract_k = (((1,), (1,)), ((), ()))
        y = lax.dot_general(x, at_layer(w.weight, layer), contract_k, preferred_element_type=jnp.float32)
    else:
        y = affine_linear(x, w.weight, layer, out_dtype=jnp.dtype(jnp.float32))
    if w.bias is not None:
        y = y + at_layer(w.bias, layer).astype(y.dtype)[None]
    return y.astype(out_dtype)


def embed(table: Linear, token_ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of the embedding table.

    Args:
        table: a linear of one layer, N = vocabulary.
        token_ids: int32 [M].
        dtype: of the result.

    Returns:
        [M, D].
    """
    if isinstance(table.weight, jax.Array):
        return table.weight[0, token_ids].astype(dtype)
    assert isinstance(table.weight, AffineWeights), "rows are looked up in codes, which stay unpacked"
    return affine_rows(table.weight, token_ids).astype(dtype)
