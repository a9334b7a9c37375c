"""Sampling against sorting in float64, and against the distributions it should draw from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbojax.core import sampling
from turbojax.core.sampling import mask_stop_ids, sortable_bits
from turbojax.core.state import Sampler

sample, truncate = jax.jit(sampling.sample), jax.jit(sampling.truncate)  # eager loops would compile at every call


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


def kept_by_sorting(logits, top_k, top_p, min_p):
    """The kept set of one row by sorting, ties at a threshold kept."""
    x = logits.astype(np.float64)
    keep = np.ones(len(x), bool)
    if 0 < top_k < len(x):
        keep &= x >= np.sort(x)[::-1][top_k - 1]
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        need = np.searchsorted(np.cumsum(p[order]), top_p) + 1
        keep &= p >= p[order[min(need, len(x)) - 1]]
    keep &= np.where(keep, x, -np.inf) >= x.max() + (np.log(min_p) if min_p > 0 else -np.inf)
    return keep


@settings(max_examples=60, deadline=None)
@given(
    top_k=st.integers(0, 60),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_truncation_equals_sorting(top_k, top_p, min_p, seed):
    logits = np.random.default_rng(seed).normal(size=(1, 50), scale=3).astype(np.float32)
    got = np.asarray(truncate(jnp.asarray(logits), sampler(1, top_k=top_k, top_p=top_p, min_p=min_p)))[0]
    expected = kept_by_sorting(logits[0], top_k, np.float32(top_p), min_p)
    p = np.exp(logits[0].astype(np.float64))
    # A cumulative sum within float32 rounding of top_p may fall on either side: allow the boundary token.
    differs = np.flatnonzero((got > -np.inf) != expected)
    assert len(differs) <= 1
    assert p[differs].sum() / p.sum() < 0.5
    assert np.isfinite(got[logits[0].argmax()])
    np.testing.assert_array_equal(got[np.isfinite(got)], logits[0][np.isfinite(got)])


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20))
@settings(deadline=None, max_examples=50)
def test_sortable_bits_order_as_floats(values):
    x = np.asarray(values, np.float32) + np.float32(0)  # no negative zero
    keys = np.asarray(sortable_bits(jnp.asarray(x)))
    np.testing.assert_array_equal(x[:, None] < x[None], keys[:, None] < keys[None])


def test_temperature_zero_is_argmax_even_beside_hot_rows():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 100)), jnp.float32)
    s = sampler(4, temperature=[0.0, 1.0, 0.0, 2.0])
    tokens = sample(logits, s, jnp.arange(4))
    np.testing.assert_array_equal(tokens[::2], jnp.argmax(logits, axis=-1)[::2])


def test_draws_follow_the_softmax_at_the_temperature():
    logits, temperature, draws = np.array([2.0, 1.0, 0.0, -1.0], np.float32), 0.7, 20_000
    rows = jnp.broadcast_to(jnp.asarray(logits), (draws, 4))
    tokens = np.asarray(sample(rows, sampler(draws, temperature=temperature), jnp.arange(draws)))
    p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    counts = np.bincount(tokens, minlength=4)
    chi2 = ((counts - draws * p) ** 2 / (draws * p)).sum()
    assert chi2 < 21.1  # 3 degrees of freedom, p = 1e-4


def test_a_draw_depends_on_seed_sample_index_and_position_alone():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(1, 500)), jnp.float32)
    draw = lambda rows, **kw: np.asarray(sample(jnp.repeat(logits, rows, 0), sampler(rows, **kw), jnp.full(rows, 7)))
    alone = draw(1, seed=5)[0]
    assert (draw(3, seed=5) == alone).all()
    neighbours = jnp.concatenate([jnp.asarray(rng.normal(size=(3, 500)), jnp.float32), logits])
    assert np.asarray(sample(neighbours, sampler(4, seed=5), jnp.full(4, 7)))[3] == alone
    seeds = {int(draw(1, seed=s)[0]) for s in range(20)}
    indices = {int(draw(1, seed=5, sample_index=i)[0]) for i in range(20)}
    positions = {int(sample(logits, sampler(1, seed=5), jnp.asarray([p]))[0]) for p in range(20)}
    assert min(len(seeds), len(indices), len(positions)) > 5


def test_stop_ids_cannot_be_sampled_while_too_short():
    logits = jnp.zeros((2, 6)).at[:, 3].set(9.0).at[:, 4].set(8.0)
    stop_ids = jnp.asarray([[3, 4, -1], [3, 4, -1]])
    masked = mask_stop_ids(logits, stop_ids, jnp.asarray([True, False]))
    assert int(jnp.argmax(masked[0])) not in (3, 4)
    np.testing.assert_array_equal(masked[1], logits[1])


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_seeds_span_32_bits(seed):
    assert sample(jnp.zeros((1, 9)), sampler(1, seed=np.uint32(seed)), jnp.zeros(1, jnp.int32)).shape == (1,)


def test_sampling_compiles_once_for_every_setting():
    traces = []

    @jax.jit
    def counted(logits, s, positions):
        traces.append(1)
        return sampling.sample(logits, s, positions)

    for settings_ in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5, "min_p": 0.1}):
        counted(jnp.zeros((2, 9)), sampler(2, **settings_), jnp.zeros(2, jnp.int32))
    assert len(traces) == 1
