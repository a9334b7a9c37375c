"""The op against float64, in plain JAX, in the interpreter and on a GPU."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.residual_norm import add_rms_norm
from tests.kernels.attention.cases import quick

EPS = 1e-5
CASES = [(3, 64, 1, 0.0, "float32"), (5, 576, 3, 1.0, "bfloat16"), (1, 4096, 5, 0.0, "bfloat16"),
         (2, 100, 2, 0.0, "float16")]  # fmt: skip
ROUNDING = {"float32": 2**-22, "bfloat16": 2**-8, "float16": 2**-11}


def check(implementation, rows, width, splits, offset, dtype):
    rng = np.random.default_rng(0)
    x, partial, weight = (rng.standard_normal(s) for s in ((rows, width), (splits, rows, width), (2, width)))
    x = jnp.asarray(x, dtype)
    partial = jnp.asarray(partial, dtype if splits == 1 else jnp.float32)
    weight = jnp.asarray(weight, jnp.float32)
    run = quick(functools.partial(add_rms_norm, eps=EPS, offset=offset, implementation=implementation))
    out, normed = run(x, partial, weight, jnp.int32(1))
    assert out.dtype == normed.dtype == x.dtype
    expected = np.asarray(x, np.float64) + np.asarray(partial, np.float64).sum(0)
    tolerance = {"rtol": 2 * ROUNDING[dtype], "atol": 2 * ROUNDING[dtype]}
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, **tolerance)
    stream = np.asarray(out, np.float64)
    expected = stream / np.sqrt((stream**2).mean(-1, keepdims=True) + EPS) * (offset + np.asarray(weight[1]))
    np.testing.assert_allclose(np.asarray(normed, np.float64), expected, **tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", ["reference", "interpret"])
def test_against_float64(case, implementation):
    check(implementation, *case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (300, 8192, 2, 0.0, "bfloat16")], ids=str)
def test_on_a_gpu(case):
    check("triton", *case)


def test_rows_of_zeros_stay_finite():
    zeros = jnp.zeros((2, 64))
    for implementation in ("reference", "interpret"):
        run = quick(functools.partial(add_rms_norm, eps=EPS, implementation=implementation))
        for y in run(zeros, zeros[None], jnp.ones((1, 64)), jnp.int32(0)):
            np.testing.assert_array_equal(y, 0)


def test_bad_arguments_are_named():
    x, weight = jnp.zeros((2, 64)), jnp.ones((1, 64))
    with pytest.raises(ValueError, match=r"^partial: shape \(2, 64\)"):
        add_rms_norm(x, x, weight, jnp.int32(0), eps=EPS)
    with pytest.raises(ValueError, match=r"^weight: shape \(64,\)"):
        add_rms_norm(x, x[None], weight[0], jnp.int32(0), eps=EPS)
