"""The device state of generation as one immutable value: the KV pool and the slots."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from pallas_kernels.kv_cache import KVPages, empty_pages
from turbojax.core.logits import LogitRules, RuleJoins, init_rules, joined, neutral_at
from turbojax.models.spec import ModelSpec, SegmentSpec

NO_TOKEN = -1
NOT_FINITE = -2  # in place of a token: the row's logits are not finite, and its slot has stopped


@struct.dataclass
class KVPool:
    """Keys and values of every sequence, in pages; cut into segments as the model's layers are.

    Page 0 of every segment is a sink: padded rows and finished slots write there, nothing reads it.
    """

    segments: tuple[KVPages, ...]

    @property
    def page_len(self) -> int:
        return self.segments[0].k.shape[3]

    @property
    def num_pages(self) -> int:
        return self.segments[0].k.shape[1]


@struct.dataclass
class Sampler:
    """How each row picks its tokens, `[B]` each.

    Attributes:
        temperature: float32; 0 is greedy.
        top_k: int32; 0 is off.
        top_p, min_p: float32; 1 and 0 are off.
        seed, sample_index: uint32 and int32; with the position they are the whole source of randomness.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    sample_index: jax.Array


@struct.dataclass
class Slots:
    """What the device knows of the running sequences, a row a slot. The last row is the sink of padded rows.

    Attributes:
        last_token: int32 [B], the newest token; its K and V are not in the pool yet.
        length: int32 [B], tokens of the sequence, the newest included.
        active: bool [B], the slot decodes; cleared on the device by a stop token or at `max_len`.
        max_len: int32 [B], length at which the slot stops.
        min_len: int32 [B], while the sequence is shorter, stop tokens cannot be sampled.
        stop_ids: int32 [B, S], padded with NO_TOKEN.
        admitted_len: int32 [B], prompt length at first admission (length-dependent RoPE reads it).
        block_tables: int32 [B, groups, pages], page ids of the sequence for each page group.
        sampler: how to pick tokens.
        rules: what changes their logits before; None in states of fused steps alone, which have no rules.
    """

    last_token: jax.Array
    length: jax.Array
    active: jax.Array
    max_len: jax.Array
    min_len: jax.Array
    stop_ids: jax.Array
    admitted_len: jax.Array
    block_tables: jax.Array
    sampler: Sampler
    rules: LogitRules | None = None


@struct.dataclass
class EngineState:
    """Everything the device remembers between steps. Donated to each step, so updated in place.

    Attributes:
        pool: keys and values.
        slots: the running sequences.
        hidden: [R, D] in the model's dtype, hidden states of the rows of the last split step (before the final norm);
            None in states of fused steps alone.
    """

    pool: KVPool
    slots: Slots
    hidden: jax.Array | None = None


def init_pool(spec: ModelSpec, num_pages: int, page_len: int) -> KVPool:
    """An empty pool of `num_pages` pages of `page_len` tokens (page 0, the sink, counted in)."""

    def pages(segment: SegmentSpec) -> KVPages:
        layer = segment.layer
        return empty_pages(
            segment.num_layers, num_pages, layer.num_kv_heads, page_len, layer.head_dim,
            k_bits=layer.k_bits, v_bits=layer.v_bits, dtype=jnp.dtype(spec.dtype),
        )  # fmt: skip

    return KVPool(tuple(pages(segment) for segment in spec.segments))


def init_sampler(num_rows: int) -> Sampler:
    """Greedy rows."""
    zeros = lambda dtype: jnp.zeros(num_rows, dtype)  # noqa: E731
    return Sampler(
        temperature=zeros(jnp.float32),
        top_k=zeros(jnp.int32),
        top_p=jnp.ones(num_rows, jnp.float32),
        min_p=zeros(jnp.float32),
        seed=zeros(jnp.uint32),
        sample_index=zeros(jnp.int32),
    )


def init_slots(num_slots: int, pages_per_slot: int, *, num_stop_ids: int = 8, num_groups: int = 1) -> Slots:
    """`num_slots` idle slots, and the sink behind them."""
    num_rows = num_slots + 1
    zeros = lambda: jnp.zeros(num_rows, jnp.int32)  # noqa: E731
    return Slots(
        last_token=zeros(),
        length=zeros(),
        active=jnp.zeros(num_rows, bool),
        max_len=zeros(),
        min_len=zeros(),
        stop_ids=jnp.full((num_rows, num_stop_ids), NO_TOKEN, jnp.int32),
        admitted_len=zeros(),
        block_tables=jnp.zeros((num_rows, num_groups, pages_per_slot), jnp.int32),
        sampler=init_sampler(num_rows),
    )


