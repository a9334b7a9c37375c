"""Picking tokens from logits on the device: greedy, temperature, top-k, top-p, min-p, with counter-based keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from turbojax.core.state import Sampler


def mask_stop_ids(logits: jax.Array, stop_ids: jax.Array, too_short: jax.Array) -> jax.Array:
    """Makes stop tokens impossible in rows that must not end yet.

    Args:
        logits: float32 [M, V].
        stop_ids: int32 [M, S], negative where unused.
        too_short: bool [M].
    """
    # Unused ids and rows that may end point past the vocabulary, where the scatter drops them.
    ids = jnp.where((stop_ids >= 0) & too_short[:, None], stop_ids, logits.shape[-1])
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def sortable_bits(x: jax.Array) -> jax.Array:
    """uint32 keys that order as the float32 values do."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
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


def truncate(logits: jax.Array, sampler: Sampler) -> jax.Array:
    """Sets to -inf what top-k, then top-p, then min-p leave out. Ties at a threshold all stay in.

    top-p is over the softmax of what top-k kept; min-p is relative to the likeliest token.

    Args:
        logits: float32 [M, V], already divided by the temperature.
        sampler: rows as in the logits.
    """
    num_vocab = logits.shape[-1]
    top_k = jnp.where((sampler.top_k <= 0) | (sampler.top_k > num_vocab), num_vocab, sampler.top_k)

    def by_rank(x: jax.Array) -> jax.Array:
        keys = sortable_bits(x)
        kth = threshold(keys, jnp.ones_like(x), top_k.astype(jnp.float32))
        x = jnp.where(keys >= kth[:, None], x, -jnp.inf)
        probs = jax.nn.softmax(x, axis=-1)
        nucleus = threshold(keys, probs, sampler.top_p)
        keep = (keys >= nucleus[:, None]) | (sampler.top_p >= 1.0)[:, None]
        return jnp.where(keep, x, -jnp.inf)

    ranked = lax.cond(jnp.any((top_k < num_vocab) | (sampler.top_p < 1.0)), by_rank, lambda x: x, logits)
    floor = jnp.max(ranked, axis=-1) + jnp.log(sampler.min_p)
    return jnp.where(ranked >= floor[:, None], ranked, -jnp.inf)


def row_keys(sampler: Sampler, positions: jax.Array) -> jax.Array:
    """One random key a row from (seed, sample index, position) and nothing else: the batch cannot matter."""

    def key(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample_index), position)

    return jax.vmap(key)(sampler.seed, sampler.sample_index, positions)


def sample(logits: jax.Array, sampler: Sampler, positions: jax.Array) -> jax.Array:
    """Draws one token a row; rows of temperature 0 take the argmax.

    Args:
        logits: float32 [M, V].
        sampler: how, `[M]` rows.
        positions: int32 [M], position that the new token will have.

    Returns:
        int32 [M].
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(logits: jax.Array) -> jax.Array:
        hot = sampler.temperature > 0
        scaled = logits / jnp.where(hot, sampler.temperature, 1.0)[:, None]
        kept = truncate(scaled, sampler)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (logits.shape[-1],)))(row_keys(sampler, positions))
        return jnp.where(hot, jnp.argmax(kept + noise, axis=-1).astype(jnp.int32), greedy)

    return lax.cond(jnp.any(sampler.temperature > 0), draw, lambda _: greedy, logits)
