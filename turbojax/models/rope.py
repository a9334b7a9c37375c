"""Rotary position embedding: frequencies and angles from a static spec."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

RopeKind = Literal["static", "dynamic", "longrope"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotation by angle position * inv_freq[i] of the pair (x[i], x[i + rotary_dim/2]), scaled by `attention_factor`.

    Attributes:
        rotary_dim: leading dims of a head that rotate; the rest pass through.
        theta: base of the frequencies.
        kind: "static" uses `inv_freq` for every sequence. "dynamic" (NTK) grows the base with the length the
            sequence was admitted with; "longrope" picks `long_inv_freq` when that length passes
            `original_max_len`. Fixing the length at admission keeps chunked = whole and preempted = undisturbed.
        inv_freq: [rotary_dim / 2], radians per token.
        long_inv_freq: the same, "longrope" only.
        factor: "dynamic" only.
        original_max_len: the length the model was trained with.
    """

    rotary_dim: int
    theta: float
    inv_freq: tuple[float, ...]
    kind: RopeKind = "static"
    attention_factor: float = 1.0
    long_inv_freq: tuple[float, ...] = ()
    factor: float = 1.0
    original_max_len: int = 0

    def regime(self, admitted_len: int) -> int:
        """Equal for two lengths exactly where `row_inv_freq` gives both the same frequencies."""
        if self.kind == "longrope":
            return int(admitted_len > self.original_max_len)
        return max(admitted_len, self.original_max_len) if self.kind == "dynamic" else 0


def default_inv_freq(theta: float, rotary_dim: int) -> np.ndarray:
    """theta ** (-2i / rotary_dim), float64 [rotary_dim / 2]."""
    return theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def llama3_inv_freq(inv_freq: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Llama 3.1: wavelengths beyond the trained context are stretched by `factor`, short ones kept, smooth between."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * inv_freq / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / float(scaling["factor"]))


def yarn_inv_freq(inv_freq: np.ndarray, theta: float, scaling: dict[str, Any]) -> np.ndarray:
    """YaRN (arXiv 2309.00071): a ramp over dims between interpolated and original frequencies."""
    half, factor = len(inv_freq), float(scaling["factor"])
    trained_len = float(scaling["original_max_position_embeddings"])

    def dim_of(num_turns: float) -> float:
        return half * math.log(trained_len / (num_turns * 2 * math.pi)) / math.log(theta)

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return inv_freq / factor * ramp + inv_freq * (1.0 - ramp)


def yarn_attention_factor(scaling: dict[str, Any]) -> float:
    """0.1 ln(factor) + 1, or what the config gives, or the ratio of its two mscales (DeepSeek)."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = float(scaling["factor"])
    if factor <= 1:
        return 1.0

    def mscale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def row_inv_freq(spec: RopeSpec, admitted_len: jax.Array) -> jax.Array:
    """Inverse frequencies of each row.

    Args:
        spec: the rope.
        admitted_len: int32 [R], prompt length of the row's sequence when it was first admitted.

    Returns:
        float32 [R, rotary_dim / 2], or [1, rotary_dim / 2] where all rows share them.
    """
    inv_freq = jnp.asarray(spec.inv_freq, jnp.float32)[None]
    if spec.kind == "static":
        return inv_freq
    if spec.kind == "longrope":
        long = jnp.asarray(spec.long_inv_freq, jnp.float32)[None]
        return jnp.where((admitted_len > spec.original_max_len)[:, None], long, inv_freq)
    # The base grows by stretch ** (dim / (dim - 2)), so frequency i shrinks by stretch ** (2i / (dim - 2)).
    length = jnp.maximum(admitted_len, spec.original_max_len).astype(jnp.float32)
    stretch = spec.factor * length / spec.original_max_len - (spec.factor - 1)
    exponent = jnp.arange(0, spec.rotary_dim, 2, dtype=jnp.float32) / (spec.rotary_dim - 2)
    return inv_freq * stretch[:, None] ** -exponent[None]


def rope_angles(spec: RopeSpec, positions: jax.Array, admitted_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the rows' angles, float32 [R, rotary_dim / 2].

    float32 throughout: bfloat16 rounds position 257 to 256, and bfloat16 frequencies move logits by 0.06.

    Args:
        spec: the rope.
        positions: int32 [R].
        admitted_len: int32 [R], see `row_inv_freq`.
    """
    angles = positions.astype(jnp.float32)[:, None] * row_inv_freq(spec, admitted_len)
    return jnp.cos(angles) * spec.attention_factor, jnp.sin(angles) * spec.attention_factor
