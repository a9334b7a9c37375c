"""Log-probabilities of given tokens: what perplexity and prompt logprobs are made of."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from turbojax.core.decoder import forward, logits_of
from turbojax.core.state import EngineState
from turbojax.core.steps import PrefillBatch, chunk_rows
from turbojax.core.weights import Weights

# Logits exist for this many rows at a time: 128 rows of a 128k vocabulary are 64 MiB.
ROWS_PER_BLOCK = 128


def score(
    weights: Weights, state: EngineState, batch: PrefillBatch, targets: jax.Array
) -> tuple[EngineState, jax.Array]:
    """Prefills chunks and returns the log-probability of a target behind each of their rows.

    Args:
        weights: the model.
        state: donated where the caller jits it so.
        batch: the chunks; nothing is sampled.
        targets: int32 [R], for row r the token whose log-probability given the tokens up to r is wanted.

    Returns:
        The state, and float32 [R], natural logs.
    """
    rows = chunk_rows(state.slots, batch, state.pool.page_len)
    pool, hidden = forward(weights, state.pool, rows)
    num_rows, embed_dim = hidden.shape
    block = min(ROWS_PER_BLOCK, num_rows)
    padding = -num_rows % block
    blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, embed_dim)
    wanted = jnp.pad(targets, (0, padding)).reshape(-1, block)

    def block_logprobs(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, targets = args
        logprobs = jax.nn.log_softmax(logits_of(weights, hidden), axis=-1)
        return jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]

    logprobs = lax.map(block_logprobs, (blocks, wanted)).reshape(-1)[:num_rows]
    return replace(state, pool=pool), logprobs
