"""The affine linear's public function: checks, and the choice between kernels and reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.affine_linear import tuning
from pallas_kernels.affine_linear.dequantise import dequantise_layer, packed_values
from pallas_kernels.affine_linear.kernel import fused_linear
from pallas_kernels.affine_linear.reference import reference_linear
from pallas_kernels.affine_linear.types import AffineWeights, PackedAffine
from pallas_kernels.linears import check_rows, kernel_problem, sum_partial


def affine_linear(
    x: jax.Array,
    w: AffineWeights | PackedAffine,
    layer: jax.Array | int,
    *,
    out_dtype: jnp.dtype | None = None,
    implementation: backend.Implementation | None = None,
) -> jax.Array:
    """y[m, n] = sum over k of x[m, perm[k]] * value[layer, k, n], accumulated in float32.

    Args:
        x: float32, bfloat16 or float16 [M, K].
        w: the stacked weights; the kernels take the packed ones.
        layer: int32 scalar, which layer of the stack, read inside the op.
        out_dtype: of the result; None is x.dtype.
        implementation: None takes the kernel on a GPU and the reference elsewhere.

    Returns:
        [M, N].

    Raises:
        ValueError: shape or dtype of x, or an implementation that cannot run.
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    return sum_partial(affine_partial(x, w, layer, out_dtype=out_dtype, implementation=implementation), out_dtype)


def affine_partial(
    x: jax.Array,
    w: AffineWeights | PackedAffine,
    layer: jax.Array | int,
    *,
    out_dtype: jnp.dtype | None = None,
    implementation: backend.Implementation | None = None,
) -> jax.Array:
    """`affine_linear` without the sum over its splits of K, for callers that fuse the sum into what follows.

    Returns:
        [S, M, N] to be summed over S in order: float32, or out_dtype where S is 1.
    """
    check_rows(x, w.K)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if isinstance(w, AffineWeights):
        backend.choose("affine_linear", implementation, "weights are not packed: call pack(w) once after loading")
        return reference_linear(x, w, layer, out_dtype)[None]
    chosen = backend.choose("affine_linear", implementation, kernel_problem(x))
    if w.perm is not None:
        x = jnp.take(x, lax.dynamic_index_in_dim(w.perm, layer, keepdims=False), axis=1)
    if chosen == "reference":
        y = _dot(x.astype(jnp.float32), packed_values(w, layer), jnp.dtype(jnp.float32), lax.Precision.HIGHEST)
        return y.astype(out_dtype)[None]
    interpret = chosen == "interpret"
    choice = tuning.choose(x.shape[0], w.layout, w.N, w.words.shape[2], interpret=interpret)
    return partial_by(choice, x, w, layer, out_dtype, interpret=interpret)


def partial_by(
    choice: tuning.Choice,
    x: jax.Array,
    w: PackedAffine,
    layer: jax.Array | int,
    out_dtype: jnp.dtype,
    *,
    interpret: bool,
) -> jax.Array:
    """The kernels' [S, M, N] for x [M, K] whose columns are in the order of the codes, by a given choice."""
    if isinstance(choice, tuning.Dequantise):
        return _dot(x, dequantise_layer(w, layer, x.dtype, interpret=interpret), out_dtype, None)[None]
    if isinstance(choice, tuning.HopperConfig):
        # here: importing Mosaic takes 0.6 s, and not every JAX build has it
        from pallas_kernels.affine_linear.hopper import hopper_linear

        return hopper_linear(x, w, layer, choice, out_dtype)
    return fused_linear(x, w, layer, choice, out_dtype, interpret=interpret)


def linear_by(
    choice: tuning.Choice,
    x: jax.Array,
    w: PackedAffine,
    layer: jax.Array | int,
    out_dtype: jnp.dtype,
    *,
    interpret: bool,
) -> jax.Array:
    """`partial_by` with its sum: [M, N]."""
    return sum_partial(partial_by(choice, x, w, layer, out_dtype, interpret=interpret), out_dtype)


def _dot(x: jax.Array, values: jax.Array, out_dtype: jnp.dtype, precision: lax.Precision | None) -> jax.Array:
    """x [M, K] times values [N, K] -> [M, N]; XLA accumulates in float32 whatever it writes."""
    contract_k = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, values, contract_k, precision=precision, preferred_element_type=out_dtype)
