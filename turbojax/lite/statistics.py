"""What calibration keeps of a linear's input: enough to score every rounding of its weights without running it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class InputStats:
    """Of the inputs x [T, K] that the linears of one group read.

    With the Gram matrix, the squared error that weights w + e instead of w [N, K] make over all tokens is
    trace(e @ gram @ e.T): no token has to be kept for it.

    Attributes:
        gram: float32 [K, K], the sum of x[t].T x[t] over tokens, divided by their number.
        mean_abs: float32 [K], the mean of |x[t]|.
        max_abs: float32 [K], the largest |x[t]|.
        rows: float32 [R, K], some of the tokens, for what depends on single values (activations of eight bits).
    """

    gram: np.ndarray
    mean_abs: np.ndarray
    max_abs: np.ndarray
    rows: np.ndarray

    def scaled(self, scale: np.ndarray) -> InputStats:
        """Of the inputs x / scale."""
        one = scale.astype(np.float32)
        return InputStats(
            self.gram / one[:, None] / one[None], self.mean_abs / one, self.max_abs / one, self.rows / one[None]
        )


@jax.jit
def gram_loss(error: jax.Array, gram: jax.Array) -> jax.Array:
    """trace(error @ gram @ error.T) for an error of the weights [N, K]."""
    return jnp.sum(jnp.matmul(error, gram, precision=lax.Precision.HIGHEST) * error)


def runs(num_rows: int) -> list[slice]:
    """Outputs that are scored at once: bounds the memory of a search, and no figure depends on it."""
    return [slice(start, start + ROWS_AT_ONCE) for start in range(0, num_rows, ROWS_AT_ONCE)]


def output_error(error: np.ndarray, gram: np.ndarray | jax.Array) -> float:
    """Mean over tokens of the squared error of all outputs, for an error [N, K] of the weights.

    On the device: for all linears of a layer of a 7B model that is 5 TFLOP.
    """
    whole = jnp.asarray(gram, jnp.float32)
    return sum(float(gram_loss(jnp.asarray(error[rows], jnp.float32), whole)) for rows in runs(len(error)))


def relative_error(w: np.ndarray, got: np.ndarray, gram: np.ndarray | None) -> float:
    """Root of the error's share of the output's power; of the weights' own power where there is no calibration."""
    error = got - w
    if gram is None:
        wrong, right = float(np.sum(error**2, dtype=np.float64)), float(np.sum(w**2, dtype=np.float64))
    else:
        on_device = jnp.asarray(gram, jnp.float32)  # 485 MB at K = 11008, for both
        wrong, right = output_error(error, on_device), output_error(w, on_device)
    return (max(wrong, 0.0) / right) ** 0.5 if right > 0 else 0.0
