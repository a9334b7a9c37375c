"""Steps in two programs: `forward_rows` leaves hidden states in the engine's state, `pick` makes tokens of them.

Between the two the host can bring masks. Shapes of one do not multiply with shapes of the other: `pick` reads any rows
of the last forward pass, so the rows of prompts too, block by block, where their log-probabilities are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from turbojax.core.decoder import final_norm, forward, head_of, logits_of
from turbojax.core.logits import UNUSED, counted, process
from turbojax.core.logprobs import Logprobs, logprobs_of
from turbojax.core.state import EngineState
from turbojax.core.steps import DecodeBatch, PrefillBatch, apply_grants, rows_of, sample_slots, single_rows
from turbojax.core.weights import Weights
from turbojax.processors import LogitsProcessor


@struct.dataclass
class TileBatch:
    """A tile of a step's rows, [T] each: newest tokens of decoding slots and known tokens of chunks alike.

    Attributes:
        slots: int32; padding names the sink.
        tokens: int32, known tokens; negative is the slot's newest one.
        positions: int32, of known tokens.
        grants: as in `DecodeBatch`.
        first: int32 scalar, number of the first row within the step.
    """

    slots: jax.Array
    tokens: jax.Array
    positions: jax.Array
    grants: jax.Array
    first: jax.Array


@struct.dataclass
class PickBatch:
    """Rows of the last forward pass, [M] each, and whose they are.

    Attributes:
        rows: int32, row of `EngineState.hidden`.
        slots: int32, different slots; padding, and rows of which only log-probabilities are wanted, name the sink.
        lengths: int32, tokens of the sequence before the one to sample, where the row ends a chunk; negative for
            decoding slots, which know theirs.
        is_last: bool, the chunk is its sequence's last, so its token counts.
    """

    rows: jax.Array
    slots: jax.Array
    lengths: jax.Array
    is_last: jax.Array


@struct.dataclass
class PickOutputs:
    """What was computed on the way to a row's token.

    Attributes:
        logprobs: of the row's token.
        logits: float32 [M, V], as the model gives them.
        hidden: [M, D] in the model's dtype, behind the final norm.
    """

    logprobs: Logprobs
    logits: jax.Array
    hidden: jax.Array


def forward_rows(
    weights: Weights,
    state: EngineState,
    decode: DecodeBatch | None,
    prefill: PrefillBatch | None = None,
) -> EngineState:
    """One pass over decode slots and chunks; the hidden states of its rows, decode slots first, stay in the state."""
    assert state.hidden is not None
    slots, rows = rows_of(state.slots, decode, prefill, state.pool.page_len)
    pool, hidden = forward(weights, state.pool, rows)
    return EngineState(pool, slots, lax.dynamic_update_slice(state.hidden, hidden, (0, 0)))


def forward_tile(weights: Weights, state: EngineState, tile: TileBatch) -> EngineState:
    """A pass over a tile of rows, each for itself: rows of a chunk as if they were decoded, in order.

    A step is as many calls as it takes. All rows ever run through this one program, so what a token's row gives does
    not depend on what else runs (`EngineConfig.batch_invariant`).
    """
    assert state.hidden is not None
    slots, at = apply_grants(state.slots, tile.grants), tile.slots
    is_newest = tile.tokens < 0
    valid = jnp.where(is_newest, slots.active[at], at < slots.length.shape[0] - 1)
    tokens = jnp.where(is_newest, slots.last_token[at], tile.tokens)
    lengths = jnp.where(is_newest, slots.length[at], tile.positions + 1)
    pool, hidden = forward(weights, state.pool, single_rows(slots, at, tokens, lengths, valid, state.pool.page_len))
    zero = jnp.zeros_like(tile.first)
    return EngineState(pool, slots, lax.dynamic_update_slice(state.hidden, hidden, (tile.first, zero)))


def sampled(state: EngineState, batch: PickBatch, logits: jax.Array) -> tuple[EngineState, jax.Array, jax.Array]:
    """Samples a token a row [M, V] and moves the slots on; also gives which rows' tokens count, bool [M]."""
    slots, is_decoding = state.slots, batch.lengths < 0
    active = slots.active[batch.slots]
    lengths = jnp.where(is_decoding, slots.length[batch.slots], batch.lengths)
    valid = jnp.where(is_decoding, active, batch.is_last)
    real = jnp.where(is_decoding, active, batch.slots < slots.length.shape[0] - 1)
    slots, tokens = sample_slots(slots, batch.slots, logits, lengths, valid, real)
    return replace(state, slots=slots), tokens, valid


def pick(weights: Weights, state: EngineState, batch: PickBatch) -> tuple[EngineState, jax.Array]:
    """Samples from logits as they are.

    Returns:
        The state, and tokens int32 [M] as `steps.mixed` gives them.
    """
    assert state.hidden is not None
    state, tokens, _ = sampled(state, batch, logits_of(weights, state.hidden[batch.rows]))
    return state, tokens


def pick_processed(
    weights: Weights, state: EngineState, batch: PickBatch, masks: jax.Array, targets: jax.Array, *,
    num_logprobs: int, processors: Sequence[LogitsProcessor] = (),
) -> tuple[EngineState, jax.Array, PickOutputs]:  # fmt: skip
    """Samples under the rules of the slots, and counts the tokens.

    Args:
        weights, state, batch: as in `pick`.
        masks: uint32 [M, ceil(V / 32)], see `process`.
        targets: int32 [M], tokens whose log-probabilities are wanted in place of the sampled ones'; negative for those.
        num_logprobs: how many of the likeliest tokens are looked for.
        processors: all that rules may name.
    """
    slots = state.slots
    assert state.hidden is not None
    assert slots.rules is not None
    hidden = final_norm(weights, state.hidden[batch.rows])
    logits = head_of(weights, hidden)
    lengths = jnp.where(batch.lengths < 0, slots.length[batch.slots], batch.lengths)
    stop_ids = jnp.where((lengths < slots.min_len[batch.slots])[:, None], slots.stop_ids[batch.slots], UNUSED)
    rules = jax.tree.map(lambda leaf: leaf[batch.slots], slots.rules)
    processed = process(logits, rules, stop_ids, masks, processors)
    state, tokens, valid = sampled(state, batch, processed)
    places = jnp.where(targets >= 0, targets, jnp.maximum(tokens, 0))
    logprobs = logprobs_of(logits, processed, places, num_logprobs)
    num_rows = slots.length.shape[0]
    at = jnp.where(valid & (tokens >= 0), batch.slots, num_rows)  # rows that do not count name no slot
    slots = replace(state.slots, rules=counted(slots.rules, at, tokens))
    return replace(state, slots=slots), tokens, PickOutputs(logprobs, logits, hidden)
