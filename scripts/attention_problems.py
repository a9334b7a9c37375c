"""What `bench_attention` times: shapes, cases, cuts worth trying, and random pools and arguments to time them on."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.kv_cache import KVPages, bytes_per_token, empty_pages
from pallas_kernels.kv_cache.kernel import WriteConfig
from pallas_kernels.paged_attention.decode_kernel import DecodeConfig
from pallas_kernels.paged_attention.prefill_kernel import PrefillConfig

PAGE_LEN = 64
POOL_BYTES = 60e9
LAYERS_TIMED = 6


class Shape(NamedTuple):
    """kv heads, query heads of each, head width."""

    kv_heads: int
    group: int
    head_dim: int


MAIN_SHAPE = Shape(8, 4, 128)
OTHER_SHAPES = (Shape(8, 3, 128), Shape(4, 7, 128), Shape(8, 1, 128), Shape(8, 4, 64))  # without targets
OTHER_CASES = ("64x4k", "8k")


def ragged_lengths(batch: int = 64) -> np.ndarray:
    """Lognormal, sigma 1, mean 4k, clipped to 64 .. 32k, seed 0."""
    x = np.random.default_rng(0).lognormal(np.log(4096) - 0.5, 1.0, batch)
    return np.clip(x, 64, 32768).astype(np.int32)


DECODE_CASES = {
    "64x4k": (np.full(64, 4096 - 3), 64),
    "64x16k": (np.full(64, 16384 - 3), 256),
    "ragged": (ragged_lengths(), 512),
    "1x1k": (np.full(1, 1024 - 3), 16),
    "1x32k": (np.full(1, 32768 - 3), 512),
}
PREFILL_CASES = {"8k": (8192, 0), "1k+7k": (1024, 7168), "448+16k": (448, 16384), "256+16k": (256, 16384),
                 "64+16k": (64, 16384), "64+64": (64, 64)}  # fmt: skip
WRITE_CASES = {"8k rows": 8192, "64 rows": 64}
WRITE_CANDIDATES = [WriteConfig(*c) for c in ((8, 1), (16, 1), (16, 2), (16, 4), (32, 4), (64, 8), (64, 4))]


def decode_candidates(case: str) -> list[DecodeConfig]:
    """Cuts worth timing: enough programs for the case, all warps and stages."""
    ranges = {"64x4k": (2048, 4096), "64x16k": (4096, 16384), "ragged": (1024, 2048, 4096),
              "1x1k": (64, 128), "1x32k": (256, 512)}  # fmt: skip
    stages = (3, 5) if case in ("64x4k", "ragged") else (4,)
    return [DecodeConfig(*c) for c in itertools.product(ranges[case], (1, 2), (2, 4), stages) if c[0] >= c[1] * 64]


def prefill_candidates() -> list[PrefillConfig]:
    cuts = itertools.product((64, 128), (1, 2), (4, 8), (2, 3))
    return [PrefillConfig(*c) for c in cuts if (c[0], c[2]) != (64, 8)]


def random_pool(k_bits: int, v_bits: int, num_pages: int, *, kv_heads: int, head_dim: int,
                pool_bytes: float = POOL_BYTES) -> KVPages:  # fmt: skip
    """Random pages: one layer's worth of random bits, repeated over as many layers as make `pool_bytes`."""
    per_layer = num_pages * PAGE_LEN * bytes_per_token(kv_heads, head_dim, k_bits=k_bits, v_bits=v_bits)
    layers = max(LAYERS_TIMED, int(-(-pool_bytes // per_layer)))
    shapes = jax.eval_shape(
        lambda: empty_pages(layers, num_pages, kv_heads, PAGE_LEN, head_dim, k_bits=k_bits, v_bits=v_bits,
                            dtype=jnp.bfloat16)
    )  # fmt: skip

    def fill(key: jax.Array, like: jax.ShapeDtypeStruct, bits: int) -> jax.Array:
        if like.dtype == jnp.uint16:
            one = jax.random.bits(key, like.shape[1:], jnp.uint16)
        elif like.dtype == jnp.float16:
            uniform = jax.random.uniform(key, like.shape[1:], jnp.float32, 0.5, 1.0) * 6 / (2**bits - 1)
            one = uniform.at[:, :, 1].multiply(-(2**bits) / 2).astype(jnp.float16)
        else:
            one = jax.random.normal(key, like.shape[1:], jnp.bfloat16)
        return jnp.broadcast_to(one, like.shape)

    leaves: Any = {}
    for n, (name, bits) in enumerate((("k", k_bits), ("v", v_bits), ("k_params", k_bits), ("v_params", v_bits))):
        like = getattr(shapes, name)
        leaves[name] = None if like is None else jax.jit(fill, static_argnums=(1, 2))(jax.random.key(n), like, bits)
    return KVPages(**leaves, k_bits=k_bits, v_bits=v_bits, head_dim=head_dim)


def decode_case(lengths: np.ndarray, table_len: int, num_pages: int, heads: int, head_dim: int) -> tuple[Any, ...]:
    """Queries, random block tables, lengths."""
    rng = np.random.default_rng(1)
    ids = rng.permutation(num_pages - 1) + 1
    tables = np.zeros((len(lengths), table_len), np.int32)
    start = 0
    for row, length in enumerate(lengths):
        count = -(-int(length) // PAGE_LEN)
        tables[row, :count] = ids[start : start + count]
        start += count
    q = jax.random.normal(jax.random.key(7), (len(lengths), heads, head_dim), jnp.bfloat16)
    return q, jnp.asarray(tables), jnp.asarray(lengths, jnp.int32)


def prefill_args(rows: int, num_pages: int, heads: int, head_dim: int, history: int = 0) -> tuple[jax.Array, ...]:
    """One chunk of `rows` behind `history` tokens, in random pages."""
    table_len = -(-(rows + history) // PAGE_LEN)
    ids = np.random.default_rng(1).permutation(num_pages - 1)[:table_len] + 1
    q = jax.random.normal(jax.random.key(7), (rows, heads, head_dim), jnp.bfloat16)
    starts, histories = jnp.asarray([0, rows], jnp.int32), jnp.asarray([history], jnp.int32)
    return q, jnp.asarray(ids[None], jnp.int32), starts, histories


def over_layers(attend: Any) -> Any:
    """attend(layer) once for each timed layer, spread over the pool."""

    def run(pages: KVPages, q: jax.Array, *rest: jax.Array) -> jax.Array:
        stride = pages.k.shape[0] // LAYERS_TIMED
        return lax.fori_loop(0, LAYERS_TIMED, lambda i, _: attend(q, pages, i * stride, *rest), q)

    return run


def write_args(rows: int, pages: KVPages) -> tuple[jax.Array, ...]:
    """Keys and values of `rows` tokens, and places for them in random pages."""
    rng = np.random.default_rng(2)
    pages_of_rows = rng.permutation(pages.k.shape[1] - 1)[: -(-rows // PAGE_LEN)] + 1
    ids = jnp.asarray(np.repeat(pages_of_rows, PAGE_LEN)[:rows], jnp.int32)
    offsets = jnp.asarray(np.arange(rows) % PAGE_LEN, jnp.int32)
    shape = (rows, pages.num_kv_heads, pages.head_dim)
    k, v = (jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n in range(2))
    return k, v, ids, offsets
