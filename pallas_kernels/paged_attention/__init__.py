"""Attention over the paged, possibly quantised KV cache: decode (one query a sequence) and prefill (chunks)."""

from pallas_kernels.paged_attention.api import paged_decode_attention, paged_prefill_attention

__all__ = ["paged_decode_attention", "paged_prefill_attention"]
