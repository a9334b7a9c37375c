"""The paged KV cache: its layout at 16, 8 and 4 bits, and the op that quantises rows into pages."""

from pallas_kernels.kv_cache.api import write_kv
from pallas_kernels.kv_cache.pages import KVPages, bytes_per_token, empty_pages

__all__ = ["KVPages", "bytes_per_token", "empty_pages", "write_kv"]
