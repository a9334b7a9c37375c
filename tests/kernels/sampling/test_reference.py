"""Truncation against sorting in float64, draws against the distributions they should come from."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.sampling import sample_tokens
from pallas_kernels.sampling.reference import sortable_bits
from pallas_kernels.sampling.reference import truncate as reference_truncate
from tests.kernels.sampling.problems import FIELDS, kept_by_sorting, problem, tokens

sample, truncate = jax.jit(sample_tokens), jax.jit(reference_truncate)  # eager loops would compile at every call


def rows(count, value, dtype=jnp.float32):
    return jnp.full(count, value, dtype)


@settings(max_examples=60, deadline=None)
@given(
    top_k=st.integers(0, 60),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_truncation_equals_sorting(top_k, top_p, min_p, seed):
    logits = np.random.default_rng(seed).normal(size=(1, 50), scale=3).astype(np.float32)
    settings_ = rows(1, top_k, jnp.int32), rows(1, top_p), rows(1, min_p)
    got = np.asarray(truncate(jnp.asarray(logits), *settings_))[0]
    expected, margin = kept_by_sorting(logits[0], top_k, np.float64(np.float32(top_p)), min_p)
    if margin > 1e-5:  # else float32's sum may fall on either side
        np.testing.assert_array_equal(got > -np.inf, expected)
    assert np.isfinite(got[logits[0].argmax()])
    np.testing.assert_array_equal(got[np.isfinite(got)], logits[0][np.isfinite(got)])


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=20, max_size=20))
@settings(deadline=None, max_examples=50)
def test_sortable_bits_order_as_floats(values):
    x = np.asarray(values, np.float32)
    keys = np.asarray(sortable_bits(jnp.asarray(x)))
    np.testing.assert_array_equal(x[:, None] < x[None], keys[:, None] < keys[None])


def test_tokens_are_those_of_numpy():
    for seed, spread in ((0, 3.0), (1, 0.1), (2, 20.0)):
        arrays = problem(seed, 24, 1000, spread)
        found = sample(*(jnp.asarray(arrays[name]) for name in FIELDS))
        expected, near = tokens(arrays)
        assert near.mean() < 0.1
        np.testing.assert_array_equal(np.asarray(found.tokens)[~near], expected[~near])
        assert np.asarray(found.finite).all()


def test_draws_follow_the_softmax_at_the_temperature():
    logits, temperature, draws = np.array([2.0, 1.0, 0.0, -1.0], np.float32), 0.7, 20_000
    keys = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (draws, 2), dtype=np.uint32))
    many = jnp.broadcast_to(jnp.asarray(logits), (draws, 4))
    off = rows(draws, 0, jnp.int32), rows(draws, 1.0), rows(draws, 0.0)
    found = np.asarray(sample(many, rows(draws, temperature), *off, keys).tokens)
    p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    counts = np.bincount(found, minlength=4)
    chi2 = ((counts - draws * p) ** 2 / (draws * p)).sum()
    assert chi2 < 21.1  # 3 degrees of freedom, p = 1e-4


def test_a_tiny_temperature_is_greedy():
    logits = jnp.asarray([[40.0, 50.0, 30.0]])
    off = rows(1, 0, jnp.int32), rows(1, 1.0), rows(1, 0.0)
    assert sample(logits, rows(1, 2e-38), *off, jnp.zeros((1, 2), jnp.uint32)).tokens == 1
