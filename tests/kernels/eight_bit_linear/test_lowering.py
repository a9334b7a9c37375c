"""Every variant that tuning can choose lowers for CUDA without a GPU, and choices fit the GPU they are for."""

import json
from importlib import resources

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import backend
from pallas_kernels.eight_bit_linear import EightBitWeights, eight_bit_linear, tuning
from pallas_kernels.eight_bit_linear.api import linear_by
from pallas_kernels.linears import from_entry, to_entry

KINDS = ["NVIDIA A100", "NVIDIA GeForce RTX 4090", "NVIDIA H100", "NVIDIA B200"]
FORMATS = ["int8", "e4m3", "e4m3 blocks"]
SHAPES = ((4096, 28672), (14336, 4096), (576, 1000), (100, 70))


def abstract_weights(kind, K, N):
    array = jax.ShapeDtypeStruct
    scale = (2, -(-N // 128), -(-K // 128)) if kind == "e4m3 blocks" else (2, N, 1)
    codes = array((2, N, K), jnp.int8 if kind == "int8" else jnp.float8_e4m3fn)
    return EightBitWeights(codes, array(scale, jnp.float32))


def on_device(kind):
    """The mesh of one abstract GPU."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def lowered(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("gpu", KINDS)
def test_all_candidates_lower(gpu, kind):
    w, layer = abstract_weights(kind, 4096, 4096), jax.ShapeDtypeStruct((), jnp.int32)
    with on_device(gpu):
        # the numbers of stages and of splits are but numbers in the lowered program
        alike = lambda c: (type(c), *(v for name, v in vars(c).items() if name not in ("num_stages", "splits")))
        variants = {alike(c): (bucket, c) for bucket in tuning.M_BUCKETS for c in tuning.candidates(bucket, w)}
        for bucket, choice in variants.values():
            x = jax.ShapeDtypeStruct((bucket - 1, 4096), jnp.bfloat16)
            call = lambda x, w, layer, c=choice: linear_by(c, x, w, layer, x.dtype, interpret=False)
            text = lowered(call, x, w, layer)
            assert ("triton" in text) or ("mosaic_gpu" in text) or isinstance(choice, tuning.Dequantise)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("gpu", KINDS)
def test_the_rule_fits_any_shape_and_lowers(gpu, kind):
    with on_device(gpu):
        for K, N in SHAPES:
            w = abstract_weights(kind, K, N)
            for bucket in tuning.M_BUCKETS:
                assert tuning.fits(tuning.rule(bucket, w), w), (K, N, bucket)
        w, layer = abstract_weights(kind, 576, 1000), jax.ShapeDtypeStruct((), jnp.int32)
        for dtype in (jnp.bfloat16, jnp.float16):
            x = jax.ShapeDtypeStruct((33, 576), dtype)
            text = lowered(lambda x, w, layer: eight_bit_linear(x, w, layer, implementation="triton"), x, w, layer)
            assert "triton" in text


def test_scales_of_many_groups_lower():
    """With more than 64 groups of K the Hopper kernel reads scales a step ahead."""
    w = abstract_weights("e4m3 blocks", 9216, 256)
    with on_device("NVIDIA H100"):
        choice = tuning.rule(256, w)
        assert isinstance(choice, tuning.HopperConfig)
        assert not isinstance(tuning.choose(256, w, interpret=True), tuning.HopperConfig), "it has no interpreter"
        x, layer = jax.ShapeDtypeStruct((200, 9216), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32)
        text = lowered(lambda x, w, i: linear_by(choice, x, w, i, x.dtype, interpret=False), x, w, layer)
    assert "mosaic_gpu" in text


def test_gpus_without_e4m3_keep_x_in_16_bits():
    w = abstract_weights("e4m3", 4096, 4096)
    for gpu, multiplies in zip(KINDS, (False, True, True, True), strict=True):
        with on_device(gpu):
            assert tuning.multiplies(w) == multiplies
            assert isinstance(tuning.rule(4096, w), tuning.Dequantise) == (not multiplies)


@pytest.mark.parametrize("gpu", ["NVIDIA A100", "NVIDIA H100"])
def test_triton_reads_no_stack_whose_offsets_wrap(gpu):
    small = abstract_weights("int8", 4096, 4096)
    w = EightBitWeights(
        jax.ShapeDtypeStruct((130, 4096, 4096), jnp.int8), jax.ShapeDtypeStruct((130, 4096, 1), jnp.float32)
    )
    x = jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16)
    with on_device(gpu):
        assert tuning.wraps_offsets(w)
        assert not tuning.wraps_offsets(small)
        text = lowered(
            lambda x, w, i: eight_bit_linear(x, w, i, implementation="triton"),
            x,
            w,
            jax.ShapeDtypeStruct((), jnp.int32),
        )
    assert ("mosaic_gpu" in text) == (gpu == "NVIDIA H100")
    assert ("dynamic_slice" in text) == (gpu == "NVIDIA A100")


def test_committed_tables_hold_choices_that_fit():
    folder = resources.files("pallas_kernels.eight_bit_linear") / "tables"
    for file in folder.iterdir():
        table = json.loads(file.read_text())
        with on_device(table["device"]):
            assert backend.device_kind() == table["device"]
            for key, entry in table["entries"].items():
                choice = from_entry(entry, tuning.PATHS)
                assert {**entry, **to_entry(choice, tuning.PATHS)} == entry, key
