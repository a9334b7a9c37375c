"""The Hopper kernel of the affine linear: what it takes, what is chosen, that it lowers; on a GPU its numbers."""

import functools
import json
import math
import re
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import backend
from pallas_kernels.affine_linear import affine_linear, pack, tuning
from pallas_kernels.affine_linear.api import linear_by, partial_by
from pallas_kernels.affine_linear.hopper_program import scratch_of
from pallas_kernels.affine_linear.reference import reference_linear
from pallas_kernels.affine_linear.tuning import HopperConfig
from pallas_kernels.linears import from_entry
from tests.kernels.linear.test_kernel import TOLERANCE, poisoned_memory, relative_error
from tests.kernels.linear.test_lowering import abstract_weights, lowered, on_device
from tests.kernels.linear.test_packing import random_weights

__all__ = ["poisoned_memory"]

GPU = "NVIDIA H200"
BESIDE, IN_TURN, CLUSTER = (64, 4, True, 1), (64, 3, False, 1), (64, 2, False, 2)  # tile_n, warpgroups, ..., splits
MODEL_SHAPES = {
    "Llama 3.1 8B": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "Qwen 2.5 7B": ((3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)),
    "Qwen 3 8B": ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)),
}


def config(tile_m, shape, num_stages, scale_weights=False):
    tile_n, warpgroups, side_by_side, splits = shape
    return HopperConfig(tile_m, tile_n, warpgroups, side_by_side, splits, num_stages, scale_weights)


SCALED = {splits: config(128, (128, 2, True, splits), 2, True) for splits in (1, 4)}
SCALED_NARROW = config(128, (64, 2, True, 2), 2, True)


def hopper_choices(bucket):
    """What tuning can choose for a bucket, one of each that lowers to a program of its own."""
    found = {}
    for N in (4096, 6144, 28672):
        w = abstract_weights(4096, N, 4, 128, "symmetric").layout
        for choice in tuning.candidates(bucket, w, N):
            if isinstance(choice, HopperConfig):
                found[choice.tile_n, choice.warpgroups, choice.side_by_side, choice.splits > 1] = choice, N
    return found.values()


def lower_choice(choice, M, w, dtype=jnp.bfloat16):
    x, layer = jax.ShapeDtypeStruct((M, w.K), dtype), jax.ShapeDtypeStruct((), jnp.int32)
    assert tuning.fits(choice, w.layout, w.words.shape[2])
    text = lowered(lambda x, w, i: partial_by(choice, x, w, i, x.dtype, interpret=False), x, w, layer)
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("bucket", [8, 64, *(pytest.param(bucket, marks=pytest.mark.slow) for bucket in (16, 32, 256))])
def test_all_choices_lower(bucket):
    with on_device(GPU):
        choices = list(hopper_choices(bucket))
        assert len(choices) >= 3
        for choice, N in choices:
            lower_choice(choice, bucket - 1, abstract_weights(4096, N, 4, 128, "symmetric"))


@pytest.mark.parametrize(
    ("choice", "group_size", "kind", "dtype", "N"),
    [
        (config(16, CLUSTER, 8), 64, "zero", jnp.float16, 4032),
        (config(32, IN_TURN, 6), -1, "zero", jnp.bfloat16, 1000),
        (SCALED_NARROW, 64, "zero", jnp.bfloat16, 1000),
    ],
)
def test_formats_lower(choice, group_size, kind, dtype, N):
    with on_device(GPU):
        lower_choice(choice, 33, abstract_weights(4096, N, 4, group_size, kind), dtype)


@pytest.mark.parametrize("group_size", [64, 128, 256, -1])
def test_slots_are_where_tma_can_write(group_size):
    """TMA takes destinations in shared memory, and sources, at multiples of 128 bytes."""
    w = abstract_weights(4096, 28672, 4, group_size, "zero").layout
    with on_device(GPU):
        for bucket, cuts in tuning.HOPPER_CHOICES.items():
            for tile_m, tile_n, warpgroups, side_by_side, num_stages, _ in cuts:
                choice = config(tile_m, (tile_n, warpgroups, side_by_side, 1), num_stages, bucket > 64)
                params = [jnp.dtype("float16"), jnp.dtype("uint8")]
                scratch = scratch_of(choice, w, jnp.dtype("bfloat16"), jnp.dtype("bfloat16"), params)
                for smem in (scratch["x"], scratch["words"], scratch["out"], *scratch["params"]):
                    assert math.prod(smem.shape[1:]) * jnp.dtype(smem.dtype).itemsize % 128 == 0, (choice, smem.shape)


