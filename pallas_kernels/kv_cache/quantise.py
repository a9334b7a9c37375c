"""Asymmetric quantisation per token and head, and the packing of codes into uint16 words."""

from __future__ import annotations

import jax
import jax.numpy as jnp

FLOAT16_MAX = 65504.0


def quantise(x: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Codes and parameters of each vector along the last axis.

    scale = (max - min) / (2**bits - 1) and offset = min are rounded to float16 first; codes are chosen against the
    rounded ones, so that their error does not add to the parameters'.

    Args:
        x: [..., H].
        bits: 8 or 4.

    Returns:
        Codes, uint16 [..., H]; parameters (scale, offset), float16 [..., 2].
    """
    x = jnp.clip(x.astype(jnp.float32), -FLOAT16_MAX, FLOAT16_MAX)
    low, high = jnp.min(x, axis=-1), jnp.max(x, axis=-1)
    levels = 2**bits - 1
    params = jnp.stack([(high - low) / levels, low], axis=-1).astype(jnp.float16)
    scale, offset = (params[..., i : i + 1].astype(jnp.float32) for i in (0, 1))
    # A constant vector has scale 0: its codes are 0 and its value is the offset.
    codes = jnp.clip((x - offset) / jnp.where(scale > 0, scale, 1.0) + 0.5, 0, levels)
    return codes.astype(jnp.uint16), params  # the conversion truncates: rounded to nearest


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """uint16 codes [..., H] -> words [..., H * bits / 16]; code j * W + w sits at bits bits*j of word w."""
    planes = 16 // bits
    by_plane = codes.reshape(*codes.shape[:-1], planes, -1)
    words = by_plane[..., 0, :]
    for j in range(1, planes):
        words = words | (by_plane[..., j, :] << jnp.uint16(bits * j))
    return words


def unpack(words: jax.Array, bits: int) -> jax.Array:
    """The inverse of `pack`."""
    mask = jnp.uint16(2**bits - 1)
    planes = [(words >> jnp.uint16(bits * j)) & mask for j in range(16 // bits)]
    return jnp.concatenate(planes, axis=-1)


def dequantise(stored: jax.Array, params: jax.Array | None, bits: int) -> jax.Array:
    """float32 values [..., T, H] of stored tokens [..., T, W] and their parameters [..., 2, T]."""
    if bits == 16 or params is None:
        return stored.astype(jnp.float32)
    scale, offset = (params[..., i, :, None].astype(jnp.float32) for i in (0, 1))
    return unpack(stored, bits).astype(jnp.float32) * scale + offset
