"""Layout of the paged KV cache: pages of keys and values with their quantisation parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

STATIC = {"static": True}
BITS = (16, 8, 4)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """Keys and values of a run of layers, in pages.

    With 16 bits a page holds the activations as they are. With b = 8 or 4 bits it holds uint16 words of 16 / b codes:
    bits b*j .. b*j+b-1 of word w are the code of head dim j * W + w, where W = H * b / 16, and

        value = code * scale + offset

    with scale = params[..., 0, t] and offset = params[..., 1, t], one pair per token and kv head. Page 0 is a sink:
    padding is written there and nothing reads it.

    Attributes:
        k, v: [L, P, K, page_len, W], W = H for 16 bits.
        k_params, v_params: float16 [L, P, K, 2, page_len], None for 16 bits.
        k_bits, v_bits: 16, 8 or 4.
        head_dim: H.
    """

    k: jax.Array
    v: jax.Array
    k_params: jax.Array | None
    v_params: jax.Array | None
    k_bits: int = field(metadata=STATIC)
    v_bits: int = field(metadata=STATIC)
    head_dim: int = field(metadata=STATIC)

    @property
    def page_len(self) -> int:
        return self.k.shape[3]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True)
class Planes:
    """How K or V lies in a page: the head dims that share words, W apart; see `KVPages`."""

    bits: int
    head_dim: int

    @property
    def planes(self) -> int:
        return 1 if self.bits == 16 else 16 // self.bits

    @property
    def width(self) -> int:
        """Head dims of a plane."""
        return self.head_dim // self.planes


def check_bits(name: str, bits: int, head_dim: int) -> None:
    """Raises ValueError if heads of this width cannot be packed at this precision."""
    if bits not in BITS:
        raise ValueError(f"{name}: {bits}, accepted: 16, 8 or 4")
    if head_dim * bits % 16:
        raise ValueError(f"head_dim: {head_dim}, accepted at {bits} bits: a multiple of {16 // bits}")


def empty_pages(
    num_layers: int, num_pages: int, num_kv_heads: int, page_len: int, head_dim: int,
    *, k_bits: int = 16, v_bits: int = 16, dtype: jnp.dtype,
) -> KVPages:  # fmt: skip
    """Zeroed pages; `dtype` is that of 16-bit sides.

    Raises:
        ValueError: a precision that is none, or that does not pack this head dim.
    """
    check_bits("k_bits", k_bits, head_dim)
    check_bits("v_bits", v_bits, head_dim)
    lead = (num_layers, num_pages, num_kv_heads)

    def side(bits: int) -> tuple[jax.Array, jax.Array | None]:
        if bits == 16:
            return jnp.zeros((*lead, page_len, head_dim), dtype), None
        words = jnp.zeros((*lead, page_len, head_dim * bits // 16), jnp.uint16)
        return words, jnp.zeros((*lead, 2, page_len), jnp.float16)

    (k, k_params), (v, v_params) = side(k_bits), side(v_bits)
    return KVPages(k, v, k_params, v_params, k_bits, v_bits, head_dim)


def bytes_per_token(num_kv_heads: int, head_dim: int, *, k_bits: int, v_bits: int, itemsize: int = 2) -> int:
    """Bytes of one token in one layer; `itemsize` is that of the activation dtype."""

    def side(bits: int) -> int:
        return head_dim * itemsize if bits == 16 else head_dim * bits // 8 + 4

    return num_kv_heads * (side(k_bits) + side(v_bits))


def check_page_ids(name: str, ids: jax.Array, pages: KVPages) -> None:
    """Raises ValueError if a page number lies outside the pool, or is a tracer whose value nobody knows yet."""
    if isinstance(ids, jax.core.Tracer):
        raise ValueError(f"{name}: traced, accepted with debug=True: concrete arrays, so call outside jax.jit")
    num_pages = pages.k.shape[1]
    wrong = np.unique(np.asarray(ids)[(np.asarray(ids) < 0) | (np.asarray(ids) >= num_pages)])
    if wrong.size:
        raise ValueError(f"{name}: page {wrong[0]}, accepted: 0 .. {num_pages - 1}")