def init_state(
    spec: ModelSpec,
    *,
    num_slots: int,
    num_pages: int,
    page_len: int = 64,
    max_len: int | None = None,
    num_stop_ids: int = 8,
    num_hidden_rows: int = 0,
    num_biased_tokens: int = 0,
    num_processor_params: int = 0,
) -> EngineState:
    """A fresh state.

    Args:
        spec: the model.
        num_slots: sequences that can run at once.
        num_pages: pages of the pool, the sink included.
        page_len: tokens of a page.
        max_len: longest sequence (default: the model's).
        num_stop_ids: stop tokens that a slot can hold.
        num_hidden_rows: most rows of a split step; 0 is a state for fused steps alone, without rules.
        num_biased_tokens: tokens that a slot can bias or ban.
        num_processor_params: numbers that a logits processor can take.
    """
    pages_per_slot = -(-(max_len or spec.max_len) // page_len)
    slots = init_slots(num_slots, pages_per_slot, num_stop_ids=num_stop_ids)
    pool = init_pool(spec, num_pages, page_len)
    if num_hidden_rows == 0:
        return EngineState(pool, slots)
    rules = init_rules(num_slots + 1, spec.vocab_size, num_biased_tokens, num_processor_params)
    hidden = jnp.zeros((num_hidden_rows, spec.embed_dim), jnp.dtype(spec.dtype))
    return EngineState(pool, replace(slots, rules=rules), hidden)


@struct.dataclass
class Joins:
    """New content of some slots' rows, `[A]` each (see `Slots`); unused rows name the sink."""

    slot: jax.Array
    max_len: jax.Array
    min_len: jax.Array
    stop_ids: jax.Array
    admitted_len: jax.Array
    block_tables: jax.Array
    sampler: Sampler


def join(state: EngineState, joins: Joins) -> EngineState:
    """Gives slots to sequences: writes their rows; they become active when their last chunk is prefilled."""
    slots, at = state.slots, joins.slot
    put = lambda old, new: old.at[at].set(new)  # noqa: E731
    return replace(
        state,
        slots=replace(
            slots,
            last_token=slots.last_token.at[at].set(0),
            length=slots.length.at[at].set(0),
            active=slots.active.at[at].set(False),
            max_len=put(slots.max_len, joins.max_len),
            min_len=put(slots.min_len, joins.min_len),
            stop_ids=put(slots.stop_ids, joins.stop_ids),
            admitted_len=put(slots.admitted_len, joins.admitted_len),
            block_tables=put(slots.block_tables, joins.block_tables),
            sampler=jax.tree.map(put, slots.sampler, joins.sampler),
            rules=None if slots.rules is None else neutral_at(slots.rules, at),
        ),
    )


def join_rules(state: EngineState, joins: RuleJoins) -> EngineState:
    """Gives slots that have joined their rules."""
    assert state.slots.rules is not None
    return replace(state, slots=replace(state.slots, rules=joined(state.slots.rules, joins)))


@struct.dataclass
class Copies:
    """The first `num_tokens` of page `source` become those of page `target`, int32 [A] each; padding names the sink.

    Copies of no tokens zero their targets.
    """

    source: jax.Array
    target: jax.Array
    num_tokens: jax.Array


def copy_pages(state: EngineState, copies: Copies) -> EngineState:
    """Copies the beginnings of pages in all layers, in place and one after the other; the rest of a target is zeros.

    Whoever holds the source may still write behind what is copied, and what is not finite there must not come along.
    """

    def copied(leaf: jax.Array, token_axis: int) -> jax.Array:
        def body(i: jax.Array, pages: jax.Array) -> jax.Array:
            page = lax.dynamic_slice_in_dim(pages, copies.source[i], 1, 1)
            is_copied = lax.broadcasted_iota(jnp.int32, page.shape, token_axis) < copies.num_tokens[i]
            page = jnp.where(is_copied, page, jnp.zeros_like(page))
            return lax.dynamic_update_slice_in_dim(pages, page, copies.target[i], 1)

        return lax.fori_loop(0, copies.source.shape[0], body, leaf)

    def of_params(leaf: jax.Array | None) -> jax.Array | None:
        return None if leaf is None else copied(leaf, 4)

    segments = tuple(
        replace(
            pages,
            k=copied(pages.k, 3),
            v=copied(pages.v, 3),
            k_params=of_params(pages.k_params),
            v_params=of_params(pages.v_params),
        )
        for pages in state.pool.segments
    )
    return replace(state, pool=KVPool(segments))
