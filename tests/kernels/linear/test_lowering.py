"""Every variant that tuning can choose lowers for CUDA without a GPU, and the tables hold choices that fit."""

import json
import re
from dataclasses import replace
from importlib import resources

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.affine_linear import PackedAffine, affine_linear, tuning
from pallas_kernels.affine_linear.dequantise import dequantise_layer
from pallas_kernels.affine_linear.kernel import fused_linear
from pallas_kernels.affine_linear.unpack import assembly
from pallas_kernels.linears import from_entry, to_entry

KINDS = ["NVIDIA A100", "NVIDIA GeForce RTX 4090", "NVIDIA H100", "NVIDIA B200"]


def abstract_weights(K, N, bits, group_size, kind):
    tile = 16 // bits * (64 if K % (64 * 16 // bits) == 0 and group_size != 32 else 32)
    width, tiles, padded = tile * bits // 16, -(-K // tile), -(-N // 64) * 64
    groups = (2, 1 if group_size == -1 else -(-tiles * tile // group_size), padded)
    array = jax.ShapeDtypeStruct
    shift = {"symmetric": None, "zero": array(groups, jnp.uint8), "offset": array(groups, jnp.float32)}[kind]
    g = K if group_size == -1 else group_size
    return PackedAffine(
        array((2, tiles, padded, width), jnp.uint16), array(groups, jnp.float16), shift, None, kind, bits, g, K, N
    )


def on_device(kind):
    """The mesh of one abstract GPU; older JAX lowers for CUDA without one."""
    try:
        device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
    except TypeError as error:
        raise AssertionError(f"this JAX has no abstract device {kind}") from error


def lowered(f, *args):
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text or "mosaic_gpu" in text
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_all_candidates_lower(kind):
    w = abstract_weights(4096, 4096, 4, 128, "zero")
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    with on_device(kind):
        for bucket in (8, 16, 32, 64, 256, 512):
            choices = tuning.candidates(bucket, w.layout, 4096)
            fused = {replace(c, splits=1): c for c in choices if isinstance(c, tuning.Config)}
            assert fused or bucket > 256
            for config in fused.values():
                x = jax.ShapeDtypeStruct((bucket - 1, 4096), jnp.bfloat16)
                lowered(
                    lambda x, w, layer, c=config: fused_linear(x, w, layer, c, x.dtype, interpret=False), x, w, layer
                )


@pytest.mark.parametrize("kind", ["NVIDIA A100", "NVIDIA H100"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("bits", "group_size", "shift"), [(4, 32, "offset"), (4, -1, "zero"), (8, 32, "symmetric"), (8, 128, "zero")]
)
def test_formats_lower_for_few_and_many_rows(bits, group_size, shift, dtype, kind):
    w = abstract_weights(576, 1000, bits, group_size, shift)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    with on_device(kind):
        for M in (1, 40):
            x = jax.ShapeDtypeStruct((M, 576), dtype)
            lowered(lambda x, w, layer: affine_linear(x, w, layer, implementation="triton"), x, w, layer)
        lowered(lambda w, layer: dequantise_layer(w, layer, dtype, interpret=False), w, layer)


def test_committed_tables_hold_choices_that_fit():
    folder = resources.files("pallas_kernels.affine_linear") / "tables"
    for file in folder.iterdir():
        table = json.loads(file.read_text())
        with on_device(table["device"]):
            for key, entry in table["entries"].items():
                choice = from_entry(entry, tuning.PATHS)
                assert {**entry, **to_entry(choice, tuning.PATHS)} == entry, key
                bits, g, _, K, N = map(int, re.findall(r"-?\d+", key))
                w = abstract_weights(K, N, bits, g, "symmetric")
                assert tuning.fits(choice, w.layout, w.words.shape[2]), key


def test_the_rule_has_a_fitting_choice_for_any_shape_and_gpu():
    for kind in KINDS:
        with on_device(kind):
            for K, N in ((128, 64), (576, 1536), (14336, 4096), (8192, 57344)):
                w = abstract_weights(K, N, 4, 32, "symmetric")
                for bucket in tuning.M_BUCKETS:
                    choice = tuning.rule(bucket, w.layout, w.words.shape[2])
                    assert tuning.fits(choice, w.layout, w.words.shape[2])
                    assert bucket > 128 or not isinstance(choice, tuning.Dequantise)


@pytest.mark.parametrize(("kind", "expected"), [("NVIDIA A100", {"fma"}), ("NVIDIA H100", {"sub", "mul"})])
@pytest.mark.parametrize("bits", [4, 8])
def test_arithmetic_on_pairs_of_bfloat16_exists_on_the_gpu(bits, kind, expected):
    with on_device(kind):
        text = "".join(assembly(bits, plane, "bfloat16", scales) for plane in (0, 1) for scales in (0, 1))
    assert set(re.findall(r"(\w+)\.rn\.bf16x2", text)) == expected