def test_what_the_kernel_takes():
    choice = config(16, IN_TURN, 9)

    def takes(gpu, K=4096, N=4096, bits=4, group_size=128, kind="zero"):
        w = abstract_weights(K, N, bits, group_size, kind)
        with on_device(gpu):
            return tuning.fits(choice, w.layout, w.words.shape[2])

    assert takes("NVIDIA H100")
    assert takes(GPU, group_size=-1)
    assert not takes("NVIDIA A100")
    assert not takes("NVIDIA B200")
    assert not takes(GPU, kind="offset")
    assert not takes(GPU, bits=8)
    assert not takes(GPU, group_size=32)
    assert not takes(GPU, K=4096 + 128)
    w = abstract_weights(4096, 4096 + 64, 4, 128, "zero")
    with on_device(GPU):
        beside = config(32, BESIDE, 3)  # zero points take the registers that symmetric codes leave
        fits = [
            tuning.fits(beside, abstract_weights(4096, 4096, 4, 128, k).layout, 4096) for k in ("symmetric", "zero")
        ]
        assert fits == [True, False]
        assert not tuning.fits(config(16, IN_TURN, 8), w.layout, 4096)  # 3 warpgroups cannot take turns on 8 slots
        assert not tuning.fits(SCALED[1], w.layout, w.words.shape[2])  # no whole tiles of 256 columns
        assert not tuning.fits(config(128, (128, 2, True, 1), 3, True), w.layout, 4096)  # 300 KB of stages


