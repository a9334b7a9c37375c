"""The eight-bit linear against float64: numerics by the interpreter, then by a GPU where there is one."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.eight_bit_linear import eight_bit_linear, eight_bit_weights
from pallas_kernels.eight_bit_linear.kernel import fused_linear
from pallas_kernels.eight_bit_linear.quantise import quantise_rows, quantise_rows_kernel
from pallas_kernels.eight_bit_linear.tuning import Config

KINDS = ["int8", "e4m3 tensor", "e4m3 blocks"]
LAYER = 1


def relative_error(y, expected):
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(y - expected) / np.linalg.norm(expected)


def random_weights(kind, K, N, seed=0):
    """A stack of two layers, and the float64 values [N, K] of the second."""
    rng = np.random.default_rng(seed)
    if kind == "int8":
        codes, covers = rng.integers(-127, 128, (2, N, K)).astype(np.int8), (2, N)
    else:
        codes = np.clip(rng.normal(size=(2, N, K)) * 100, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        covers = (2,) if kind == "e4m3 tensor" else (2, -(-N // 128), -(-K // 128))
    scale = rng.uniform(0.5, 1.5, covers).astype(np.float32) * 1e-3
    by_block = scale[LAYER].astype(np.float64).reshape(*scale.shape[1:], *(1,) * (3 - scale.ndim))
    if scale.ndim == 3:
        by_block = by_block.repeat(128, axis=0).repeat(128, axis=1)[:N, :K]
    return eight_bit_weights(codes, scale), codes[LAYER].astype(np.float64) * by_block


def quantised(x, kind):
    """x [M, K] rounded as the format rounds it, in float64; the scale is float32, so that ties fall alike."""
    x = np.asarray(x, np.float32)
    width = 128 if kind == "e4m3 blocks" else x.shape[1]
    groups = np.pad(x, ((0, 0), (0, -x.shape[1] % width))).reshape(len(x), -1, width)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127 if kind == "int8" else 448)
    codes = groups * np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = codes.round() if kind == "int8" else codes.astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scale).reshape(len(x), -1)[:, : x.shape[1]]


def quantised_by_kernel(x, kind):
    """`quantised` by the prologue kernel: its scales may be a unit in the last place off, and ties then fall apart."""
    dtype = jnp.int8 if kind == "int8" else jnp.float8_e4m3fn
    grouped = kind == "e4m3 blocks"
    codes, scale = quantise_rows_kernel(x, dtype, num_rows=len(x), grouped=grouped, interpret=False)
    scale = np.asarray(scale, np.float64)[:, : len(x)].T
    return np.asarray(codes, np.float64) * scale.repeat(128 if grouped else x.shape[1], axis=1)[:, : x.shape[1]]


def random_rows(M, K, seed=1):
    """bfloat16 [M, K], among them a row of zeros and a row of one value."""
    x = np.random.default_rng(seed).normal(size=(M, K)) * 3
    x[0], x[-1] = 0, 0.7
    return jnp.asarray(x, jnp.bfloat16)


class KernelTests:
    """Held by each implementation."""

    implementation: str
    # The result is bfloat16, and XLA's CPU rounds to e4m3 by way of float16: a few in a thousand codes are one off.
    tolerance = 6e-3
    quantised = staticmethod(quantised)

    def linear(self, x, w, out_dtype=None):
        op = functools.partial(eight_bit_linear, out_dtype=out_dtype, implementation=self.implementation)
        return jax.jit(op)(x, w, jnp.int32(LAYER))

    @pytest.mark.parametrize(
        ("M", "K", "N", "kind"),
        [
            (2, 256, 256, "int8"),
            (19, 328, 130, "e4m3 blocks"),
            (19, 328, 130, "e4m3 tensor"),
            (70, 200, 96, "int8"),
        ],
    )
    def test_against_float64(self, M, K, N, kind):
        w, values = random_weights(kind, K, N)
        x = random_rows(M, K)
        y = self.linear(x, w)
        assert y.dtype == x.dtype
        assert np.isfinite(np.asarray(y, np.float32)).all()
        assert (np.asarray(y[0], np.float32) == 0).all()
        assert relative_error(y, self.quantised(x, kind) @ values.T) < self.tolerance
        # a code's step is 1/127 of the largest value or 1/8 of its own: uniform within it, 4 % at most
        assert relative_error(y, np.asarray(x, np.float64) @ values.T) < 0.04

    def test_rows_do_not_depend_on_their_batch(self):
        w, _ = random_weights("e4m3 blocks", 256, 64)
        x = random_rows(16, 256)
        whole = np.asarray(self.linear(x, w, jnp.float32))
        for part in (x[9:], x[9:]):
            np.testing.assert_array_equal(np.asarray(self.linear(part, w, jnp.float32)), whole[9:])


class TestReference(KernelTests):
    implementation = "reference"


class TestInterpret(KernelTests):
    implementation = "interpret"

    @pytest.mark.parametrize(
        ("kind", "config"),
        [
            ("int8", Config(16, 64, 128, 3, 4, 3, False)),
            ("e4m3 tensor", Config(32, 64, 64, 1, 4, 3, True)),
            ("e4m3 blocks", Config(16, 64, 64, 3, 4, 3, False)),
        ],
    )
    def test_splits_and_forms(self, kind, config):
        w, values = random_weights(kind, 640, 100)
        codes, scale = quantise_rows(random_rows(21, 640), w.codes.dtype, grouped=w.has_blocks)
        y = fused_linear(codes, scale, w, LAYER, config, jnp.float32, interpret=True)
        x = np.asarray(codes, np.float64) * np.asarray(scale, np.float64).T.repeat(640 // len(scale), axis=1)
        assert relative_error(y, x @ values.T) < 1e-6

    def test_rows_past_m_repeat_the_last(self):
        x = random_rows(3, 200)
        codes, scale = quantise_rows_kernel(x, jnp.int8, num_rows=8, grouped=True, interpret=True)
        assert codes.shape == (8, 200)
        np.testing.assert_array_equal(codes[3:], jnp.broadcast_to(codes[2:3], (5, 200)))
        np.testing.assert_array_equal(scale[:, 3:8], jnp.broadcast_to(scale[:, 2:3], (2, 5)))

    @pytest.mark.parametrize(("kind", "dtype"), [("e4m3 tensor", "float16"), ("e4m3 blocks", "bfloat16")])
    def test_codes_widened_in_registers(self, kind, dtype):
        w, values = random_weights(kind, 384, 100)
        x = random_rows(21, 384).astype(dtype)
        y = fused_linear(x, None, w, LAYER, Config(32, 64, 128, 2, 4, 3, False), jnp.float32, interpret=True)
        assert relative_error(y, np.asarray(x, np.float64) @ values.T) < 1e-6

    def test_every_e4m3_code_widens_exactly(self):
        codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
        codes = codes[np.isfinite(codes.astype(np.float32))].reshape(1, -1, 1)  # [L, N, K]
        w = eight_bit_weights(codes, np.ones((1,), np.float32))
        x = jnp.ones((16, 1), jnp.float16)
        y = fused_linear(x, None, w, 0, Config(16, 64, 32, 1, 4, 3, False), jnp.float32, interpret=True)
        np.testing.assert_array_equal(np.asarray(y[3]), codes[0, :, 0].astype(np.float32))


def poisoned(op, x, w):
    """op(x, w) right after a buffer of NaN of the result's size was freed, which the result then takes."""
    shape = x.shape[0], w.N
    jax.block_until_ready(jnp.full(shape, jnp.nan, jnp.bfloat16)).delete()
    return np.asarray(op(x, w), np.float32)


