"""One linear, whatever its weights are stored as: the only place that knows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.affine_linear import AffineWeights, affine_partial, affine_rows, sum_partial
from pallas_kernels.eight_bit_linear import EightBitWeights, eight_bit_linear
from turbojax.core.weights import Linear

FLOAT32 = jnp.dtype(jnp.float32)


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
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if w.bias is None:
        return sum_partial(partial_product(x, w, layer, out_dtype), out_dtype)
    y = sum_partial(partial_product(x, w, layer, FLOAT32), FLOAT32)
    return (y + at_layer(w.bias, layer).astype(FLOAT32)[None]).astype(out_dtype)


def linear_partial(x: jax.Array, w: Linear, layer: jax.Array) -> jax.Array:
    """`linear` as partial sums, for ops that add them up themselves.

    Returns:
        [S, M, N]: float32, or x.dtype where S is 1.
    """
    return partial_product(x, w, layer, x.dtype) if w.bias is None else linear(x, w, layer)[None]


def partial_product(x: jax.Array, w: Linear, layer: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """x @ W[layer] without the bias: [S, M, N], float32 or, where S is 1, out_dtype."""
    if isinstance(w.weight, jax.Array):
        contract_k = (((1,), (1,)), ((), ()))
        return lax.dot_general(x, at_layer(w.weight, layer), contract_k, preferred_element_type=out_dtype)[None]
    if isinstance(w.weight, EightBitWeights):
        return eight_bit_linear(x, w.weight, layer, out_dtype=out_dtype)[None]
    return affine_partial(x, w.weight, layer, out_dtype=out_dtype)


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
