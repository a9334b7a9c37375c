"""Sampling in plain JAX: what the kernels are held against, and what CPUs run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sampling.noise import LOG2_E, gumbel

MIN_TEMPERATURE = 1e-30  # below, logits over it might be infinite


def mask_forbidden(logits: jax.Array, forbidden_ids: jax.Array) -> jax.Array:
    """-inf at `forbidden_ids` [M, S] of logits [M, V]; negative ids forbid nothing."""
    # Unused ids point past the vocabulary, where the scatter drops them.
    ids = jnp.where(forbidden_ids >= 0, forbidden_ids, logits.shape[-1])
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def sortable_bits(x: jax.Array) -> jax.Array:
    """uint32 keys that order as the float32 values do; the two zeros are one."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(bits == jnp.uint32(1 << 31), jnp.uint32(0), bits)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def threshold(keys: jax.Array, mass: jax.Array, need: jax.Array) -> jax.Array:
    """The largest key t of each row with sum(mass[keys >= t]) >= need, found bit by bit: no sort of the vocabulary.

    Args:
        keys: uint32 [M, V].
        mass: float32 [M, V], non-negative.
        need: float32 [M].

    Returns:
        uint32 [M].
    """

    def try_bit(i: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        have = jnp.sum(jnp.where(keys >= candidate[:, None], mass, 0.0), axis=-1)
        return jnp.where(have >= need, candidate, t)

    return lax.fori_loop(0, 32, try_bit, jnp.zeros(keys.shape[0], jnp.uint32))


def truncate(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Sets to -inf what top-k, then top-p, then min-p leave out. Ties at a threshold all stay in.

    top-p is over the softmax of what top-k kept; min-p is relative to the likeliest token.

    Args:
        logits: float32 [M, V], already divided by the temperature.
        top_k, top_p, min_p: [M], as in `sample_tokens`.
    """
    num_vocab = logits.shape[-1]
    top_k = jnp.where((top_k <= 0) | (top_k > num_vocab), num_vocab, top_k)

    def by_rank(x: jax.Array) -> jax.Array:
        keys = sortable_bits(x)
        kth = threshold(keys, jnp.ones_like(x), top_k.astype(jnp.float32))
        return jnp.where(keys >= kth[:, None], x, -jnp.inf)

    def by_mass(x: jax.Array) -> jax.Array:
        keys = sortable_bits(x)
        nucleus = threshold(keys, jax.nn.softmax(x, axis=-1), top_p)
        return jnp.where((keys >= nucleus[:, None]) | (top_p >= 1.0)[:, None], x, -jnp.inf)

    ranked = lax.cond(jnp.any(top_k < num_vocab), by_rank, lambda x: x, logits)
    ranked = lax.cond(jnp.any(top_p < 1.0), by_mass, lambda x: x, ranked)
    floor = jnp.max(ranked, axis=-1) + jnp.log(min_p)
    return jnp.where(ranked >= floor[:, None], ranked, -jnp.inf)


def reference_sample(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, keys: jax.Array,
    forbidden_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `sample_tokens`."""
    if forbidden_ids is not None:
        logits = mask_forbidden(logits, forbidden_ids)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The maximum is NaN where anything is.
    finite = jnp.isfinite(jnp.max(logits, axis=-1))
    hot = temperature > 0

    def draw(logits: jax.Array) -> jax.Array:
        scale = jnp.where(hot, jnp.maximum(temperature, MIN_TEMPERATURE), 1.0)
        kept = truncate(logits / scale[:, None], top_k, top_p, min_p)
        index = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
        noisy = kept * LOG2_E + gumbel(keys[:, :1], keys[:, 1:], index)
        return jnp.where(hot, jnp.argmax(noisy, axis=-1).astype(jnp.int32), greedy)

    # Greedy batches cost no draw; this branch is the host's on a GPU, which runs kernels instead.
    return lax.cond(jnp.any(hot), draw, lambda _: greedy, logits), finite
