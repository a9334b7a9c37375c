"""How a step picks tokens: the sampling op under counter-based keys."""

from __future__ import annotations

import jax

from pallas_kernels.sampling import Samples, sample_tokens
from turbojax.core.state import Sampler


def row_keys(sampler: Sampler, positions: jax.Array) -> jax.Array:
    """uint32 [M, 2], randomness from (seed, sample index, position) and nothing else: the batch cannot matter."""

    def key(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, sample_index), position))

    return jax.vmap(key)(sampler.seed, sampler.sample_index, positions)


def sample(
    logits: jax.Array, sampler: Sampler, positions: jax.Array, forbidden_ids: jax.Array | None = None
) -> Samples:
    """Draws one token a row; rows of temperature 0 take the argmax.

    Args:
        logits: float32 [M, V].
        sampler: how, `[M]` rows.
        positions: int32 [M], position that the new token will have.
        forbidden_ids: int32 [M, S], tokens that a row must not draw; negative where unused.

    Returns:
        Tokens int32 [M], and bool [M] whether the row's logits are finite.
    """
    keys = row_keys(sampler, positions)
    return sample_tokens(logits, sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p, keys, forbidden_ids)
