"""On an NVIDIA GPU: the kernels against numpy and the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling import sample_tokens
from tests.kernels.sampling.problems import FIELDS, problem, tokens

pytestmark = pytest.mark.gpu
sample = jax.jit(sample_tokens, static_argnames="implementation")


def run(arrays, implementation):
    found = sample(*(jnp.asarray(arrays[name]) for name in FIELDS), implementation=implementation)
    return np.asarray(found.tokens), np.asarray(found.finite)


@pytest.mark.parametrize(("seed", "spread"), [(0, 3.0), (1, 0.1), (2, 20.0)])
def test_tokens_are_those_of_numpy(seed, spread):
    arrays = problem(seed, 64, 1000, spread)
    found, finite = run(arrays, "triton")
    expected, near = tokens(arrays)
    np.testing.assert_array_equal(found[~near], expected[~near])
    assert finite.all()


@pytest.mark.parametrize("vocab", [128256, 151936, 49153])
@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_large_vocabularies(vocab, spread):
    """Rounding of sums and logarithms decides one row in thousands."""
    arrays = problem(3, 256, vocab, spread)
    found, finite = run(arrays, "triton")
    expected, _ = run(arrays, "reference")
    assert (found != expected).sum() <= 2
    assert finite.all()
    np.testing.assert_array_equal(run(arrays, "triton")[0], found)
    half = {name: array[::2] for name, array in arrays.items()}
    np.testing.assert_array_equal(run(half, "triton")[0], found[::2])


def test_rows_that_are_not_finite_end():
    arrays = problem(4, 64, 128256)
    arrays["logits"][::2, 77777], arrays["forbidden_ids"][:] = np.nan, -1
    arrays["logits"][1::4, 5] = np.inf
    found, finite = run(arrays, "triton")
    np.testing.assert_array_equal(finite, np.arange(64) % 4 == 3)
    assert ((found >= 0) & (found < 128256)).all()
