"""The scale of keys before they are turned and rounded: where a query is large, an error of the key must be small.

With k' = k * d and q' = q / d their product stays, and rounding k' makes an error of about |k'| * |q'|. Over all dims
that is least for d = sqrt(rms(q) / rms(k)), dim by dim. The Hadamard matrix behind it spreads what is still uneven.
Channel scales are SmoothQuant's idea (QServe has them for keys, in pairs, before RoPE), the matrix is QuaRot's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_cache import KVPages, write_kv
from pallas_kernels.rope_write.reference import attention_inputs
from turbojax.core.decoder import forward
from turbojax.core.state import EngineState, KVPool
from turbojax.core.steps import PrefillBatch, chunk_rows
from turbojax.core.weights import Weights
from turbojax.lite.evaluate import chunks_of, window_state

SMALLEST = 1e-4  # of a head's mean power: dims that are nearly never used are not scaled without bound


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeasuredPages(KVPages):
    """Pages of 16 bits, and the sums over tokens of q * q and k * k behind RoPE: float32 [L, K, H] each."""

    q_power: jax.Array
    k_power: jax.Array


def measuring_write(
    pages: MeasuredPages, qkv: jax.Array, layer: jax.Array, page_ids: jax.Array, page_offsets: jax.Array,
    cos: jax.Array, sin: jax.Array, *, bias: Any, norm: Any, dtype: jnp.dtype, **static: Any,
) -> tuple[KVPages, jax.Array]:  # fmt: skip
    """`rope_write` that adds to the sums; padding, which goes to page 0, does not count."""
    del static  # the spec of a measured model leaves its keys as they are
    heads = pages.num_kv_heads, pages.head_dim
    q, k, v = attention_inputs(qkv, *heads, layer, cos, sin, bias, norm, dtype)
    real = (page_ids != 0).astype(jnp.float32)

    def power(x: jax.Array) -> jax.Array:
        by_head = x.astype(jnp.float32).reshape(x.shape[0], heads[0], -1, heads[1])
        return jnp.einsum("rkgh,rkgh,r->kh", by_head, by_head, real) / by_head.shape[2]

    pages = replace(pages, q_power=pages.q_power.at[layer].add(power(q)), k_power=pages.k_power.at[layer].add(power(k)))
    return write_kv(pages, k, v, layer, page_ids, page_offsets), q


def add_powers(
    weights: Weights, state: EngineState, batch: PrefillBatch, powers: list[tuple[jax.Array, jax.Array]]
) -> tuple[EngineState, list[tuple[jax.Array, jax.Array]]]:
    """Runs chunks, and adds what their queries and keys have to the sums of each segment."""

    def measured(pages: KVPages, sums: tuple[jax.Array, jax.Array]) -> KVPages:
        return MeasuredPages(pages.k, pages.v, None, None, pages.k_bits, pages.v_bits, pages.head_dim, *sums)

    pairs = zip(state.pool.segments, powers, strict=True)
    pool = KVPool(tuple(measured(pages, sums) for pages, sums in pairs))
    pool, _ = forward(weights, pool, chunk_rows(state.slots, batch, pool.page_len), measuring_write)
    plain, sums = [], []
    for p in pool.segments:
        assert isinstance(p, MeasuredPages)
        plain.append(KVPages(p.k, p.v, None, None, p.k_bits, p.v_bits, p.head_dim))
        sums.append((p.q_power, p.k_power))
    return replace(state, pool=KVPool(tuple(plain))), sums


_add_powers = jax.jit(add_powers, donate_argnames=("state", "powers"))


def k_scale_of(weights: Weights, windows: np.ndarray) -> np.ndarray:
    """float32 [layers, K, H], what to multiply keys by.

    Args:
        weights: the model's, with 16 bits for K and V and no Hadamard matrix.
        windows: int32 [windows, T], tokens to measure on.
    """
    state = window_state(weights.spec, windows.shape[1])
    powers = [
        tuple(jnp.zeros((s.num_layers, s.layer.num_kv_heads, s.layer.head_dim), jnp.float32) for _ in "qk")
        for s in weights.spec.segments
    ]
    for window in windows:
        for chunk in chunks_of(window):
            state, powers = _add_powers(weights, state, chunk.batch, powers)
    q_power, k_power = (np.concatenate([np.asarray(sums[i], np.float64) for sums in powers]) for i in (0, 1))
    return scale_of(q_power, k_power)


def scale_of(q_power: np.ndarray, k_power: np.ndarray) -> np.ndarray:
    """float32 [..., H], sqrt(rms(q) / rms(k)) of each dim, from sums of squares over as many tokens."""

    def bounded(power: np.ndarray) -> np.ndarray:
        return np.maximum(power, SMALLEST * power.mean(-1, keepdims=True) + np.finfo(np.float32).tiny)

    return ((bounded(q_power) / bounded(k_power)) ** 0.25).astype(np.float32)
