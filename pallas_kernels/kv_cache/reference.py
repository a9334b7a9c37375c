"""KV write in plain JAX: what the kernel is held against, and what CPUs run."""

from __future__ import annotations

from dataclasses import replace

import jax

from pallas_kernels.kv_cache.pages import KVPages
from pallas_kernels.kv_cache.quantise import pack, quantise


def reference_write(
    pages: KVPages, k: jax.Array, v: jax.Array, layer: jax.Array, page_ids: jax.Array, page_offsets: jax.Array
) -> KVPages:
    """Scatters rows into pages; one scatter window a row, so that XLA's CPU loop runs R times and not R * K."""

    def write(
        stored: jax.Array, params: jax.Array | None, x: jax.Array, bits: int
    ) -> tuple[jax.Array, jax.Array | None]:
        at = (layer, page_ids, slice(None), page_offsets)
        if params is None:
            return stored.at[at].set(x.astype(stored.dtype)), None
        codes, new = quantise(x, bits)
        return (
            stored.at[at].set(pack(codes, bits)),
            params.at[layer, page_ids, :, :, page_offsets].set(new),
        )

    new_k, k_params = write(pages.k, pages.k_params, k, pages.k_bits)
    new_v, v_params = write(pages.v, pages.v_params, v, pages.v_bits)
    return replace(pages, k=new_k, v=new_v, k_params=k_params, v_params=v_params)