@pytest.mark.gpu
class TestGpu(KernelTests):
    implementation = "triton"
    tolerance = 3e-3
    quantised = staticmethod(quantised_by_kernel)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("M", "K"), [(19, 328), (300, 4096)])
    def test_every_code_is_a_nearest_one(self, M, K, kind):
        x = random_rows(M, K)
        found, wanted = quantised_by_kernel(x, kind), quantised(x, kind)
        x = np.asarray(x, np.float64)
        # two units in the last place of a scale move a code's value by that much
        assert (np.abs(found - x) <= np.abs(wanted - x) + 2**-21 * np.abs(x)).all()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("M", [1, 16, 33, 64, 200, 1000])
    def test_bench_sizes_on_poisoned_memory(self, M, kind):
        backend.reset_counts()
        w, values = random_weights(kind, 4096, 1024)
        x = random_rows(M, 4096)
        op = jax.jit(lambda x, w: eight_bit_linear(x, w, jnp.int32(LAYER)))
        first, second = poisoned(op, x, w), poisoned(op, x, w)
        np.testing.assert_array_equal(first, second)
        assert backend.num_fallbacks() == 0
        if M > 1:  # a single row is all zeros
            assert relative_error(first, self.quantised(x, kind) @ values.T) < self.tolerance

    def test_scales_of_many_groups(self):
        w, values = random_weights("e4m3 blocks", 9216, 256)
        x = random_rows(200, 9216)
        y = poisoned(jax.jit(lambda x, w: eight_bit_linear(x, w, jnp.int32(LAYER))), x, w)
        assert relative_error(y, self.quantised(x, "e4m3 blocks") @ values.T) < self.tolerance

    @pytest.mark.parametrize("kind", KINDS)
    def test_rows_of_a_large_bucket(self, kind):
        w, _ = random_weights(kind, 1024, 512)
        x = random_rows(2000, 1024)
        whole = np.asarray(self.linear(x, w, jnp.float32))
        np.testing.assert_array_equal(np.asarray(self.linear(x[700:], w, jnp.float32)), whole[700:])


