"""Paged attention in float64 numpy, one row at a time, and random problems to hold the ops against it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_cache import KVPages, empty_pages, write_kv


def dequantised(stored, params, bits: int) -> np.ndarray:
    """float64 [L, P, K, page_len, H]."""
    if bits == 16:
        return np.asarray(stored, np.float64)
    words = np.asarray(stored)
    codes = np.concatenate([(words >> (bits * j)) & (2**bits - 1) for j in range(16 // bits)], axis=-1)
    params = np.asarray(params, np.float64)
    return codes * params[..., 0, :, None] + params[..., 1, :, None]


def attend(q, keys, values, scale, softcap, sinks):
    """q [N, H], keys and values [S, K, H] that the row sees -> [N, H]."""
    if len(keys) == 0:
        return np.zeros_like(q)
    group = q.shape[0] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("nh,snh->ns", q, keys) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    top = scores.max(-1) if sinks is None else np.maximum(scores.max(-1), sinks)
    p = np.exp(scores - top[:, None])
    total = p.sum(-1) + (0 if sinks is None else np.exp(sinks - top))
    return np.einsum("ns,snh->nh", p / total[:, None], values)


def expected(q, pages: KVPages, layer, tables, rows, *, scale, window=None, softcap=None, sinks=None) -> np.ndarray:
    """[R, N, H] of rows (table, number of keys seen), each q row its own."""
    k, v = (
        dequantised(x, p, b)[layer] for x, p, b in
        ((pages.k, pages.k_params, pages.k_bits), (pages.v, pages.v_params, pages.v_bits))
    )  # fmt: skip
    q, tables = np.asarray(q, np.float64), np.asarray(tables)
    sinks = None if sinks is None else np.asarray(sinks, np.float64)
    out = np.zeros_like(q)
    for r, (table, length) in enumerate(rows):
        low = 0 if window is None else max(0, length - window)
        ids = tables[table]
        seen = [np.moveaxis(x[ids], 1, 2).reshape(-1, x.shape[1], x.shape[3])[low:length] for x in (k, v)]
        out[r] = attend(q[r], *seen, scale, softcap, sinks)
    return out


def random_pages(
    seed: int, *, tables: int, table_len: int, kv_heads: int, head_dim: int, page_len: int, k_bits=16, v_bits=16,
    dtype=jnp.float32, layers=2,
) -> tuple[KVPages, jax.Array]:  # fmt: skip
    """Pages written by `write_kv` in layer 1, in random order, and block tables over them; page 0 stays zero."""
    rng = np.random.default_rng(seed)
    num = tables * table_len
    pages = empty_pages(layers, num + 1, kv_heads, page_len, head_dim, k_bits=k_bits, v_bits=v_bits, dtype=dtype)
    ids = (rng.permutation(num) + 1).astype(np.int32)
    k, v = (jnp.asarray(rng.standard_normal((num * page_len, kv_heads, head_dim)), dtype) for _ in "kv")
    write = jax.jit(functools.partial(write_kv, implementation="reference"))
    offsets = np.tile(np.arange(page_len, dtype=np.int32), num)
    pages = write(pages, k, v, jnp.int32(1), jnp.asarray(np.repeat(ids, page_len)), jnp.asarray(offsets))
    return pages, jnp.asarray(ids.reshape(tables, table_len))


def random_queries(seed: int, rows: int, heads: int, head_dim: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, heads, head_dim)), dtype)


def relative_error(found, wanted) -> float:
    found = np.asarray(found, np.float64)
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))
