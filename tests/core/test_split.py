"""A step in two programs, and one in tiles, against the same step in one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.harness import chunks, decode_batch, fresh, generate
from turbojax.core import split
from turbojax.core.logits import init_rules
from turbojax.core.state import NO_TOKEN
from turbojax.models.model import load_model

forward_rows, pick, forward_tile = (jax.jit(f) for f in (split.forward_rows, split.pick, split.forward_tile))
IDS = np.arange(5, 38)


def with_rules(state, spec, num_rows=64):
    rules = init_rules(state.slots.length.shape[0], spec.vocab_size, 4, 0)
    hidden = jnp.zeros((num_rows, spec.embed_dim), jnp.dtype(spec.dtype))
    return dataclasses.replace(state, slots=state.slots.replace(rules=rules), hidden=hidden)


def picked(*rows, size, sink):
    """A PickBatch of (row, slot, length, is last), padded."""
    columns = [list(column) for column in zip(*rows, *[(0, sink, 0, False)] * (size - len(rows)), strict=True)]
    return split.PickBatch(*(jnp.asarray(column, jnp.int32) for column in columns[:3]), jnp.asarray(columns[3]))


@pytest.fixture(scope="module")
def small(goldens):
    return load_model(goldens / "llama_plain", dtype="float32")


@pytest.fixture(scope="module")
def state(small):
    return with_rules(fresh(small.spec, num_slots=2, page_len=16, max_len=128), small.spec)


def test_split_steps_give_the_tokens_of_fused_ones(small, state):
    """A prompt in two chunks beside nobody, then decode steps; slots and their lengths move on alike."""
    fused, expected = generate(small.weights, state, IDS, 4, steps_per_call=1, size=64)
    state = forward_rows(small.weights, state, None, chunks((0, IDS[:16], 0, False), sink=2, size=64))
    state, tokens = pick(small.weights, state, picked((15, 0, 16, False), size=2, sink=2))
    assert tokens.tolist() == [NO_TOKEN, NO_TOKEN], "not the last chunk"
    assert not state.slots.active.any()
    state = forward_rows(small.weights, state, None, chunks((0, IDS[16:], 16, True), sink=2, size=64))
    state, tokens = pick(small.weights, state, picked((len(IDS) - 17, 0, len(IDS), True), size=2, sink=2))
    found = [int(tokens[0])]
    for _ in range(3):
        state = forward_rows(small.weights, state, decode_batch([0, 2], 2))
        state, tokens = pick(small.weights, state, picked((0, 0, -1, False), size=2, sink=2))
        found.append(int(tokens[0]))
    assert found == expected
    for name in ("last_token", "length", "active"):
        np.testing.assert_array_equal(getattr(state.slots, name)[:2], getattr(fused.slots, name)[:2], err_msg=name)


def test_tiles_give_the_tokens_of_other_steps(small, state):
    """Rows of the prompt in tiles of 8, then one tile for each token."""
    _, expected = generate(small.weights, state, IDS, 3, steps_per_call=2, size=64)
    no_grants = jnp.asarray([[2, 0, 0, 0]], jnp.int32)

    def run(state, tokens, first):
        padding = 8 - len(tokens)
        slots = jnp.asarray([0] * len(tokens) + [2] * padding, jnp.int32)
        ids = jnp.asarray([*tokens, *[-1] * padding], jnp.int32)
        positions = first + jnp.arange(8, dtype=jnp.int32)
        return forward_tile(small.weights, state, split.TileBatch(slots, ids, positions, no_grants, jnp.int32(first)))

    for first in range(0, len(IDS), 8):
        state = run(state, IDS[first : first + 8].tolist(), first)
    state, tokens = pick(small.weights, state, picked((len(IDS) - 1, 0, len(IDS), True), size=2, sink=2))
    found = [int(tokens[0])]
    for _ in range(2):
        state = run(state, [-1], 0)
        state, tokens = pick(small.weights, state, picked((0, 0, -1, False), size=2, sink=2))
        found.append(int(tokens[0]))
    assert found == expected
