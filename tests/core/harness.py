"""One sequence (or a few) through the pure steps by hand: what tests of models and equalities share."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.core import scoring, steps
from turbojax.core.decoder import forward, logits_of
from turbojax.core.state import NO_TOKEN, EngineState, Joins, Sampler, init_state, join

prefill = jax.jit(steps.prefill)
mixed = jax.jit(steps.mixed)
decode = jax.jit(steps.decode, static_argnames="num_steps")
score = jax.jit(scoring.score)


@functools.partial(jax.jit, static_argnames="page_len")
def all_logits(weights, state, batch, page_len):
    pool, hidden = forward(weights, state.pool, steps.chunk_rows(state.slots, batch, page_len))
    return state.replace(pool=pool), logits_of(weights, hidden)


def fresh(spec, *, num_slots=2, page_len=16, max_len=128, sampler=None, max_lens=None, pages=None):
    """A state whose slots have joined, each with a full row of pages of its own (or those given, in any order)."""
    pages_per_slot = -(-max_len // page_len)
    state = init_state(
        spec, num_slots=num_slots, num_pages=1 + num_slots * pages_per_slot, page_len=page_len, max_len=max_len
    )
    if pages is None:
        pages = 1 + np.arange(num_slots * pages_per_slot).reshape(num_slots, 1, pages_per_slot)
    column = lambda value, dtype=jnp.int32: jnp.full(num_slots, value, dtype)
    greedy = Sampler(
        temperature=column(0, jnp.float32), top_k=column(0), top_p=column(1, jnp.float32), min_p=column(0, jnp.float32),
        seed=column(0, jnp.uint32), sample_index=column(0),
    )  # fmt: skip
    return join(
        state,
        Joins(
            slot=jnp.arange(num_slots, dtype=jnp.int32),
            max_len=column(1 << 20) if max_lens is None else jnp.asarray(max_lens, jnp.int32),
            min_len=column(0),
            stop_ids=jnp.full((num_slots, 8), NO_TOKEN, jnp.int32),
            admitted_len=column(1),
            block_tables=jnp.asarray(pages, jnp.int32),
            sampler=sampler or greedy,
        ),
    )


def chunks(*parts, sink, size=None, num_chunks=None):
    """A PrefillBatch of (slot, token ids, history, is_last) parts, padded to `size` tokens and `num_chunks` chunks."""
    lens = [len(p[1]) for p in parts]
    num_chunks = num_chunks or len(parts)
    flat = np.concatenate([np.asarray(p[1], np.int32) for p in parts])
    pad = num_chunks - len(parts)
    return steps.PrefillBatch(
        tokens=jnp.asarray(np.pad(flat, (0, (size or len(flat)) - len(flat)))),
        starts=jnp.asarray(np.pad(np.cumsum([0, *lens]), (0, pad), mode="edge"), jnp.int32),
        slots=jnp.asarray([p[0] for p in parts] + [sink] * pad, jnp.int32),
        history_lens=jnp.asarray([p[2] for p in parts] + [0] * pad, jnp.int32),
        is_last=jnp.asarray([p[3] for p in parts] + [False] * pad),
    )


def decode_batch(slots, sink):
    return steps.DecodeBatch(jnp.asarray(slots, jnp.int32), jnp.asarray([[sink, 0, 0, 0]], jnp.int32))


def clear_margin(tolerance):
    """The margin of a recorded greedy choice above which 16 bits must choose the same, from a case of the manifest."""
    return float(re.search(r"gen_margin > ([\d.]+)", tolerance["greedy"]).group(1))


def generate(weights, state: EngineState, ids, num_new, *, slot=0, steps_per_call=None, size=None):
    """Greedy ids of one prompt: one prefill, then decode calls."""
    options = {"slots": [slot], "steps_per_call": steps_per_call, "size": size}
    state, [tokens] = generate_together(weights, state, [ids], num_new, **options)
    return state, tokens


def generate_together(weights, state: EngineState, prompts, num_new, *, slots=None, steps_per_call=None, size=None):
    """Greedy ids of several prompts: a prefill each, then decode calls for all of them."""
    sink = state.slots.length.shape[0] - 1
    slots = list(range(len(prompts))) if slots is None else slots
    tokens = []
    for slot, ids in zip(slots, prompts, strict=True):
        state, first = prefill(weights, state, chunks((slot, ids, 0, True), sink=sink, size=size))
        tokens.append([int(first[0])])
    while len(tokens[0]) < num_new:
        batch = decode_batch(slots, sink)
        state, more = decode(weights, state, batch, num_steps=steps_per_call or num_new - 1)
        tokens = [old + new for old, new in zip(tokens, np.asarray(more).T.tolist(), strict=True)]
    return state, [ids[:num_new] for ids in tokens]
