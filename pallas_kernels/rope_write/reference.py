"""The op in plain JAX: what the kernel is held against, and what CPUs run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_cache import write_kv
from pallas_kernels.kv_cache.pages import KVPages
from pallas_kernels.residual_norm.reference import rms_norm
from pallas_kernels.rope_write.hadamard import hadamard_scale, hadamard_signs
from pallas_kernels.rope_write.types import HeadNorm


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the leading 2 * cos.shape[-1] dims of each head, half-split pairs, in float32.

    Args:
        x: [R, heads, H].
        cos, sin: float32 [R, rotary_dim / 2].

    Returns:
        [R, heads, H] in x.dtype.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    lo, hi = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    rotated = [(lo * cos - hi * sin).astype(x.dtype), (hi * cos + lo * sin).astype(x.dtype)]
    return jnp.concatenate([*rotated, x[..., 2 * half :]], axis=-1)


def apply_hadamard(x: jax.Array) -> jax.Array:
    """Multiplies each head [..., H] by the Hadamard matrix, in x.dtype with sums in float32."""
    signs = jnp.asarray(hadamard_signs(x.shape[-1]), x.dtype)
    y = lax.dot_general(
        x, signs, (((x.ndim - 1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip
    return (y * hadamard_scale(x.shape[-1])).astype(x.dtype)


def turn_keys(q: jax.Array, k: jax.Array, k_scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """q [R, N, H] and k [R, K, H] behind k_scale [K, H] and the Hadamard matrix: their products are the same."""
    if k_scale is not None:
        by_head = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]).astype(jnp.float32)
        q = (by_head / k_scale[None, :, None]).astype(q.dtype).reshape(q.shape)
        k = (k.astype(jnp.float32) * k_scale[None]).astype(k.dtype)
    return apply_hadamard(q), apply_hadamard(k)


def attention_inputs(
    qkv: jax.Array, num_kv_heads: int, head_dim: int, layer: jax.Array, cos: jax.Array, sin: jax.Array,
    bias: jax.Array | None, norm: HeadNorm | None, dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """q [R, N, H], k and v [R, K, H] as attention sees them; see `rope_write`."""
    _, num_rows, _ = qkv.shape
    y = qkv[0] if qkv.shape[0] == 1 else qkv.sum(0)
    if bias is not None:
        y = y.astype(jnp.float32) + lax.dynamic_index_in_dim(bias, layer, keepdims=False).astype(jnp.float32)[None]
    y = y.astype(dtype).reshape(num_rows, num_kv_heads, -1, head_dim)
    group = y.shape[2] - 2
    q, k, v = y[:, :, :group].reshape(num_rows, -1, head_dim), y[:, :, group], y[:, :, group + 1]
    if norm is not None:
        q, k = (
            rms_norm(x, lax.dynamic_index_in_dim(weight, layer, keepdims=False), eps=norm.eps, offset=norm.offset)
            for x, weight in ((q, norm.q), (k, norm.k))
        )
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def reference_rope_write(
    pages: KVPages, qkv: jax.Array, layer: jax.Array, page_ids: jax.Array, page_offsets: jax.Array, cos: jax.Array,
    sin: jax.Array, bias: jax.Array | None, norm: HeadNorm | None, dtype: jnp.dtype, hadamard: bool,
    k_scale: jax.Array | None,
) -> tuple[KVPages, jax.Array]:  # fmt: skip
    """See `rope_write`."""
    q, k, v = attention_inputs(qkv, pages.num_kv_heads, pages.head_dim, layer, cos, sin, bias, norm, dtype)
    if hadamard:
        scale = None if k_scale is None else lax.dynamic_index_in_dim(k_scale, layer, keepdims=False)
        q, k = turn_keys(q, k, scale)
    return write_kv(pages, k, v, layer, page_ids, page_offsets, implementation="reference"), q
