"""Where numbers stop being finite: the layers of a model run one depth after the other over one sequence."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.core.decoder import forward, logits_of
from turbojax.core.linear import embed
from turbojax.core.state import KVPool, init_pool, init_slots
from turbojax.core.steps import PrefillBatch, chunk_rows
from turbojax.core.weights import Weights

CHUNK_LEN = 256
PAGE_LEN = 64


def first_layers(weights: Weights, num_layers: int) -> Weights:
    """The same arrays as a model of its first layers; stacks stay whole, the spec says how much of them runs."""
    spec, segments = weights.spec, []
    for segment in spec.segments:
        left = num_layers - segment.first_layer
        if left > 0:
            segments.append(replace(segment, num_layers=min(segment.num_layers, left)))
    spec = replace(spec, segments=tuple(segments))
    return replace(weights, segments=weights.segments[: len(segments)], spec=spec)


@functools.partial(jax.jit, donate_argnames="pool")
def chunk_is_finite(
    weights: Weights, pool: KVPool, tables: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array
) -> tuple[KVPool, jax.Array, jax.Array]:
    """Runs a chunk behind `start` tokens of a sequence.

    Args:
        weights, pool: a model and its pool.
        tables: int32 [pages], those of the sequence.
        tokens: int32 [T], of which the first `count` are real.
        start, count: int32.

    Returns:
        The pool, whether the residual stream behind the last layer is finite, and whether the logits are.
    """
    slots = init_slots(1, tables.shape[0])
    slots = replace(
        slots, admitted_len=slots.admitted_len + start + count, block_tables=jnp.stack([tables] * 2)[:, None]
    )
    starts = jnp.stack([jnp.zeros_like(count), count])
    batch = PrefillBatch(tokens, starts, jnp.zeros(1, jnp.int32), start[None], jnp.ones(1, bool))
    pool, hidden = forward(weights, pool, chunk_rows(slots, batch, pool.page_len))
    is_real = (jnp.arange(tokens.shape[0]) < count)[:, None]
    hidden = jnp.where(is_real, hidden, 0)
    logits = logits_of(weights, hidden[count - 1][None])
    return pool, jnp.all(jnp.isfinite(hidden)), jnp.all(jnp.isfinite(logits))


def is_finite(weights: Weights, token_ids: np.ndarray) -> tuple[bool, bool]:
    """Whether the residual stream behind the last layer, and the logits, are finite at every token of a sequence."""
    num_pages = -(-len(token_ids) // PAGE_LEN)
    num_pages = 1 << (num_pages - 1).bit_length()  # few shapes
    pool = init_pool(weights.spec, num_pages + 1, PAGE_LEN)
    tables = jnp.arange(1, num_pages + 1, dtype=jnp.int32)
    for start in range(0, len(token_ids), CHUNK_LEN):
        chunk = token_ids[start : start + CHUNK_LEN]
        tokens = np.zeros(CHUNK_LEN, np.int32)
        tokens[: len(chunk)] = chunk
        pool, hidden, logits = chunk_is_finite(
            weights, pool, tables, jnp.asarray(tokens), jnp.int32(start), jnp.int32(len(chunk))
        )
        if not hidden or not logits:
            return bool(hidden), bool(logits)
    return True, True


def first_bad_layer(weights: Weights, token_ids: np.ndarray) -> int | None:
    """The first layer whose output is not finite somewhere in a sequence, by bisection: what is not finite stays so.

    Returns:
        The layer from 0 on; -1 for the embedding, the number of layers for final norm and head, None if all is finite.
    """
    rows = embed(weights.embedding, jnp.asarray(token_ids), jnp.dtype(weights.spec.dtype))
    if not jnp.all(jnp.isfinite(rows)):
        return -1
    num_layers = weights.spec.num_layers
    hidden, logits = is_finite(weights, token_ids)
    if hidden:
        return None if logits else num_layers
    good, bad = 0, num_layers  # depths
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_finite(first_layers(weights, middle), token_ids)[0]:
            good = middle
        else:
            bad = middle
    return bad - 1


def describe_layer(weights: Weights, token_ids: np.ndarray) -> str:
    """`first_bad_layer` in words; what goes wrong on the way there is part of them."""
    if weights.spec.num_shards > 1:
        return "of a model in shards the layer is not looked for: run it on one device"
    try:
        layer, num_layers = first_bad_layer(weights, token_ids), weights.spec.num_layers
    except Exception as error:  # out of memory beside the pool, for one: the error at hand must not be lost for it
        return f"the layer cannot be found ({type(error).__name__}: {error})"
    if layer is None:
        return "run again on its own, all layers are finite"
    if layer < 0:
        return "the embedding of one of its tokens is not finite"
    if layer == num_layers:
        return f"all {num_layers} layers are finite, final norm or output head are not"
    return f"the first layer whose output is not finite is {layer} of 0 .. {num_layers - 1}"
