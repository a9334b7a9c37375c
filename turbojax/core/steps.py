"""The steps of generation as pure functions: prefill, decode (one or several tokens), and both mixed in one pass.

Each is `(weights, state, inputs) -> (state, tokens)`. Jit them with the state donated:

    decode = jax.jit(steps.decode, static_argnames="num_steps", donate_argnames="state")
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from turbojax.core.decoder import ChunkRows, DecodeRows, Rows, forward, logits_of
from turbojax.core.sampling import sample
from turbojax.core.state import NO_TOKEN, NOT_FINITE, EngineState, Slots
from turbojax.core.weights import Weights


@struct.dataclass
class DecodeBatch:
    """Which slots decode, and the pages they get first.

    Attributes:
        slots: int32 [B]; padding names the sink (the last slot).
        grants: int32 [A, 4] of (slot, page group, index in the block table, page id); padding names the sink.
    """

    slots: jax.Array
    grants: jax.Array


@struct.dataclass
class PrefillBatch:
    """Chunks of known tokens, ragged and one behind the other.

    Attributes:
        tokens: int32 [R], padded at the end.
        starts: int32 [C + 1], where each chunk starts; unused chunks are empty.
        slots: int32 [C]; unused chunks name the sink.
        history_lens: int32 [C], tokens of the sequence that the pool holds already.
        is_last: bool [C], the chunk completes its sequence, so a token is sampled behind it.
    """

    tokens: jax.Array
    starts: jax.Array
    slots: jax.Array
    history_lens: jax.Array
    is_last: jax.Array


def page_of(slots: Slots, at: jax.Array, positions: jax.Array, page_len: int, valid: jax.Array) -> jax.Array:
    """Page ids [groups, M] that hold `positions` [M] of the slots `at` [M]; the sink where not valid.

    One gather of M page ids: a row of a table a token would be 64 MB for a chunk of 8k tokens at 128k tokens a slot.
    """
    _, num_groups, num_pages = slots.block_tables.shape
    index = jnp.clip(positions // page_len, 0, num_pages - 1)
    group = jnp.arange(num_groups, dtype=jnp.int32)
    return jnp.where(valid[None], slots.block_tables[at[None], group[:, None], index[None]], 0)


def apply_grants(slots: Slots, grants: jax.Array) -> Slots:
    """Writes newly granted pages into the block tables."""
    slot, group, index, page = grants.T
    return replace(slots, block_tables=slots.block_tables.at[slot, group, index].set(page))


def decode_rows(slots: Slots, batch_slots: jax.Array, page_len: int, table_len: int | None = None) -> Rows:
    """The next token of each slot as rows of a forward pass; attention sees `table_len` entries of the block tables."""
    newest, length, active = slots.last_token[batch_slots], slots.length[batch_slots], slots.active[batch_slots]
    return single_rows(slots, batch_slots, newest, length, active, page_len, table_len)


def single_rows(
    slots: Slots, at: jax.Array, tokens: jax.Array, lengths: jax.Array, valid: jax.Array, page_len: int,
    table_len: int | None = None,
) -> Rows:  # fmt: skip
    """Tokens [M] of the slots `at` as rows that each see the first `lengths` [M] keys, their own last; see `Rows`."""
    positions = jnp.where(valid, lengths - 1, 0)
    # A slot that stopped reads the sink: its own pages may hold what is not finite, and 0 * NaN would reach the sink.
    tables = jnp.where(valid[:, None, None], slots.block_tables[at, :, :table_len], 0)
    return Rows(
        tokens=jnp.where(valid, tokens, 0),
        positions=positions,
        admitted_lens=slots.admitted_len[at],
        page_ids=page_of(slots, at, positions, page_len, valid),
        page_offsets=positions % page_len,
        decode=DecodeRows(tables, jnp.where(valid, lengths, 0)),
        chunks=None,
    )


def chunk_rows(slots: Slots, batch: PrefillBatch, page_len: int) -> Rows:
    """The tokens of the chunks as rows of a forward pass."""
    row = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    chunk = jnp.sum(row[:, None] >= batch.starts[None, 1:], axis=-1)  # C for padding
    valid = chunk < batch.slots.shape[0]
    chunk = jnp.where(valid, chunk, 0)
    positions = jnp.where(valid, batch.history_lens[chunk] + row - batch.starts[chunk], 0)
    tables = slots.block_tables[batch.slots]
    return Rows(
        tokens=jnp.where(valid, batch.tokens, 0),
        positions=positions,
        admitted_lens=slots.admitted_len[batch.slots][chunk],
        page_ids=page_of(slots, batch.slots[chunk], positions, page_len, valid),
        page_offsets=positions % page_len,
        decode=None,
        chunks=ChunkRows(tables, batch.starts, batch.history_lens),
    )


def concat_rows(decode: Rows, chunks: Rows) -> Rows:
    """Decode rows, then chunk rows: linears run over all of them together."""
    cat = lambda name, axis=0: jnp.concatenate([getattr(decode, name), getattr(chunks, name)], axis)  # noqa: E731
    return Rows(
        tokens=cat("tokens"),
        positions=cat("positions"),
        admitted_lens=cat("admitted_lens"),
        page_ids=cat("page_ids", 1),
        page_offsets=cat("page_offsets"),
        decode=decode.decode,
        chunks=chunks.chunks,
    )


def rows_of(
    slots: Slots, decode: DecodeBatch | None, prefill: PrefillBatch | None, page_len: int, table_len: int | None = None
) -> tuple[Slots, Rows]:
    """The slots with their new pages, and the rows of decode slots and chunks; either may be absent, not both."""
    parts = []
    if decode is not None:
        slots = apply_grants(slots, decode.grants)
        parts.append(decode_rows(slots, decode.slots, page_len, table_len))
    if prefill is not None:
        parts.append(chunk_rows(slots, prefill, page_len))
    return slots, parts[0] if len(parts) == 1 else concat_rows(*parts)


def sample_slots(
    slots: Slots, at: jax.Array, logits: jax.Array, lengths: jax.Array, valid: jax.Array, real: jax.Array
) -> tuple[Slots, jax.Array]:
    """Samples the next token of slots and moves them on.

    Args:
        slots: all slots.
        at: int32 [M], the slot of each logits row; the sink for padding.
        logits: float32 [M, V].
        lengths: int32 [M], tokens of the sequence before this one.
        valid: bool [M], rows whose token counts.
        real: bool [M], rows that stand for a sequence, whether their token counts or not.

    Returns:
        The slots, and the tokens int32 [M], NO_TOKEN where not valid, NOT_FINITE in real rows of such logits.
    """
    stop_ids = slots.stop_ids[at]
    forbidden_ids = jnp.where((lengths < slots.min_len[at])[:, None], stop_ids, NO_TOKEN)
    sampler = jax.tree.map(lambda leaf: leaf[at], slots.sampler)
    tokens, finite = sample(logits, sampler, lengths, forbidden_ids)
    stopped = jnp.any(tokens[:, None] == stop_ids, axis=-1) | (lengths + 1 >= slots.max_len[at])
    # Rows that do not count write to the sink.
    at = jnp.where(valid, at, slots.length.shape[0] - 1)
    slots = replace(
        slots,
        last_token=slots.last_token.at[at].set(tokens),
        length=slots.length.at[at].set(lengths + 1),
        active=slots.active.at[at].set(valid & finite & ~stopped),
    )
    return slots, jnp.where(real & ~finite, NOT_FINITE, jnp.where(valid, tokens, NO_TOKEN))


def mixed(
    weights: Weights, state: EngineState, decode: DecodeBatch | None, prefill: PrefillBatch | None
) -> tuple[EngineState, jax.Array]:
    """One pass over decode slots and prefill chunks together (dynamic split-fuse); either may be absent.

    Returns:
        The state, and int32 [B + C] tokens: those of the decode slots, then those sampled behind the chunks;
        NO_TOKEN for slots that had stopped, chunks that are not last, and padding; NOT_FINITE where the logits of a
        slot or chunk are not.
    """
    slots, rows = rows_of(state.slots, decode, prefill, state.pool.page_len)
    at, lengths, valid, real, logit_rows = [], [], [], [], []
    if decode is not None:
        at.append(decode.slots)
        lengths.append(slots.length[decode.slots])
        valid.append(slots.active[decode.slots])
        real.append(slots.active[decode.slots])
        logit_rows.append(jnp.arange(decode.slots.shape[0], dtype=jnp.int32))
    if prefill is not None:
        num_before = 0 if decode is None else decode.slots.shape[0]
        at.append(prefill.slots)
        lengths.append(prefill.history_lens + prefill.starts[1:] - prefill.starts[:-1])
        valid.append(prefill.is_last)
        real.append(prefill.starts[1:] > prefill.starts[:-1])
        logit_rows.append(num_before + jnp.maximum(prefill.starts[1:] - 1, 0))
    pool, hidden = forward(weights, state.pool, rows)
    logits = logits_of(weights, hidden[jnp.concatenate(logit_rows)])
    cat = jnp.concatenate
    slots, tokens = sample_slots(slots, cat(at), logits, cat(lengths), cat(valid), cat(real))
    return replace(state, pool=pool, slots=slots), tokens


def prefill(weights: Weights, state: EngineState, batch: PrefillBatch) -> tuple[EngineState, jax.Array]:
    """Computes K and V of the chunks; int32 [C] tokens sampled behind those that are last."""
    return mixed(weights, state, None, batch)


def decode(
    weights: Weights, state: EngineState, batch: DecodeBatch, *, num_steps: int = 1, table_len: int | None = None
) -> tuple[EngineState, jax.Array]:
    """Decodes `num_steps` tokens of each slot in one call.

    A slot that stops within the call goes on as padding: it writes to the sink and yields NO_TOKEN. `table_len` bounds
    the pages of every slot of the batch, those for the new tokens included: attention cuts its work by it.

    Returns:
        The state, and int32 [num_steps, B] tokens.
    """
    state = replace(state, slots=apply_grants(state.slots, batch.grants))
    page_len = state.pool.page_len

    def step(i: jax.Array, carry: tuple[EngineState, jax.Array]) -> tuple[EngineState, jax.Array]:
        state, tokens = carry
        slots = state.slots
        rows = decode_rows(slots, batch.slots, page_len, table_len)
        pool, hidden = forward(weights, state.pool, rows)
        active = slots.active[batch.slots]
        logits = logits_of(weights, hidden)
        slots, new = sample_slots(slots, batch.slots, logits, slots.length[batch.slots], active, active)
        return replace(state, pool=pool, slots=slots), tokens.at[i].set(new)

    tokens = jnp.full((num_steps, batch.slots.shape[0]), NO_TOKEN, jnp.int32)
    if num_steps == 1:
        return step(jnp.int32(0), (state, tokens))
    return lax.fori_loop(0, num_steps, step, (state, tokens))
