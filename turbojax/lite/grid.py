"""The grids that weights are rounded to: groups of inputs with a float scale and an offset, fitted and applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import AffineTensor

Array = Any
"""A numpy or a jax array: what is written here runs on the host, and in a jitted search on the device."""


@dataclass(frozen=True)
class Grid:
    """Codes of `bits`, value = code * scale + offset with a scale and an offset for each output and group of inputs.

    Attributes:
        bits: of a code, 4 or 8.
        group_size: inputs under one scale; the last group may be shorter.
        symmetric: the offset is -2**(bits - 1) * scale.
        float_offset: the offset is any float (the smallest value), else a whole multiple of the scale.
        min_zero: the smallest code that stands for 0; 1 where a file has no place for 0.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    float_offset: bool = False
    min_zero: int = 0

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    def num_groups(self, in_dim: int) -> int:
        return -(-in_dim // self.group_size)


def namespace(x: Array) -> Any:
    return jnp if isinstance(x, jax.Array) else np


def grouped(w: Array, group_size: int) -> Array:
    """[N, K] -> [N, G, group_size]; the last value fills a short last group, which leaves its extremes as they are."""
    padding = -w.shape[1] % group_size
    padded = namespace(w).pad(w, ((0, 0), (0, padding)), mode="edge") if padding else w
    return padded.reshape(w.shape[0], -1, group_size)


def fit(w: Array, grid: Grid, shrink: Array | float = 1.0) -> tuple[Array, Array]:
    """Scales and offsets whose grid spans the weights of each group, or a share of their range.

    A scale is rounded to float16 first, as files store it; all that follows is fitted to the rounded one.

    Args:
        w: float [N, K].
        grid: what to fit.
        shrink: a share of the range, or one for each output and group [N, G].

    Returns:
        scale, offset: of w's dtype, [N, G].
    """
    xp, groups = namespace(w), grouped(w, grid.group_size)
    low, high = groups.min(-1) * shrink, groups.max(-1) * shrink
    if grid.symmetric:
        high = xp.maximum(-low, high)
        low = -high
    elif not grid.float_offset:
        low, high = xp.minimum(low, 0), xp.maximum(high, 0)
    scale = ((high - low) / grid.max_code).astype(np.float16).astype(w.dtype)
    scale = xp.where(scale == 0, xp.ones_like(scale), scale)
    if grid.symmetric:
        return scale, -(2.0 ** (grid.bits - 1)) * scale
    if grid.float_offset:
        return scale, low
    return scale, -xp.clip(xp.round(-low / scale), grid.min_zero, grid.max_code) * scale


def codes_of(w: Array, scale: Array, offset: Array, grid: Grid) -> Array:
    """The nearest codes of weights [N, K], as floats of their dtype."""
    xp, groups = namespace(w), grouped(w, grid.group_size)
    codes = xp.clip(xp.round((groups - offset[..., None]) / scale[..., None]), 0, grid.max_code)
    return codes.reshape(w.shape[0], -1)[:, : w.shape[1]]


def values_of(codes: Array, scale: Array, offset: Array, grid: Grid) -> Array:
    """What codes [N, K] stand for."""
    values = grouped(codes, grid.group_size) * scale[..., None] + offset[..., None]
    return values.reshape(codes.shape[0], -1)[:, : codes.shape[1]]


def snapped(w: Array, grid: Grid, shrink: Array | float = 1.0) -> Array:
    """Weights [N, K] rounded to their own grid."""
    scale, offset = fit(w, grid, shrink)
    return values_of(codes_of(w, scale, offset, grid), scale, offset, grid)


def affine_tensor(
    codes: np.ndarray, scale: np.ndarray, offset: np.ndarray, grid: Grid, perm: np.ndarray | None = None
) -> AffineTensor:
    """The canonical tensor of codes [N, K] with scale and offset [N, G]."""
    scale, offset = np.asarray(scale, np.float32), np.asarray(offset, np.float32)
    return AffineTensor(
        codes=np.ascontiguousarray(np.asarray(codes).astype(np.uint8).T),
        scale=np.ascontiguousarray(scale.T),
        offset=None if grid.symmetric else np.ascontiguousarray(offset.T),
        bits=grid.bits,
        group_size=grid.group_size,
        perm=perm,
    )


def rounded(w: np.ndarray, grid: Grid, shrink: np.ndarray | float = 1.0) -> AffineTensor:
    """Weights [N, K] rounded to the nearest codes."""
    scale, offset = fit(w, grid, shrink)
    return affine_tensor(codes_of(w, scale, offset, grid), scale, offset, grid)
