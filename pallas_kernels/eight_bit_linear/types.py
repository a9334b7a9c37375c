"""Eight-bit weights of a stack of linears: int8 or e4m3 codes, and what one scale covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

BLOCK = 128  # rows and columns under one scale of block-scaled e4m3 weights, and activations under one of theirs
CODE_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EightBitWeights:
    """Weights of L linears of one shape and format.

        value[l, n, k] = codes[l, n, k] * scale[l, n // rows_per_scale, k // columns_per_scale]

    The shape of `scale` says what one scale covers: [L, N, 1] an output channel, [L, ceil(N / 128), ceil(K / 128)] a
    block of 128 x 128. Channels take activations with one scale a token; blocks take activations with one scale a
    token and 128 columns. K is contiguous, as checkpoints hold it.

    Attributes:
        codes: int8 or float8_e4m3fn [L, N, K]; blocks are float8_e4m3fn.
        scale: float32, in one of the shapes above.
    """

    codes: jax.Array
    scale: jax.Array

    @property
    def K(self) -> int:
        return self.codes.shape[2]

    @property
    def N(self) -> int:
        return self.codes.shape[1]

    @property
    def has_blocks(self) -> bool:
        return self.scale.shape[2] > 1

    @property
    def rows_per_scale(self) -> int:
        return BLOCK if self.has_blocks else 1


def eight_bit_weights(codes: Any, scale: Any) -> EightBitWeights:
    """Builds and checks an EightBitWeights.

    Args:
        codes: int8 or float8_e4m3fn [L, N, K].
        scale: float32 [L] (one for a matrix, repeated for its channels), [L, N], or for float8_e4m3fn codes
            [L, ceil(N / 128), ceil(K / 128)].

    Raises:
        ValueError: names the argument that does not fit.
    """
    codes, scale = jnp.asarray(codes), jnp.asarray(scale)
    if codes.ndim != 3:
        raise ValueError(f"codes: shape {codes.shape}, accepted: [L, N, K]")
    if str(codes.dtype) not in CODE_MAX:
        raise ValueError(f"codes: dtype {codes.dtype}, accepted: {', '.join(CODE_MAX)}")
    if scale.dtype != jnp.float32:
        raise ValueError(f"scale: dtype {scale.dtype}, accepted: float32")
    L, N, K = codes.shape
    blocks = (L, -(-N // BLOCK), -(-K // BLOCK))
    accepted = [(L,), (L, N)] + ([] if codes.dtype == jnp.int8 else [blocks])
    if scale.shape not in accepted:
        raise ValueError(f"scale: shape {scale.shape}, accepted: {', '.join(map(str, accepted))}")
    if scale.ndim == 3 and K > BLOCK:
        return EightBitWeights(codes, scale)
    if scale.ndim == 3:  # one block holds all of K: a scale for each channel
        return EightBitWeights(codes, jnp.repeat(scale, BLOCK, axis=1)[:, :N])
    return EightBitWeights(codes, jnp.broadcast_to(scale.reshape(L, -1, 1), (L, N, 1)))
