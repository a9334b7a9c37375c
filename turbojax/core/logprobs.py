"""Log-probabilities of given tokens and of the likeliest ones, without sorting the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

CHUNK_LEN = 128  # 1,002 chunks of a vocabulary of 128k: both sorts are over one or two thousand values


@struct.dataclass
class Logprobs:
    """Natural logarithms of probabilities, a row a place of a sequence; see `TokenLogprobs`.

    Attributes:
        of_token, processed_of_token: float32 [M].
        top_ids: int32 [M, k], likeliest first by the model's own logits, the lower id first among equals.
        top, processed_top: float32 [M, k].
    """

    of_token: jax.Array
    processed_of_token: jax.Array
    top_ids: jax.Array
    top: jax.Array
    processed_top: jax.Array


def largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest values of each row of x [M, V] and where they are, as `lax.top_k` finds them.

    They lie in the k chunks of the largest maxima: a value elsewhere has k others before it. So only the maxima and
    those chunks are sorted.
    """
    num_rows, num_vocab = x.shape
    if num_vocab <= k * CHUNK_LEN:
        return lax.top_k(x, k)
    chunks = jnp.pad(x, ((0, 0), (0, -num_vocab % CHUNK_LEN)), constant_values=-jnp.inf)
    chunks = chunks.reshape(num_rows, -1, CHUNK_LEN)
    _, chosen = lax.top_k(jnp.max(chunks, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)  # in order of their tokens, so that ties go to the lower id
    candidates = jnp.take_along_axis(chunks, chosen[:, :, None], axis=1).reshape(num_rows, -1)
    values, at = lax.top_k(candidates, k)
    return values, jnp.take_along_axis(chosen, at // CHUNK_LEN, axis=1) * CHUNK_LEN + at % CHUNK_LEN


def logprobs_of(logits: jax.Array, processed: jax.Array, tokens: jax.Array, k: int) -> Logprobs:
    """Log-probabilities of tokens and of the likeliest ones.

    Args:
        logits, processed: float32 [M, V], as the model gives them and as they are sampled from.
        tokens: int32 [M].
        k: how many of the likeliest.
    """
    _, top_ids = largest(logits, k)
    ids = jnp.concatenate([tokens[:, None], top_ids], axis=1)

    def at_ids(logits: jax.Array) -> jax.Array:
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return jnp.take_along_axis(logits, ids, axis=1) - total

    raw, new = at_ids(logits), at_ids(processed)
    return Logprobs(raw[:, 0], new[:, 0], top_ids, raw[:, 1:], new[:, 1:])
