"""Where top-k cuts a row: a bound that the k largest logits and their ties lie above, found by counting.

Each pass over the row counts how many logits lie above eight candidates at once, which cuts the bracket ninefold in
value; three passes do for k from 1 to 200 in bell-shaped, peaked and heavy-tailed logits. The token drawn from the
whole row is a candidate of the first pass: where top-k keeps it, as of real text it mostly does, that pass is enough.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sampling.tiles import LOWEST, Row, whole

# The first pass counts that far below the largest logit, in units of its distance to the lowest of the chunks' largest.
FIRST_CANDIDATES = (5.0, 2.0, 1.5, 1.25, 1.0, 0.8, 0.5)
NUM_CANDIDATES = len(FIRST_CANDIDATES) + 1  # and the token drawn
MAX_PASSES = 100  # float32 has no more than 88 cuts of 9: never reached


class Bracket(NamedTuple):
    """Where the k-th largest value is known to be: low < k-th <= high.

    Attributes:
        low, high: float32.
        candidates: float32, where the next pass counts.
        is_done: bool, nothing but the k largest and their ties lies above `low`.
        num_passes: int32.
    """

    low: jax.Array
    high: jax.Array
    candidates: tuple[jax.Array, ...]
    is_done: jax.Array
    num_passes: jax.Array


class Counts(NamedTuple):
    """What a pass finds: the extremes of the values in (low, high], and how many lie above each candidate."""

    smallest: jax.Array
    largest: jax.Array
    above: tuple[jax.Array, ...]


def count(row: Row, bracket: Bracket) -> Counts:
    """One pass over the chunks that have values above the bracket's low end; lanes apart until its end."""

    def add(chunk: jax.Array, found: Counts) -> Counts:
        x, _ = row.read(chunk)
        smallest = jnp.min(jnp.where(x > bracket.low, x, jnp.inf), axis=0)
        largest = jnp.max(jnp.where(x <= bracket.high, x, -jnp.inf), axis=0)
        above = (jnp.sum((x > c).astype(jnp.int32), axis=0) for c in bracket.candidates)
        return Counts(
            jnp.minimum(found.smallest, smallest),
            jnp.maximum(found.largest, largest),
            tuple(a + b for a, b in zip(found.above, above, strict=True)),
        )

    lanes = row.tile[1]
    zeros = (jnp.zeros(lanes, jnp.int32),) * NUM_CANDIDATES
    nothing = Counts(jnp.full(lanes, jnp.inf), jnp.full(lanes, -jnp.inf), zeros)
    found = row.fold(lambda chunk, _: row.of("top", chunk) > bracket.low, add, nothing)
    above = tuple(whole(jnp.sum, lane) for lane in found.above)
    return Counts(whole(jnp.min, found.smallest), whole(jnp.max, found.largest), above)


def narrow(bracket: Bracket, counts: Counts, k: jax.Array) -> Bracket:
    """The bracket between the two candidates that the k-th lies between."""
    low, high, is_exact = bracket.low, bracket.high, jnp.bool_(False)
    for candidate, above in zip(bracket.candidates, counts.above, strict=True):
        low = jnp.where(above >= k, jnp.maximum(low, candidate), low)
        high = jnp.where(above >= k, high, jnp.minimum(high, candidate))
        is_exact |= above == k
    is_one_value = counts.smallest >= counts.largest  # the k-th itself, and the old low end below it
    low, high = jnp.where(is_one_value, bracket.low, low), jnp.minimum(high, counts.largest)
    least = jnp.maximum(low, counts.smallest)
    return Bracket(low, high, spaced(least, high), is_exact | is_one_value, bracket.num_passes + 1)


def spaced(low: jax.Array, high: jax.Array) -> tuple[jax.Array, ...]:
    """Even candidates strictly between; products apart, since the difference of the two might be infinite."""
    steps = NUM_CANDIDATES + 1
    return tuple(low * (1 - i / steps) + high * (i / steps) for i in range(1, steps))


def bound_of_top_k(
    row: Row, k: jax.Array, row_top: jax.Array, lowest_top: jax.Array, drawn: jax.Array, needs_all: jax.Array
) -> jax.Array:
    """A float32 bound above which only the k largest logits and their ties lie; -inf ones count as absent.

    Args:
        row: the logits.
        k: int32, at least 1.
        row_top: float32, the largest scaled logit.
        lowest_top: float32, the lowest of the chunks' largest.
        drawn: float32, the scaled logit of the draw from the whole row.
        needs_all: bool; False lets the bound be lower where the k largest have `drawn` among them.
    """
    spread = row_top - lowest_top
    first = (*(row_top - f * spread for f in FIRST_CANDIDATES), drawn)
    # A row with +inf in it has no bracket that halves: cut there, the search ends. NaN ends it at once.
    start = Bracket(jnp.float32(LOWEST), jnp.minimum(row_top, -LOWEST), first, jnp.bool_(False), jnp.int32(0))

    def searches(bracket: Bracket) -> jax.Array:
        is_done = bracket.is_done | (~needs_all & (drawn >= bracket.high))
        return ~is_done & (bracket.num_passes < MAX_PASSES)

    return lax.while_loop(searches, lambda bracket: narrow(bracket, count(row, bracket), k), start).low
