"""The eight-bit linear's public function: checks, and the choice between kernels and reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.eight_bit_linear import tuning
from pallas_kernels.eight_bit_linear.kernel import fused_linear
from pallas_kernels.eight_bit_linear.quantise import quantise_rows_kernel
from pallas_kernels.eight_bit_linear.reference import dequantise, reference_linear
from pallas_kernels.eight_bit_linear.types import EightBitWeights
from pallas_kernels.linears import check_rows, kernel_problem


def eight_bit_linear(
    x: jax.Array,
    w: EightBitWeights,
    layer: jax.Array | int,
    *,
    out_dtype: jnp.dtype | None = None,
    implementation: backend.Implementation | None = None,
) -> jax.Array:
    """y[m, n] = sum over k of x8[m, k] * value[layer, n, k], where x8 is x quantised by token as w.codes are.

    int8 products are summed in int32, e4m3 ones in float32; GPUs that cannot multiply e4m3 (below 8.9) keep x in 16
    bits instead and widen the codes.

    Args:
        x: float32, bfloat16 or float16 [M, K].
        w: the stacked weights.
        layer: int32 scalar, which layer of the stack, read inside the op.
        out_dtype: of the result; None is x.dtype.
        implementation: None takes the kernels on a GPU and the reference elsewhere.

    Returns:
        [M, N].

    Raises:
        ValueError: shape or dtype of x, or an implementation that cannot run.
    """
    check_rows(x, w.K)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    chosen = backend.choose("eight_bit_linear", implementation, kernel_problem(x))
    if chosen == "reference":
        return reference_linear(x, w, layer).astype(out_dtype)
    interpret = chosen == "interpret"
    choice = tuning.choose(x.shape[0], w, interpret=interpret)
    return linear_by(choice, x, w, layer, out_dtype, interpret=interpret)


def linear_by(
    choice: tuning.Choice,
    x: jax.Array,
    w: EightBitWeights,
    layer: jax.Array | int,
    out_dtype: jnp.dtype,
    *,
    interpret: bool,
) -> jax.Array:
    """The kernels' result [M, N] for x [M, K], by a given choice."""
    if isinstance(choice, tuning.Dequantise):
        values, contract_k = dequantise(w, layer).astype(x.dtype), (((1,), (1,)), ((), ()))
        return lax.dot_general(x, values, contract_k, preferred_element_type=out_dtype)
    quantise = functools.partial(quantise_rows_kernel, dtype=w.codes.dtype, grouped=w.has_blocks, interpret=interpret)
    if isinstance(choice, tuning.HopperConfig):
        # here: importing Mosaic takes 0.6 s, and not every JAX build has it
        from pallas_kernels.eight_bit_linear.hopper import ROW_ALIGNMENT, hopper_linear

        num_rows = pl.cdiv(x.shape[0], ROW_ALIGNMENT) * ROW_ALIGNMENT
        return hopper_linear(*quantise(x, num_rows=num_rows), w, layer, choice, out_dtype)[: x.shape[0]]
    if tuning.wraps_offsets(w):  # a copy of the layer, on GPUs that have no other kernel
        codes, scale = (lax.dynamic_index_in_dim(a, layer, keepdims=True) for a in (w.codes, w.scale))
        w, layer = EightBitWeights(codes, scale), 0
    x_codes, x_scale = quantise(x, num_rows=x.shape[0]) if tuning.multiplies(w) else (x, None)
    return fused_linear(x_codes, x_scale, w, layer, choice, out_dtype, interpret=interpret)
