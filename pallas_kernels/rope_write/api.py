"""The op's public function: checks, and the choice between kernel and reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.kv_cache.pages import KVPages, check_page_ids
from pallas_kernels.rope_write.kernel import hadamard_problem, kernel_rope_write
from pallas_kernels.rope_write.reference import reference_rope_write
from pallas_kernels.rope_write.types import HeadNorm


def rope_write(
    pages: KVPages,
    qkv: jax.Array,
    layer: jax.Array,
    page_ids: jax.Array,
    page_offsets: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    bias: jax.Array | None = None,
    norm: HeadNorm | None = None,
    dtype: jnp.dtype | None = None,
    hadamard: bool = False,
    k_scale: jax.Array | None = None,
    implementation: backend.Implementation | None = None,
    debug: bool = False,
) -> tuple[KVPages, jax.Array]:
    """Finishes the qkv projection: q comes back ready for attention, K and V land in their pages.

    Args:
        pages: the cache; written in place where it is donated or loop-carried.
        qkv: [S, R, K * (G + 2) * H], partial sums of the projection; a kv head's G query heads, its k, its v.
        layer: int32 scalar.
        page_ids: int32 [R]; 0 for padding.
        page_offsets: int32 [R], token within the page.
        cos, sin: float32 [R, rotary_dim / 2]; the leading rotary_dim dims turn, half-split pairs.
        bias: [L, K * (G + 2) * H] or None.
        norm: of the heads of q and k, before RoPE; None for models without.
        dtype: of q; None is qkv.dtype.
        hadamard: multiply q and k by the same Hadamard matrix behind RoPE. Their products stay, and k has no dims that
            are much larger than the others, which K of few bits would spend its levels on.
        k_scale: float32 [L, K, H], k is multiplied by it and q divided before the Hadamard matrix: large where what q
            has there makes an error of k cost much.
        implementation: None takes the kernel on a GPU and the reference elsewhere.
        debug: check that the page numbers lie in the pool; needs concrete arrays. Unchecked ones write anywhere.

    Returns:
        The pages, and q [R, K * G, H]. Two rows at one place (only in page 0) leave either.

    Raises:
        ValueError: names the argument that does not fit.
    """
    _check(pages, qkv, page_ids, page_offsets, cos, sin, bias, norm)
    if k_scale is not None and (not hadamard or k_scale.shape[1:] != (pages.num_kv_heads, pages.head_dim)):
        accepted = f"[L, {pages.num_kv_heads}, {pages.head_dim}] beside hadamard=True"
        raise ValueError(f"k_scale: shape {k_scale.shape}, accepted: {accepted}")
    if debug:
        check_page_ids("page_ids", page_ids, pages)
    dtype = jnp.dtype(dtype or qkv.dtype)
    problem = backend.capability_problem() or (hadamard_problem(pages, dtype) if hadamard else None)
    chosen = backend.choose("rope_write", implementation, problem)
    args = (pages, qkv, layer, page_ids, page_offsets, cos, sin, bias, norm, dtype, hadamard, k_scale)
    if chosen == "reference":
        return reference_rope_write(*args)
    return kernel_rope_write(*args, chosen == "interpret")


def _check(
    pages: KVPages, qkv: jax.Array, page_ids: jax.Array, page_offsets: jax.Array, cos: jax.Array, sin: jax.Array,
    bias: jax.Array | None, norm: HeadNorm | None,
) -> None:  # fmt: skip
    """Raises ValueError that names the argument which does not fit."""
    unit, num_rows = pages.num_kv_heads * pages.head_dim, page_ids.shape[0]
    if qkv.ndim != 3 or qkv.shape[1] != num_rows or qkv.shape[2] % unit or qkv.shape[2] < 3 * unit:
        raise ValueError(f"qkv: shape {qkv.shape}, accepted: [S, {num_rows}, (G + 2) * {unit}]")
    if page_offsets.shape != page_ids.shape:
        raise ValueError(f"page_offsets: shape {page_offsets.shape}, accepted: {page_ids.shape}")
    for name, array in (("cos", cos), ("sin", sin)):
        if array.ndim != 2 or array.shape[0] != num_rows or 2 * array.shape[1] > pages.head_dim:
            accepted = f"[{num_rows}, at most {pages.head_dim // 2}]"
            raise ValueError(f"{name}: shape {array.shape}, accepted: {accepted}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: shape {sin.shape}, accepted: {cos.shape}, that of cos")
    for name, weight in () if norm is None else (("norm.q", norm.q), ("norm.k", norm.k)):
        if weight.ndim != 2 or weight.shape[1] != pages.head_dim:
            raise ValueError(f"{name}: shape {weight.shape}, accepted: [L, {pages.head_dim}]")
    if bias is not None and bias.shape[1:] != qkv.shape[2:]:
        raise ValueError(f"bias: shape {bias.shape}, accepted: [L, {qkv.shape[2]}]")
