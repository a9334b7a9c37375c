"""Copied pages against numpy, at every KV precision: only the first tokens come along, and nothing else moves."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_cache import empty_pages
from turbojax.core.state import Copies, EngineState, KVPool, copy_pages, init_slots

PAGE_LEN, NUM_PAGES = 4, 9
copy = jax.jit(copy_pages, donate_argnames="state")


def random_state(k_bits, v_bits):
    rng = np.random.default_rng(0)

    def filled(leaf):
        if leaf.dtype == jnp.uint16:
            return jnp.asarray(rng.integers(0, 1 << 16, leaf.shape), jnp.uint16)
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    pages = [empty_pages(n, NUM_PAGES, 2, PAGE_LEN, 8, k_bits=k_bits, v_bits=v_bits, dtype=jnp.float32) for n in (1, 3)]
    return EngineState(KVPool(tuple(jax.tree.map(filled, pages))), init_slots(2, 4))


@pytest.mark.parametrize(("k_bits", "v_bits"), [(16, 16), (8, 4), (4, 8)])
def test_beginnings_of_pages_are_copied_in_order(k_bits, v_bits):
    """A chain of copies, a whole page, and padding onto the sink."""
    state = random_state(k_bits, v_bits)
    before = jax.tree.map(np.array, state)
    copies = [(3, 5, 3), (5, 7, 2), (1, 8, PAGE_LEN), (0, 0, 0)]
    after = copy(state, Copies(*(jnp.asarray(column, jnp.int32) for column in zip(*copies, strict=True))))
    for segment, old in zip(after.pool.segments, before.pool.segments, strict=True):
        for name, token_axis in (("k", 3), ("v", 3), ("k_params", 4), ("v_params", 4)):
            got, want = getattr(segment, name), getattr(old, name)
            assert (got is None) == (want is None)
            if want is None:
                continue
            got, want = (np.moveaxis(np.array(leaf), token_axis, 2) for leaf in (got, want))  # [L, P, page_len, ...]
            for source, target, num_tokens in copies:
                want[:, target, :num_tokens], want[:, target, num_tokens:] = want[:, source, :num_tokens], 0
            np.testing.assert_array_equal(got[:, 1:], want[:, 1:])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), after.slots, before.slots))


def test_what_is_not_finite_behind_the_copied_tokens_stays_behind():
    state = random_state(16, 16)
    pages = state.pool.segments[1]
    poisoned = pages.k.at[:, 3, :, 2:].set(jnp.nan)
    state = state.replace(pool=KVPool((state.pool.segments[0], replace(pages, k=poisoned))))
    after = copy(state, Copies(*(jnp.asarray([value], jnp.int32) for value in (3, 5, 2))))
    assert np.isfinite(np.asarray(after.pool.segments[1].k[:, 5])).all()


def test_the_pool_is_updated_in_place():
    state = jax.eval_shape(lambda: random_state(8, 4))
    column = jax.ShapeDtypeStruct((8,), jnp.int32)
    memory = copy.lower(state, Copies(column, column, column)).compile().memory_analysis()
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.pool))
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 4, "the pool is copied"
