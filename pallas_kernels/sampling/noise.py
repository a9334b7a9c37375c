"""The randomness of a draw: a counter-based hash that kernel and reference compute alike."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Log2 = Callable[[jax.Array], jax.Array]
LOG2_E = 1.4426950408889634
GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: neighbouring indices start far apart


def _mix(h: jax.Array) -> jax.Array:
    """The finaliser of murmur3: every bit of a uint32 moves every other with a probability near one half."""
    h = (h ^ (h >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> jnp.uint32(16))


def hashed(key_0: jax.Array, key_1: jax.Array, index: jax.Array) -> jax.Array:
    """uint32 that looks independent for every (key, index): two finalisers, each under one word of the key.

    A bijection of the index for each key, so no 32-bit value comes twice within a row.

    Args:
        key_0, key_1: uint32, broadcast against the index.
        index: int32, the counter: the token's number in the vocabulary.
    """
    h = _mix(index.astype(jnp.uint32) * jnp.uint32(GOLDEN) ^ key_0)
    return _mix(h ^ key_1)


def gumbel_of_bits(bits: jax.Array, log2: Log2 = jnp.log2) -> jax.Array:
    """float32 Gumbel noise in units of ln 2, from -4.6 to 33, of uint32 bits: -log2(-log2(1 - uniform)), all finite.

    High noise decides who wins, and it comes from where the uniform is small: so the uniform keeps its 32 bits there,
    and a series replaces the logarithm, which 1 - uniform and approximate logarithms would blur.

    Args:
        bits: uint32.
        log2: may err by 2**-22, of its value or absolutely.
    """
    v = jnp.minimum(bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    # -ln(1 - v) = v + v**2 / 2 + ...; the first term left out is 1e-8 of it at v = 1 / 16
    series = v * LOG2_E * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return -log2(jnp.where(v < 1 / 16, series, -log2(1.0 - v)))


def gumbel(key_0: jax.Array, key_1: jax.Array, index: jax.Array, log2: Log2 = jnp.log2) -> jax.Array:
    """Noise of token `index` under a row's key, see `hashed` and `gumbel_of_bits`.

    The token with the largest log2(weight) + noise is a draw from the weights, and stays the same token when weights
    move by rounding.
    """
    return gumbel_of_bits(hashed(key_0, key_1, index), log2)
