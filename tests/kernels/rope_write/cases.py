"""Problems of the op, and its result in float64."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_cache import KVPages, empty_pages
from pallas_kernels.rope_write import HeadNorm

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """A shape: rows, K, G, H, rotary dims, splits, bits of K and V, bias, norms and Hadamard or not."""

    rows: int = 21
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    rotary: int = 64
    splits: int = 1
    bits: tuple[int, int] = (16, 16)
    has_bias: bool = False
    has_norm: bool = False
    dtype: str = "bfloat16"
    hadamard: bool = False
    scaled: bool = False

    def arrays(self, seed: int = 0) -> tuple[tuple, dict]:
        """Arguments and options of `rope_write`; pages are poisoned, and every row has a place of its own."""
        rng = np.random.default_rng(seed)
        width = self.kv_heads * (self.group + 2) * self.head_dim
        pages = empty_pages(
            2, 9, self.kv_heads, 16, self.head_dim, k_bits=self.bits[0], v_bits=self.bits[1],
            dtype=jnp.dtype(self.dtype),
        )  # fmt: skip
        pages = jax.tree.map(lambda x: jnp.full_like(x, 0xABCD if x.dtype == jnp.uint16 else 77.0), pages)
        places = rng.permutation(8 * 16)[: self.rows]
        angles = rng.uniform(0, 6, (self.rows, self.rotary // 2))
        qkv_dtype = self.dtype if self.splits == 1 else "float32"
        normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
        args = (
            pages, normal(self.splits, self.rows, width).astype(qkv_dtype), jnp.int32(1),
            jnp.asarray(1 + places // 16, jnp.int32), jnp.asarray(places % 16, jnp.int32),
            jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32),
        )  # fmt: skip
        options = {
            "bias": normal(2, width).astype(self.dtype) if self.has_bias else None,
            "norm": HeadNorm(normal(2, self.head_dim), normal(2, self.head_dim), EPS, 1.0) if self.has_norm else None,
            "dtype": jnp.dtype(self.dtype),
            "hadamard": self.hadamard,
            "k_scale": jnp.exp(normal(2, self.kv_heads, self.head_dim)) if self.scaled else None,
        }
        return args, options

    def q_in_float64(self, args: tuple, options: dict) -> np.ndarray:
        """[R, N, H]: RoPE as a complex product, Hadamard by the parity of common bits."""
        _, qkv, layer, _, _, cos, sin = args
        x = np.asarray(qkv, np.float64).sum(0)
        if options["bias"] is not None:
            x = x + np.asarray(options["bias"], np.float64)[int(layer)]
        x = x.reshape(self.rows, self.kv_heads, self.group + 2, self.head_dim)[:, :, : self.group]
        if options["norm"] is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
            x = x * (1 + np.asarray(options["norm"].q, np.float64)[int(layer)])
        half = self.rotary // 2
        turn = (np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64))[:, None, None]
        pair = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
        x = np.concatenate([pair.real, pair.imag, x[..., 2 * half :]], -1)
        if self.scaled:
            x = x / np.asarray(options["k_scale"], np.float64)[int(layer)][None, :, None]
        if self.hadamard:
            block = next(2**n for n in range(20, -1, -1) if self.head_dim % 2**n == 0)
            signs = np.array([[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)])
            x = (x.reshape(*x.shape[:-1], -1, block) @ signs / np.sqrt(block)).reshape(x.shape)
        return x.reshape(self.rows, -1, self.head_dim)


CASES = [
    Case(),
    Case(splits=3, bits=(8, 4), has_bias=True),
    Case(head_dim=80, rotary=32, bits=(4, 8), has_norm=True),
    Case(head_dim=96, rotary=96, group=1, bits=(8, 8), rows=40, dtype="float16"),
    Case(splits=2, group=8, kv_heads=1, rotary=0, bits=(16, 8), has_bias=True, has_norm=True, rows=1),
    Case(bits=(4, 8), hadamard=True, has_bias=True, rows=1, scaled=True),
    Case(bits=(4, 4), hadamard=True, rows=40, group=2, splits=2, dtype="float16"),
    Case(head_dim=96, rotary=96, bits=(4, 16), hadamard=True, has_norm=True, rows=20, scaled=True),
]


def pages_and_q(found: tuple[KVPages, jax.Array]) -> tuple[KVPages, np.ndarray]:
    """With q in float64."""
    return found[0], np.asarray(found[1], np.float64)
