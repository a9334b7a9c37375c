"""How much memory there is and how many KV pages it gives, before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax

from pallas_kernels.kv_cache import bytes_per_token
from turbojax.errors import OutOfMemoryError
from turbojax.models.spec import LayerSpec, ModelSpec

# A CPU shares its memory with everything else: without an explicit number of pages the pool takes at most this.
CPU_POOL_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of weights and pool against what the device has free.

    Attributes:
        weight_bytes: of the loaded weights.
        free_bytes: of the device after the weights.
        page_bytes: of one page over all layers, scales included.
        num_pages: pages of the pool, the sink included.
        page_len: tokens of a page.
    """

    weight_bytes: int
    free_bytes: int
    page_bytes: int
    num_pages: int
    page_len: int

    @property
    def pool_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    @property
    def num_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_len

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"weights {self.weight_bytes / mib:,.0f} MiB, KV pool {self.pool_bytes / mib:,.0f} MiB "
            f"({self.num_pages} pages of {self.page_len} tokens, {self.num_tokens:,} tokens), "
            f"left {(self.free_bytes - self.pool_bytes) / mib:,.0f} MiB"
        )


def kv_page_bytes(spec: ModelSpec, page_len: int) -> int:
    """Bytes of a page over all layers: a token and kv head takes H * bits / 8, plus 4 for its scale and offset."""
    itemsize = jax.numpy.dtype(spec.dtype).itemsize

    def layer_bytes(layer: LayerSpec) -> int:
        return bytes_per_token(
            layer.num_kv_heads, layer.head_dim, k_bits=layer.k_bits, v_bits=layer.v_bits, itemsize=itemsize
        )

    per_token = sum(segment.num_layers * layer_bytes(segment.layer) for segment in spec.segments)
    return per_token * page_len


def free_device_bytes() -> int:
    """Bytes that can still be allocated on the default device; of a CPU, the memory that the system calls available."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def plan_memory(
    spec: ModelSpec, weight_bytes: int, *, page_len: int, max_batch_size: int, max_len: int, share: float | int
) -> MemoryPlan:
    """Sizes the pool.

    Args:
        spec: the model.
        weight_bytes: of its weights, already on the device.
        page_len: tokens of a page.
        max_batch_size, max_len: the pool never holds more than this many sequences of this length.
        share: a float is the part of the free memory that the pool takes, an int its number of pages.

    Raises:
        OutOfMemoryError: not even one sequence of one page fits, with the numbers.
    """
    free, page_bytes = free_device_bytes(), kv_page_bytes(spec, page_len)
    if isinstance(share, int):
        num_pages = share
    else:
        budget = int(free * share)
        if jax.default_backend() == "cpu":
            budget = min(budget, CPU_POOL_LIMIT_BYTES)
        useful = max_batch_size * -(-max_len // page_len) + 1
        num_pages = min(budget // page_bytes, useful)
    if num_pages < 2 or num_pages * page_bytes > free:
        raise OutOfMemoryError(
            f"a KV pool of {num_pages} pages of {page_bytes:,} bytes does not fit: {free:,} bytes are free after "
            f"{weight_bytes:,} bytes of weights; lower quant_policy or session_len, or raise cache_max_entry_count"
        )
    return MemoryPlan(weight_bytes, free, page_bytes, num_pages, page_len)
