"""The op's public function: checks, and the choice between kernel and reference."""

from __future__ import annotations

import jax

from pallas_kernels import backend
from pallas_kernels.residual_norm.kernel import kernel_add_rms_norm
from pallas_kernels.residual_norm.reference import reference_add_rms_norm


def add_rms_norm(
    x: jax.Array,
    partial: jax.Array,
    weight: jax.Array,
    layer: jax.Array,
    *,
    eps: float,
    offset: float = 0.0,
    implementation: backend.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds a linear's result to the residual stream, and norms the stream for the next linear.

    Args:
        x: [M, D], the stream; updated in place where it is donated or loop-carried.
        partial: [S, M, D], what to add, as partial sums.
        weight: [L, D], of the norm.
        layer: int32 scalar, which row of `weight`.
        eps, offset: see `rms_norm`.
        implementation: None takes the kernel on a GPU and the reference elsewhere.

    Returns:
        x plus the sum of `partial`, and its RMSNorm; [M, D] in x.dtype.

    Raises:
        ValueError: names the argument that does not fit.
    """
    if x.ndim != 2 or partial.ndim != 3 or partial.shape[1:] != x.shape:
        raise ValueError(f"partial: shape {partial.shape}, accepted: [S, *{x.shape}]")
    if weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight: shape {weight.shape}, accepted: [L, {x.shape[1]}]")
    chosen = backend.choose("add_rms_norm", implementation, backend.capability_problem())
    if chosen == "reference":
        return reference_add_rms_norm(x, partial, weight, layer, eps, offset)
    return kernel_add_rms_norm(x, partial, weight, layer, eps, offset, chosen == "interpret")
