"""How steps sample: keys of seed, sample index and position; one program for every setting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turbojax.core import sampling
from turbojax.core.state import NO_TOKEN, NOT_FINITE, Sampler, init_slots
from turbojax.core.steps import sample_slots

sample = jax.jit(sampling.sample)


def sampler(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sample_index=0):
    column = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))
    return Sampler(
        temperature=column(temperature, jnp.float32),
        top_k=column(top_k, jnp.int32),
        top_p=column(top_p, jnp.float32),
        min_p=column(min_p, jnp.float32),
        seed=column(seed, jnp.uint32),
        sample_index=column(sample_index, jnp.int32),
    )


def tokens(logits, s, positions):
    return np.asarray(sample(logits, s, jnp.asarray(positions, jnp.int32)).tokens)


def test_temperature_zero_is_argmax_even_beside_hot_rows():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 100)), jnp.float32)
    found = tokens(logits, sampler(4, temperature=[0.0, 1.0, 0.0, 2.0]), np.arange(4))
    np.testing.assert_array_equal(found[::2], jnp.argmax(logits, axis=-1)[::2])


def test_a_draw_depends_on_seed_sample_index_and_position_alone():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(1, 500)), jnp.float32)
    draw = lambda rows, **kw: tokens(jnp.repeat(logits, rows, 0), sampler(rows, **kw), np.full(rows, 7))
    alone = draw(1, seed=5)[0]
    assert (draw(3, seed=5) == alone).all()
    neighbours = jnp.concatenate([jnp.asarray(rng.normal(size=(3, 500)), jnp.float32), logits])
    assert tokens(neighbours, sampler(4, seed=5), np.full(4, 7))[3] == alone
    seeds = {int(draw(1, seed=s)[0]) for s in range(20)}
    indices = {int(draw(1, seed=5, sample_index=i)[0]) for i in range(20)}
    positions = {int(tokens(logits, sampler(1, seed=5), [p])[0]) for p in range(20)}
    assert min(len(seeds), len(indices), len(positions)) > 5


def test_keys_are_those_of_threefry():
    """A default generator with keys of another size changes nothing."""
    with jax.default_prng_impl("rbg"):
        found = sampling.row_keys(sampler(2, seed=[3, 4], sample_index=[0, 1]), jnp.asarray([7, 8]))
    for row, (seed, index, position) in enumerate([(3, 0, 7), (4, 1, 8)]):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(seed), index), position)
        np.testing.assert_array_equal(found[row], key)


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_seeds_span_32_bits(seed):
    assert tokens(jnp.zeros((1, 9)), sampler(1, seed=np.uint32(seed)), [0]).shape == (1,)


def test_sampling_compiles_once_for_every_setting():
    traces = []

    @jax.jit
    def counted(logits, s, positions):
        traces.append(1)
        return sampling.sample(logits, s, positions)

    for settings_ in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5, "min_p": 0.1}):
        counted(jnp.zeros((2, 9)), sampler(2, **settings_), jnp.zeros(2, jnp.int32))
    assert len(traces) == 1


def test_slots_that_are_too_short_pass_their_stop_ids_over_and_bad_logits_stop_theirs():
    logits = jnp.zeros((4, 6)).at[:, 3].set(9.0).at[:, 4].set(8.0).at[2, 1].set(jnp.nan)
    slots = init_slots(4, 1, num_stop_ids=2)
    slots = slots.replace(
        active=slots.active.at[:4].set(True),
        stop_ids=slots.stop_ids.at[:4, 0].set(3),
        min_len=slots.min_len.at[:2].set(jnp.asarray([5, 6])),
        max_len=slots.max_len + 100,
    )
    at, yes = jnp.arange(4, dtype=jnp.int32), jnp.ones(4, bool)
    new, found = jax.jit(sample_slots)(slots, at, logits, jnp.full(4, 5), yes.at[3].set(False), yes)
    assert found.tolist() == [3, 4, NOT_FINITE, NO_TOKEN]
    assert new.active.tolist() == [False, True, False, True, False]
