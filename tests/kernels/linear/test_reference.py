"""The reference linear against numpy in float64, and its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.affine_linear import affine_linear, affine_weights


def random_parts(rng, L, K, N, bits, group_size, has_offset, has_perm):
    g = K if group_size == -1 else group_size
    codes = rng.integers(0, 2**bits, (L, K, N), dtype=np.uint8)
    scale = rng.uniform(0.01, 0.1, (L, -(-K // g), N)).astype(np.float16)
    offset = rng.normal(0, 0.1, scale.shape).astype(np.float16) if has_offset else None
    perm = np.stack([rng.permutation(K) for _ in range(L)]).astype(np.int32) if has_perm else None
    return codes, scale, offset, perm


def numpy_linear(x, codes, scale, offset, perm, layer, bits, group_size):
    K = codes.shape[1]
    group = np.arange(K) // (K if group_size == -1 else group_size)
    scale64 = scale[layer].astype(np.float64)
    offset64 = -(2.0 ** (bits - 1)) * scale64 if offset is None else offset[layer].astype(np.float64)
    values = codes[layer] * scale64[group] + offset64[group]
    rows = np.arange(K) if perm is None else perm[layer]
    return np.asarray(x, np.float64)[:, rows] @ values


@settings(max_examples=12, deadline=None)
@given(
    K=st.integers(1, 70),
    N=st.integers(1, 20),
    group_size=st.sampled_from([1, 8, 32, -1]),
    bits=st.sampled_from([4, 8]),
    has_offset=st.booleans(),
    has_perm=st.booleans(),
    seed=st.integers(0, 99),
)
def test_reference_equals_numpy(K, N, group_size, bits, has_offset, has_perm, seed):
    rng = np.random.default_rng(seed)
    group_size = min(group_size, K)
    parts = random_parts(rng, 2, K, N, bits, group_size, has_offset, has_perm)
    x = rng.normal(size=(3, K)).astype(np.float32)
    y = affine_linear(jnp.asarray(x), affine_weights(*parts, bits=bits, group_size=group_size), jnp.int32(1))
    expected = numpy_linear(x, *parts, 1, bits, group_size)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_output_has_the_dtype_of_x_and_layers_do_not_retrace(dtype):
    rng = np.random.default_rng(0)
    parts = random_parts(rng, 3, 64, 16, 4, 32, True, False)
    w = affine_weights(*parts, bits=4, group_size=32)
    traces = []

    @jax.jit
    def f(x, w, layer):
        traces.append(1)
        return affine_linear(x, w, layer)

    x = jnp.asarray(rng.normal(size=(2, 64)), dtype)
    for layer in range(3):
        y = f(x, w, jnp.int32(layer))
        assert y.dtype == dtype
        expected = numpy_linear(x.astype(jnp.float32), *parts, layer, 4, 32)
        error = np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected)
        assert error < {"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4}[dtype]
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": np.zeros((4, 4), np.uint8)}, r"codes: shape \(4, 4\)"),
        ({"codes": np.zeros((1, 4, 4), np.int32)}, "codes: dtype int32, accepted: uint8"),
        ({"scale": np.zeros((1, 3, 4), np.float16)}, r"scale: shape \(1, 3, 4\), accepted: \(1, 2, 4\)"),
        ({"offset": np.zeros((1, 2, 4), np.int32)}, "offset: dtype int32"),
        ({"perm": np.zeros((1, 5), np.int32)}, "perm: shape"),
        ({"bits": 3}, "bits: 3, accepted: 4 or 8"),
        ({"group_size": 0}, "group_size: 0, accepted: -1 or"),
    ],
)
def test_wrong_weights_are_refused_by_name(change, message):
    good = {
        "codes": np.zeros((1, 4, 4), np.uint8),
        "scale": np.zeros((1, 2, 4), np.float16),
        "bits": 4,
        "group_size": 2,
    }
    affine_weights(**good)
    with pytest.raises(ValueError, match=message):
        affine_weights(**(good | change))


def test_wrong_x_is_refused_by_name():
    w = affine_weights(np.zeros((1, 4, 4), np.uint8), np.ones((1, 2, 4), np.float16), bits=4, group_size=2)
    with pytest.raises(ValueError, match=r"x: shape \(2, 5\), accepted: \[M, 4\]"):
        affine_linear(jnp.zeros((2, 5)), w, 0)
    with pytest.raises(ValueError, match="x: dtype int32, accepted: float32"):
        affine_linear(jnp.zeros((2, 4), jnp.int32), w, 0)
    with pytest.raises(ValueError, match="implementation='triton' cannot run: weights are not packed"):
        affine_linear(jnp.zeros((2, 4)), w, 0, implementation="triton")