@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_models_take_the_kernel_from_8_to_1024_rows(model):
    with on_device(GPU):
        for K, N in MODEL_SHAPES[model]:
            w = abstract_weights(K, N, 4, 128, "zero")
            for bucket in (8, 16, 32, 64, 128, 256, 512, 1024):
                choice = tuning.rule(bucket, w.layout, N)
                assert isinstance(choice, HopperConfig), (K, N, bucket)
                programs = -(-bucket // choice.tile_m) * N // choice.program_n * choice.splits
                rounds = -(-programs // backend.HOPPER_MULTIPROCESSORS)
                assert programs / rounds / backend.HOPPER_MULTIPROCESSORS > 0.5, (K, N, bucket, choice)
            assert not isinstance(tuning.choose(4, w.layout, N, N), HopperConfig)  # TMA copies 8 rows
            assert not isinstance(tuning.rule(4096, w.layout, N), HopperConfig)


def test_a_choice_of_the_table_that_does_not_fit_makes_room_for_the_rule():
    """Shapes are listed whatever their offsets are: free ones take the Triton kernel."""
    with on_device(GPU):
        for kind, path in (("symmetric", HopperConfig), ("offset", tuning.Config)):
            w = abstract_weights(4096, 6144, 4, 128, kind)
            assert isinstance(tuning.choose(16, w.layout, 6144, 6144), path)


def test_the_interpreter_gets_what_it_can_run():
    with on_device(GPU):
        w = abstract_weights(4096, 4096, 4, 128, "symmetric").layout
        assert isinstance(tuning.choose(64, w, 4096, 4096), HopperConfig)
        assert isinstance(tuning.choose(64, w, 4096, 4096, interpret=True), tuning.Config)


def test_estimates_are_near_the_measured_times():
    table = json.loads((resources.files("pallas_kernels.affine_linear") / "tables" / "nvidia_h200.json").read_text())
    ratios = []
    for key, entry in table["entries"].items():
        M, K, N = map(int, re.findall(r"[MKN](\d+)", key))
        choice, w = from_entry(entry, tuning.PATHS), abstract_weights(K, N, 4, 128, "symmetric").layout
        for estimated in tuning.HOPPER_CHOICES[min(most for most in tuning.HOPPER_CHOICES if most >= M)]:
            *cut, step_us = estimated
            if isinstance(choice, HopperConfig) and cut[1:4] == [choice.tile_n, choice.warpgroups, choice.side_by_side]:
                ratios.append(tuning.hopper_us(choice, step_us, M, w, N) / entry["time_us"])
    assert len(ratios) > 25
    assert 0.9 < min(ratios) <= max(ratios) < 1.1


def problem(seed, M, K, N, group_size, kind, dtype, has_perm=False):
    w = random_weights(seed, 2, K, N, 4, group_size, kind, has_perm)
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(M, K)), dtype)
    return x, pack(w), reference_linear(x, w, jnp.int32(1), jnp.float32)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def _needs_hopper(self):
        if backend.compute_capability() != backend.HOPPER:
            pytest.skip("the kernel is for compute capability 9.0")

    @pytest.mark.parametrize(
        ("choice", "M", "K", "N", "group_size", "kind", "dtype"),
        [
            (config(16, BESIDE, 4), 9, 1024, 768, 128, "symmetric", "bfloat16"),
            (config(16, BESIDE, 4), 17, 512, 200, 128, "zero", "bfloat16"),
            # programs of two tiles of the result, with 10 tiles of K: turns go round
            (config(16, IN_TURN, 9), 16, 2560, 9024, 128, "zero", "bfloat16"),
            (config(16, CLUSTER, 8), 9, 1280, 300, 64, "zero", "float16"),
            (config(8, BESIDE, 5), 7, 1024, 768, 128, "symmetric", "bfloat16"),
            (config(8, IN_TURN, 12), 8, 1280, 9024, 128, "zero", "bfloat16"),
            (config(32, BESIDE, 3), 33, 1024, 768, 128, "symmetric", "bfloat16"),
            (config(32, IN_TURN, 6), 100, 1024, 130, -1, "symmetric", "bfloat16"),
            (config(64, (64, 2, True, 1), 4), 33, 1024, 17024, 128, "symmetric", "bfloat16"),
            (config(64, CLUSTER, 4), 64, 2048, 192, 256, "zero", "bfloat16"),
            (SCALED[1], 200, 1024, 1000, 128, "symmetric", "bfloat16"),
            (SCALED[4], 300, 2304, 512, 128, "zero", "bfloat16"),
            (SCALED_NARROW, 100, 1024, 250, 64, "zero", "float16"),
            (SCALED_NARROW, 200, 768, 17152, 128, "symmetric", "bfloat16"),
        ],
    )
    def test_numbers(self, choice, M, K, N, group_size, kind, dtype):
        x, w, expected = problem(M, M, K, N, group_size, kind, dtype)
        assert tuning.fits(choice, w.layout, w.words.shape[2])
        run = jax.jit(lambda x, w, layer: linear_by(choice, x, w, layer, x.dtype, interpret=False))
        jax.block_until_ready(jnp.full((M, N), jnp.nan, dtype))
        y = run(x, w, jnp.int32(1))
        assert relative_error(y, expected) < TOLERANCE[dtype]
        np.testing.assert_array_equal(np.asarray(run(x, w, jnp.int32(1))), np.asarray(y))
        other = x.at[: M // 2].set(jnp.inf)
        np.testing.assert_array_equal(np.asarray(run(other, w, jnp.int32(1)))[M // 2 :], np.asarray(y)[M // 2 :])

    @pytest.mark.parametrize(("choice", "M"), [(config(16, CLUSTER, 8), 9), (SCALED[1], 130)])
    def test_rows_do_not_depend_on_their_batch(self, choice, M):
        x, w, _ = problem(3, M, 1024, 1024, 128, "zero", "bfloat16")
        whole, part = (linear_by(choice, rows, w, 1, x.dtype, interpret=False) for rows in (x, x[3:]))
        np.testing.assert_array_equal(np.asarray(part), np.asarray(whole)[3:])

    def test_scaled_weights_are_rounded_once(self):
        """x is the identity, so the results are the weights: half a unit in the last place off at most."""
        w = random_weights(13, 1, 256, 256, 4, 64, "zero")
        y = linear_by(SCALED[1], jnp.eye(256, dtype=jnp.bfloat16), pack(w), 0, jnp.dtype("float32"), interpret=False)
        expected = reference_linear(jnp.eye(256, dtype=jnp.float32), w, jnp.int32(0), jnp.float32)
        np.testing.assert_allclose(np.asarray(y), np.asarray(expected), rtol=1.05 * 2**-8)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_unpacking_every_word(self, dtype):
        """x is the identity and the words are all there are: the result is code - 8, exactly."""
        _, w, _ = problem(0, 1, 256, 1024, 256, "symmetric", dtype)
        words = jnp.arange(1 << 16, dtype=jnp.uint16).reshape(1, 1, 1024, 64)
        w = type(w)(words, jnp.ones((1, 1, 1024), jnp.float16), None, None, "symmetric", 4, 256, 256, 1024)
        x, choice = jnp.eye(256, dtype=dtype), config(64, (64, 2, True, 1), 4)
        y = linear_by(choice, x, w, 0, x.dtype, interpret=False)
        codes = np.stack([np.asarray(words)[0, 0] >> (4 * plane) & 15 for plane in range(4)], axis=1)
        np.testing.assert_array_equal(np.asarray(y, np.float32), codes.reshape(1024, 256).T.astype(np.float32) - 8)

    def test_public_call_with_act_order_in_a_loop_over_layers(self):
        x, w, _ = problem(5, 24, 1024, 9216, 128, "zero", "bfloat16", has_perm=True)
        assert isinstance(tuning.choose(24, w.layout, w.N, w.N), HopperConfig)
        zeros = jnp.zeros((24, w.N), jnp.float32)
        linear = functools.partial(affine_linear, out_dtype=jnp.float32)
        loop = jax.jit(lambda x, w: lax.fori_loop(0, 2, lambda i, total: total + linear(x, w, i), zeros))
        each = [affine_linear(x, w, layer, implementation="reference") for layer in range(2)]
        assert relative_error(loop(x, w), np.sum([np.asarray(y, np.float32) for y in each], axis=0)) < 6e-3

    def test_stack_beyond_4_gib(self):
        L, K, N = 80, 8192, 16384  # 5.4 GB of words
        packed = pack(random_weights(7, 1, K, N, 4, 128, "symmetric"))
        words = jnp.zeros((L, *packed.words.shape[1:]), jnp.uint16).at[L - 1].set(packed.words[0])
        scale = jnp.zeros((L, *packed.scale.shape[1:]), packed.scale.dtype).at[L - 1].set(packed.scale[0])
        x = jax.random.normal(jax.random.key(0), (16, K), jnp.bfloat16)
        alone = affine_linear(x, packed, jnp.int32(0))
        deep = affine_linear(x, type(packed)(words, scale, None, None, "symmetric", 4, 128, K, N), jnp.int32(L - 1))
        assert isinstance(tuning.choose(16, packed.layout, N, N), HopperConfig)
        np.testing.assert_array_equal(np.asarray(deep), np.asarray(alone))
