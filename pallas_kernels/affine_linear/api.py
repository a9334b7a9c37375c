"""The affine linear's public function: checks, and the choice between kernel and reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.affine_linear.reference import reference_linear
from pallas_kernels.affine_linear.types import AffineWeights

ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")


def affine_linear(
    x: jax.Array,
    w: AffineWeights,
    layer: jax.Array | int,
    *,
    out_dtype: jnp.dtype | None = None,
    implementation: backend.Implementation | None = None,
) -> jax.Array:
    """y[m, n] = sum over k of x[m, perm[k]] * value[layer, k, n], accumulated in float32.

    Args:
        x: float32, bfloat16 or float16 [M, K].
        w: the stacked weights.
        layer: int32 scalar, which layer of the stack, read inside the op.
        out_dtype: of the result; None is x.dtype.
        implementation: None takes the kernel on a GPU and the reference elsewhere.

    Returns:
        [M, N].

    Raises:
        ValueError: shape or dtype of x, or an implementation that cannot run.
    """
    if x.ndim != 2 or x.shape[1] != w.K:
        raise ValueError(f"x: shape {x.shape}, accepted: [M, {w.K}]")
    if str(x.dtype) not in ACTIVATION_DTYPES:
        raise ValueError(f"x: dtype {x.dtype}, accepted: {', '.join(ACTIVATION_DTYPES)}")
    backend.choose("affine_linear", implementation, "weights are not packed: call pack(w) once after loading")
    return reference_linear(x, w, layer, out_dtype)
