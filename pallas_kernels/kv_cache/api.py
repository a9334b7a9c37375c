"""The KV write's public function: checks, and the choice between kernel and reference."""

from __future__ import annotations

import jax

from pallas_kernels import backend
from pallas_kernels.kv_cache.kernel import WriteConfig, kernel_write
from pallas_kernels.kv_cache.pages import KVPages, check_page_ids
from pallas_kernels.kv_cache.reference import reference_write


def write_kv(
    pages: KVPages,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    page_ids: jax.Array,
    page_offsets: jax.Array,
    *,
    implementation: backend.Implementation | None = None,
    debug: bool = False,
) -> KVPages:
    """Quantises each row's K and V and writes them into its page; in place where `pages` is donated or loop-carried.

    Args:
        pages: the cache.
        k, v: [R, K, H], any float dtype; K after RoPE.
        layer: int32 scalar.
        page_ids: int32 [R]; 0 for padding.
        page_offsets: int32 [R], token within the page.
        implementation: None takes the kernel on a GPU and the reference elsewhere.
        debug: check that the page numbers lie in the pool; needs concrete arrays. Unchecked ones write anywhere.

    Returns:
        The pages with the rows written. Two rows at one place (only in page 0) leave either.

    Raises:
        ValueError: names the argument that does not fit.
    """
    expected = (page_ids.shape[0], pages.num_kv_heads, pages.head_dim)
    for name, array in (("k", k), ("v", v)):
        if array.shape != expected:
            raise ValueError(f"{name}: shape {array.shape}, accepted: {expected}")
    if page_offsets.shape != page_ids.shape:
        raise ValueError(f"page_offsets: shape {page_offsets.shape}, accepted: {page_ids.shape}")
    if debug:
        check_page_ids("page_ids", page_ids, pages)
    chosen = backend.choose("write_kv", implementation, backend.capability_problem())
    if chosen == "reference":
        return reference_write(pages, k, v, layer, page_ids, page_offsets)
    return kernel_write(pages, k, v, layer, page_ids, page_offsets, WriteConfig(), chosen == "interpret")
