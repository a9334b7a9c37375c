"""SmoothQuant: factors that make eight-bit activations better, scored as the eight-bit linear computes."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.eight_bit_linear import EightBitWeights, eight_bit_linear
from turbojax.lite.eight_bit import rounded_channels, search_smoothing
from turbojax.lite.statistics import InputStats


def problem(seed=0, N=48, K=96, R=64):
    """Tokens in which a few channels are large."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((R, K)).astype(np.float32)
    x[:, ::24] *= 60
    w = (rng.standard_normal((N, K)) / K**0.5).astype(np.float32)
    return w, x, InputStats(x.T @ x / R, np.abs(x).mean(0), np.abs(x).max(0), x)


def error_of(w, x, dtype):
    """Of the linear that the engine runs."""
    tensor = rounded_channels(w, dtype)
    weights = EightBitWeights(jnp.asarray(tensor.codes)[None], jnp.asarray(tensor.scale)[None])
    got = np.asarray(eight_bit_linear(jnp.asarray(x), weights, jnp.int32(0), out_dtype=jnp.dtype(jnp.float32)))
    return np.linalg.norm(got - x @ w.T) / np.linalg.norm(x @ w.T)


@pytest.mark.parametrize(("dtype", "gain"), [("int8", 0.6), ("float8_e4m3fn", 1.001)])
@pytest.mark.parametrize("heads", [None, (2, 2, 24)])
def test_smoothed_inputs_lose_less(dtype, gain, heads):
    w, x, stats = problem()
    scale = search_smoothing(w, stats, dtype, heads)
    if heads is not None:
        by_head = scale.reshape(heads)
        assert (by_head == by_head[:, :1]).all()
    assert error_of(w * scale, x / scale, dtype) <= gain * error_of(w, x, dtype)


def test_codes_use_the_whole_range():
    w, _, _ = problem()
    for dtype, largest in (("int8", 127), ("float8_e4m3fn", 448)):
        tensor = rounded_channels(w, dtype)
        np.testing.assert_array_equal(np.abs(tensor.codes.astype(np.float32)).max(1), largest)
        assert np.linalg.norm(tensor.dequantize() - w) < 0.03 * np.linalg.norm(w)


def test_an_output_of_zeros_is_no_division_by_zero():
    tensor = rounded_channels(np.zeros((2, 8), np.float32), "int8")
    assert (tensor.dequantize() == 0).all()
