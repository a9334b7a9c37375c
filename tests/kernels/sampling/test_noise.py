"""The noise: its bits against Python's integers, its distribution, and its ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling.noise import gumbel, gumbel_of_bits, hashed
from tests.kernels.sampling import problems

KEYS = [(0, 0), (1, 0), (0, 1), (0xFFFFFFFF, 0x80000000), (123456789, 987654321)]


@pytest.mark.parametrize("key", KEYS)
def test_bits_are_those_of_the_definition(key):
    index = np.array([0, 1, 2, 1000, 128255, 2**31 - 1], np.int32)
    found = hashed(*(jnp.uint32(k) for k in key), jnp.asarray(index))
    np.testing.assert_array_equal(found, [problems.hashed(key, int(i)) for i in index])


@pytest.mark.parametrize("bits", [0, 1, 2, 2**27, 2**28 - 1, 2**28, 2**31, 2**32 - 257, 2**32 - 128, 2**32 - 1])
def test_noise_is_the_double_logarithm_and_finite_at_both_ends(bits):
    found = float(gumbel_of_bits(jnp.uint32(bits)))
    uniform = min((bits + 0.5) / 2**32, 1 - 2**-24)
    # The uniform keeps 24 bits: near 1 they are a coarse measure of what is left, in noise too low to win.
    assert found == pytest.approx(-np.log2(-np.log1p(-uniform) / np.log(2)), abs=2e-5 if uniform < 0.99 else 1e-3)


def test_an_approximate_logarithm_moves_the_noise_little():
    """As the hardware's: 2**-22 off."""
    bits = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32))
    rough = lambda x: jnp.log2(x) + jnp.where(x > 0.5, 2.0**-22, -(2.0**-22))
    assert np.abs(np.asarray(gumbel_of_bits(bits, rough)) - np.asarray(gumbel_of_bits(bits))).max() < 1e-5


def test_noise_is_gumbel_and_no_two_keys_share_it():
    index = jnp.arange(200_000, dtype=jnp.int32)
    keys = np.asarray(KEYS, np.uint32)
    draws = np.asarray(jax.vmap(lambda key: gumbel(key[0], key[1], index))(jnp.asarray(keys)), np.float64) * np.log(2)
    draws -= np.log(np.log(2))  # -log(-ln) of the uniform, from -log2(-log2)
    u = np.exp(-np.exp(-draws))
    for row in u:
        counts = np.histogram(row, 100, (0, 1))[0]
        assert ((counts - 2000) ** 2 / 2000).sum() < 171  # 99 degrees of freedom, p = 1e-5
        neighbours = np.corrcoef(row[:-1], row[1:])[0, 1]
        assert abs(neighbours) < 5 / np.sqrt(len(row))
    correlations = np.corrcoef(u) - np.eye(len(u))
    assert np.abs(correlations).max() < 5 / np.sqrt(u.shape[1])
