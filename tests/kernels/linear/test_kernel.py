"""The affine linear's kernels against the reference: numerics by the interpreter, then by a GPU where there is one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.affine_linear import affine_linear, affine_weights, pack, tuning
from pallas_kernels.affine_linear.api import linear_by
from pallas_kernels.affine_linear.reference import reference_linear
from pallas_kernels.affine_linear.tuning import Config
from tests.kernels.linear.test_packing import random_weights


def relative_error(y, expected):
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(y - expected) / np.linalg.norm(expected)


def case(seed, M, K, N, bits, group_size, kind, dtype, has_perm=False):
    """x, plain weights, packed weights and the float32 result."""
    w = random_weights(seed, 2, K, N, bits, group_size, kind, has_perm)
    x = jnp.asarray(np.random.default_rng(seed + 1).normal(size=(M, K)), dtype)
    return x, pack(w), reference_linear(x, w, jnp.int32(1), jnp.float32)


TOLERANCE = {"bfloat16": 3e-3, "float16": 5e-4}  # rounding of the result to its dtype; the sums are float32


class KernelTests:
    """Held by each implementation."""

    implementation: str

    @pytest.mark.parametrize(
        ("bits", "group_size", "kind", "dtype"),
        [
            (4, 32, "offset", "bfloat16"),
            (4, 64, "zero", "float16"),
            (4, 128, "symmetric", "bfloat16"),
            (4, 128, "zero", "bfloat16"),
            (4, -1, "offset", "float16"),
            (8, 32, "symmetric", "bfloat16"),
            (8, 128, "zero", "bfloat16"),
            (8, 64, "zero", "float16"),
            (8, -1, "offset", "bfloat16"),
        ],
    )
    def test_formats(self, bits, group_size, kind, dtype):
        x, w, expected = case(0, 5, 256, 72, bits, group_size, kind, dtype)
        y = affine_linear(x, w, jnp.int32(1), implementation=self.implementation)
        assert y.dtype == dtype
        assert relative_error(y, expected) < TOLERANCE[dtype]

    @pytest.mark.parametrize(("M", "K", "N"), [(1, 300, 130), (8, 576, 96), (17, 130, 1), (70, 192, 70)])
    def test_odd_sizes(self, M, K, N):
        x, w, expected = case(M, M, K, N, 4, 32, "zero", "bfloat16", has_perm=True)
        y = affine_linear(x, w, jnp.int32(1), implementation=self.implementation)
        assert relative_error(y, expected) < TOLERANCE["bfloat16"]

    @pytest.mark.parametrize("splits", [1, 3])
    def test_splits(self, splits):
        x, w, expected = case(3, 19, 1024, 128, 4, 128, "symmetric", "bfloat16")
        config = Config(16, 64, splits, 4, 3)
        interpret = self.implementation == "interpret"
        y = linear_by(config, x, w, jnp.int32(1), jnp.bfloat16, interpret=interpret)
        assert relative_error(y, expected) < TOLERANCE["bfloat16"]

    @pytest.mark.parametrize(
        ("kind", "parts", "scale_weights"),
        [("zero", 1, True), ("offset", 1, True), ("offset", 2, False), ("symmetric", 2, True)],
    )
    def test_variants(self, kind, parts, scale_weights):
        x, w, expected = case(10, 20, 512, 64, 4, 128, kind, "bfloat16")
        config = Config(32, 64, 2, 4, 2, parts, scale_weights)
        y = linear_by(config, x, w, jnp.int32(1), jnp.bfloat16, interpret=self.implementation == "interpret")
        assert relative_error(y, expected) < TOLERANCE["bfloat16"]

    @pytest.mark.parametrize("bits", [4, 8])
    def test_scaled_weights_are_rounded_once(self, bits):
        """x is the identity, so the results are the weights: half a unit in the last place off at most."""
        K, N = 64 * 16 // bits, 64
        w = random_weights(13, 1, K, N, bits, 64, "zero")
        config = Config(64, 64, 1, 4, 2, scale_weights=True)
        interpret = self.implementation == "interpret"
        y = linear_by(config, jnp.eye(K, dtype=jnp.bfloat16), pack(w), jnp.int32(0), jnp.float32, interpret=interpret)
        expected = reference_linear(jnp.eye(K, dtype=jnp.float32), w, jnp.int32(0), jnp.float32)
        np.testing.assert_allclose(np.asarray(y), np.asarray(expected), rtol=1.05 * 2**-8)

    def test_scaled_float16(self):
        x, w, expected = case(11, 16, 512, 64, 8, 64, "zero", "float16")
        config = Config(16, 64, 1, 4, 2, scale_weights=True)
        y = linear_by(config, x, w, jnp.int32(1), jnp.float16, interpret=self.implementation == "interpret")
        assert relative_error(y, expected) < TOLERANCE["float16"]

    @pytest.mark.parametrize(("K", "N", "bits", "group_size"), [(192, 72, 8, 64), (576, 128, 4, 32), (192, 64, 8, 32)])
    def test_dequantise_then_dot(self, K, N, bits, group_size):
        """K may end within a tile: what is past it must not land in the next row."""
        x, w, expected = case(4, 600, K, N, bits, group_size, "offset", "bfloat16")
        y = affine_linear(x, w, jnp.int32(1), implementation=self.implementation)
        assert relative_error(y, expected) < 2 * TOLERANCE["bfloat16"]  # the values are rounded to bfloat16 too

    @pytest.mark.parametrize("M", [1, 7])
    def test_rows_do_not_depend_on_their_batch(self, M):
        x, w, _ = case(5, 8, 512, 64, 4, 128, "zero", "bfloat16")
        whole = affine_linear(x, w, jnp.int32(1), implementation=self.implementation)
        part = affine_linear(x[8 - M :], w, jnp.int32(1), implementation=self.implementation)
        again = affine_linear(x[8 - M :], w, jnp.int32(1), implementation=self.implementation)
        np.testing.assert_array_equal(np.asarray(part), np.asarray(whole)[8 - M :])
        np.testing.assert_array_equal(np.asarray(part), np.asarray(again))


class TestInterpret(KernelTests):
    implementation = "interpret"


@pytest.mark.parametrize(("bits", "group_size", "kind"), [(4, 32, "offset"), (4, 128, "zero"), (8, -1, "symmetric")])
def test_reference_of_packed_weights(bits, group_size, kind):
    x, w, expected = case(9, 5, 300, 72, bits, group_size, kind, "float16", has_perm=True)
    y = affine_linear(x, w, jnp.int32(1), implementation="reference")
    assert y.dtype == jnp.float16
    assert relative_error(y, expected) < TOLERANCE["float16"]


@pytest.fixture
def poisoned_memory():
    """Leaves NaN in the memory that the next results take, so that an output which nobody writes shows."""
    jax.block_until_ready([jnp.full((size // 4,), jnp.nan) for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)])


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
class TestTriton(KernelTests):
    implementation = "triton"

    @pytest.mark.parametrize("bucket", [8, 16, 32, 64, 256, 512])
    def test_every_candidate(self, bucket):
        x, w, expected = case(12, bucket - 1, 2048, 512, 4, 128, "zero", "bfloat16")
        choices = tuning.candidates(bucket, w.layout, w.words.shape[2])
        for choice in {replace(c, splits=1): c for c in choices if isinstance(c, Config)}.values():
            jax.block_until_ready(jnp.full((bucket - 1, 512), jnp.nan, jnp.bfloat16))
            y = linear_by(choice, x, w, jnp.int32(1), jnp.bfloat16, interpret=False)
            assert relative_error(y, expected) < TOLERANCE["bfloat16"], choice
            again = linear_by(choice, x, w, jnp.int32(1), jnp.bfloat16, interpret=False)
            np.testing.assert_array_equal(np.asarray(again), np.asarray(y))

    def test_named_sizes_take_the_kernel(self):
        backend.reset_counts()
        for K, N in ((576, 576), (4096, 6144), (128, 96)):
            x, w, expected = case(6, 4, K, N, 4, 32, "symmetric", "bfloat16")
            assert relative_error(affine_linear(x, w, jnp.int32(1)), expected) < TOLERANCE["bfloat16"]
        assert backend.chosen_implementations() == {"affine_linear": {"triton": 3}}
        assert backend.num_fallbacks() == 0

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("bits", [4, 8])
    def test_assembly_on_every_word(self, bits, dtype):
        """x is the identity and the codes are all words: the result is code - zero, exactly."""
        K = 16 // bits * 32
        codes = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 32)  # [N, W]
        planes = [(codes >> (bits * j) & (2**bits - 1)).astype(np.uint8) for j in range(16 // bits)]
        codes = np.concatenate(planes, axis=1).T[None]  # [1, K, N]
        for zero in (0.0, float(2**bits - 1)):
            scale = np.ones((1, 1, codes.shape[2]), np.float32)
            w = affine_weights(codes, scale, -zero * scale, bits=bits, group_size=-1)
            y = affine_linear(jnp.eye(K, dtype=dtype), pack(w), jnp.int32(0), implementation="triton")
            np.testing.assert_array_equal(np.asarray(y, np.float32), codes[0].astype(np.float32) - zero)

    def test_stack_beyond_4_gib(self):
        L, K, N = 80, 8192, 16384  # 5.4 GB of words
        packed = pack(random_weights(7, 1, K, N, 4, 128, "symmetric"))
        words = jnp.zeros((L, *packed.words.shape[1:]), jnp.uint16).at[L - 1].set(packed.words[0])
        scale = jnp.zeros((L, *packed.scale.shape[1:]), packed.scale.dtype).at[L - 1].set(packed.scale[0])
        x = jax.random.normal(jax.random.key(0), (3, K), jnp.bfloat16)
        alone = affine_linear(x, packed, jnp.int32(0), implementation="triton")
        stacked = type(packed)(words, scale, None, None, "symmetric", 4, 128, K, N)
        deep = affine_linear(x, stacked, jnp.int32(L - 1), implementation="triton")
        np.testing.assert_array_equal(np.asarray(deep), np.asarray(alone))


def test_float32_activations_take_the_reference_and_no_kernel():
    x, w, expected = case(8, 2, 128, 64, 4, 32, "symmetric", "float32")
    np.testing.assert_allclose(affine_linear(x, w, jnp.int32(1)), expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="x is float32"):
        affine_linear(x, w, jnp.int32(1), implementation="triton")