@pytest.mark.parametrize(
    ("codes", "scale", "message"),
    [
        (np.zeros((4, 4), np.int8), np.ones((4,), np.float32), "codes: shape"),
        (np.zeros((1, 4, 4), np.uint8), np.ones((1, 4), np.float32), "codes: dtype uint8"),
        (np.zeros((1, 4, 4), np.int8), np.ones((1, 4), np.float16), "scale: dtype float16"),
        (np.zeros((1, 4, 4), np.int8), np.ones((1, 3), np.float32), r"scale: shape \(1, 3\)"),
        (np.zeros((1, 256, 256), np.int8), np.ones((1, 2, 2), np.float32), "scale: shape"),
    ],
)
def test_weights_that_do_not_fit(codes, scale, message):
    with pytest.raises(ValueError, match=message):
        eight_bit_weights(codes, scale)


def test_rows_that_do_not_fit():
    w, _ = random_weights("int8", 128, 64)
    with pytest.raises(ValueError, match=r"x: shape \(3, 64\), accepted: \[M, 128\]"):
        eight_bit_linear(jnp.zeros((3, 64), jnp.bfloat16), w, 0)
    with pytest.raises(ValueError, match="x: dtype int8"):
        eight_bit_linear(jnp.zeros((3, 128), jnp.int8), w, 0)
    with pytest.raises(ValueError, match="x is float32"):
        eight_bit_linear(jnp.zeros((3, 128), jnp.float32), w, 0, implementation="interpret")


def test_one_block_along_k_is_a_scale_for_each_channel():
    codes = np.full((1, 200, 100), 2, ml_dtypes.float8_e4m3fn)
    w = eight_bit_weights(codes, np.asarray([[[3.0], [5.0]]], np.float32))
    np.testing.assert_array_equal(w.scale[0, :, 0], np.asarray([3.0] * 128 + [5.0] * 72))
    assert not w.has_blocks
